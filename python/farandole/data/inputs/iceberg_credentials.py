# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Temporary credentials that a REST catalog of Iceberg sends with a table: the native store
reads the table's files with them, and loads the table again before they expire.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from farandole.data.inputs.optional_package_types import is_instance_by_name
from farandole.stores.credential_failures import log_first_failure

CREDENTIAL_PROPERTIES: Final = {
    "key": "s3.access-key-id",
    "secret": "s3.secret-access-key",
    "token": "s3.session-token",
}
"""Values of the storage option `credentials` for S3, and names of pyiceberg."""
EXPIRY_PROPERTY: Final = "s3.session-token-expires-at-ms"
SERVICE_PROPERTIES: Final = {
    "endpoint_url": ("s3.endpoint",),
    "region": ("s3.region", "client.region"),
}
_MILLISECONDS_PER_SECOND: Final = 1e3
_MAX_EXPIRY_DIGITS: Final = 14
"""Digits of milliseconds since 1970: later than the year 5138, datetimes end."""
_ANSWER_SECONDS: Final = 30.0
"""Longest silence of a catalog during a request."""

_log = logging.getLogger("farandole")


@dataclass(frozen=True)
class IcebergCredentials:
    """A function that loads a table again, and returns the credentials that come with it.

    It is sent to the processes that read, with the properties of the catalog, such as a token.

    Attributes:
        catalog: Name of the catalog.
        properties: Its properties.
        identifier: Namespace and name of the table.
    """

    catalog: str
    properties: dict[str, Any] = field(repr=False, hash=False)
    identifier: tuple[str, ...]

    def __call__(self) -> dict[str, Any]:
        """Requests credentials.

        Returns:
            The values of the storage option `credentials`, with their expiry in seconds since 1970
            if the catalog says it.

        Raises:
            ValueError: The catalog sends no credentials with the table any more.
        """
        name = ".".join(self.identifier)
        # Messages of pyiceberg may have properties of the catalog, such as a token.
        with log_first_failure(
            f"credentials for the Iceberg table {name} of the catalog {self.catalog}",
            lambda error: type(error).__name__,
        ):
            catalog = _open_catalog(self.catalog, self.properties)
            try:
                found = _vended_credentials(catalog.load_table(self.identifier))
            finally:
                catalog.close()
            if found is None:
                raise ValueError(f"the catalog sends no credentials for S3 any more: {name}")
        return found


def _open_catalog(name: str, properties: dict[str, Any]) -> Any:
    """Returns a new catalog: a process that was forked must not use the connections of another."""
    from pyiceberg.catalog.rest import RestCatalog  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    class TimedCatalog(RestCatalog):
        def _create_session(self) -> Any:
            session: Any = super()._create_session()
            session.request = functools.partial(session.request, timeout=_ANSWER_SECONDS)
            return session

    return TimedCatalog(name, **properties)


def use_vended_credentials(table: Any, location: str) -> bool:
    """Lets this process, and processes that get the options of the location, read the files of a
    table with the credentials that its catalog has sent with it; does nothing for other tables.

    Args:
        table: A table of pyiceberg.
        location: URL of its directory. For a whole bucket, whose options would hold for all tables
            and stores in it, the user's own credentials are used.

    Returns:
        Whether the credentials are used.
    """
    catalog: Any = getattr(table, "catalog", None)
    is_of_rest = is_instance_by_name(catalog, "pyiceberg", "RestCatalog")
    if not is_of_rest or not location.startswith("s3") or _vended_credentials(table) is None:
        return False
    if not urlsplit(location).path.strip("/"):
        _log.warning(
            "the Iceberg table %s is a whole bucket: it is read with your own credentials, and not "
            "with those of its catalog",
            location,
        )
        return False
    from farandole.stores.store_options import CREDENTIALS_OPTION, StorageOptions  # noqa: PLC0415 - loaded with fsspec

    function = IcebergCredentials(catalog.name, dict(catalog.properties), table.name())
    given = table.io.properties
    options: dict[str, Any] = {CREDENTIALS_OPTION: function}
    for option, names in SERVICE_PROPERTIES.items():
        found = [given[name] for name in names if given.get(name)]
        options |= {option: found[0]} if found else {}
    StorageOptions((location,), options).apply_to_process()
    return True


def _vended_credentials(table: Any) -> dict[str, Any] | None:
    """Returns the credentials that came with a table; `None` if the user has given them."""
    given, own = table.io.properties, table.catalog.properties
    keys = {name: given.get(property_name) for name, property_name in CREDENTIAL_PROPERTIES.items()}
    if not all(keys.values()) or keys["key"] == own.get(CREDENTIAL_PROPERTIES["key"]):
        return None
    expires = str(given.get(EXPIRY_PROPERTY) or "")
    if not expires.isdecimal() or len(expires) > _MAX_EXPIRY_DIGITS:
        return keys
    return {**keys, "expires": int(expires) / _MILLISECONDS_PER_SECOND}
