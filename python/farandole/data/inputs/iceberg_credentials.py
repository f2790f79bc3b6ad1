# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Temporary credentials that a REST catalog of Iceberg gives out with a table: the native store
reads the table's files with them, and loads the table again before they expire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from farandole.data.inputs.optional_package_types import is_instance_by_name

_CREDENTIAL_PROPERTIES: Final = {
    "key": "s3.access-key-id",
    "secret": "s3.secret-access-key",
    "token": "s3.session-token",
}
"""Values of the storage option `credentials` for S3, and names of pyiceberg."""
_EXPIRY_PROPERTY: Final = "s3.session-token-expires-at-ms"
_SERVICE_PROPERTIES: Final = {
    "endpoint_url": ("s3.endpoint",),
    "region": ("s3.region", "client.region"),
}
_MILLISECONDS_PER_SECOND: Final = 1e3
_CATALOGS: Final[dict[tuple[Any, ...], Any]] = {}
"""Catalogs of this process that tables are loaded from again."""


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
    properties: tuple[tuple[str, str], ...] = field(repr=False)
    identifier: tuple[str, ...]

    def __call__(self) -> dict[str, Any]:
        """Requests credentials.

        Returns:
            The values of the storage option `credentials`, with their expiry in seconds since 1970
            if the catalog says it.

        Raises:
            ValueError: The catalog gives out no credentials any more.
        """
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        key = (self.catalog, self.properties)
        if key not in _CATALOGS:
            _CATALOGS[key] = load_catalog(self.catalog, **dict(self.properties))
        table = _CATALOGS[key].load_table(self.identifier)
        found = _vended_credentials(table)
        if found is None:
            name = ".".join(self.identifier)
            raise ValueError(f"the catalog gives out no credentials for S3 any more: {name}")
        return found


def use_vended_credentials(table: Any, location: str) -> None:
    """Lets this process, and processes that get the options of the location, read the files of a
    table with the credentials that its catalog has given out; does nothing for other tables.

    Args:
        table: A table of pyiceberg.
        location: URL of its directory.
    """
    catalog: Any = getattr(table, "catalog", None)
    is_of_rest = is_instance_by_name(catalog, "pyiceberg", "RestCatalog")
    if not is_of_rest or not location.startswith("s3") or _vended_credentials(table) is None:
        return
    from farandole.stores.store_options import CREDENTIALS_OPTION, StorageOptions  # noqa: PLC0415 - loaded with fsspec

    texts = {name: str(value) for name, value in catalog.properties.items() if value is not None}
    function = IcebergCredentials(catalog.name, tuple(sorted(texts.items())), table.name())
    given = table.io.properties
    options: dict[str, Any] = {CREDENTIALS_OPTION: function}
    for option, names in _SERVICE_PROPERTIES.items():
        found = [given[name] for name in names if given.get(name)]
        options |= {option: found[0]} if found else {}
    StorageOptions((location,), options).apply_to_process()


def _vended_credentials(table: Any) -> dict[str, Any] | None:
    """Returns the credentials that came with a table; `None` if the user has given them."""
    given, own = table.io.properties, table.catalog.properties
    keys = {
        name: given.get(property_name) for name, property_name in _CREDENTIAL_PROPERTIES.items()
    }
    if not all(keys.values()) or keys["key"] == own.get(_CREDENTIAL_PROPERTIES["key"]):
        return None
    expires = str(given.get(_EXPIRY_PROPERTY) or "")
    if not expires.isdecimal():
        return keys
    return {**keys, "expires": int(expires) / _MILLISECONDS_PER_SECOND}
