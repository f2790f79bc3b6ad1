# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables of Unity Catalog by name, without Spark: `uc://catalog.schema.table`.

name --REST--> location and ID of the table --REST--> credentials for its files, which the
native store requests again before they expire
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from farandole.data.inputs.catalog_names import TableInCatalog, note_table_location
from farandole.data.inputs.catalog_requests import CatalogSession, read_text_field
from farandole.data.inputs.credential_failures import log_first_failure
from farandole.stores.store_options import CREDENTIALS_OPTION, StorageOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLES_PATH: Final = "/api/2.1/unity-catalog/tables/"
_CREDENTIALS_PATH: Final = "/api/2.1/unity-catalog/temporary-table-credentials"
_METASTORE_PATH: Final = "/api/2.1/unity-catalog/metastore_summary"
_READ_SCHEMES: Final = ("s3", "s3a", "gs", "abfss")
"""Schemes of locations that are read. A catalog must not choose a file of this host.
`refuse_local_files` says the same of the files of a table.
"""
_READ_FORMATS: Final = ("DELTA", "PARQUET")
_READ_TABLE_TYPES: Final = ("MANAGED", "EXTERNAL", "STREAMING_TABLE")
_MAX_LOCATION_CHARACTERS: Final = 2048
_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_REGION_PATTERN: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_MILLISECONDS_PER_SECOND: Final = 1e3
_MAX_EXPIRY_MILLISECONDS: Final = 10**14
"""Year 5138: datetimes end in the year 9999."""
_CREDENTIAL_FIELDS: Final = {
    "aws_temp_credentials": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    "azure_user_delegation_sas": {"sas_token": "sas_token"},
    "azure_aad": {"token": "aad_token"},
    "gcp_oauth_token": {"token": "oauth_token"},
}
"""Kinds of credentials in an answer: names of a storage option's credentials, and of fields."""
_PERMISSION_ADVICE: Final = (
    "the user of the token needs SELECT on the table and EXTERNAL USE SCHEMA on its schema, and "
    "the metastore must allow external data access"
)


@dataclass(frozen=True)
class CatalogTable:
    """A table of a catalog.

    Attributes:
        session: the catalog.
        name: `catalog.schema.table`.
        table_id: the catalog's UUID of the table.
        location: URL of its directory.
        data_format: `DELTA` or `PARQUET`.
    """

    session: CatalogSession
    name: str
    table_id: str
    location: str
    data_format: str

    @classmethod
    def find_table(cls, session: CatalogSession, name: str) -> CatalogTable:
        """Asks a catalog for a table.

        Args:
            session: The catalog.
            name: `catalog.schema.table`.

        Raises:
            ValueError: The table has a form or a location that is not read.
            OSError: The catalog refuses the request, or does not answer.
        """
        label = session.table_label(name)
        found = session.request_json(
            _TABLES_PATH + quote(name, safe=""), None, label, _PERMISSION_ADVICE
        )
        kind, data_format = found.get("table_type"), found.get("data_source_format")
        if kind not in _READ_TABLE_TYPES or data_format not in _READ_FORMATS:
            raise ValueError(
                f"{label} is not read: its type is {_shown(kind)}, and its format "
                f"{_shown(data_format)}. Tables in the formats {' and '.join(_READ_FORMATS)} are: "
                "read others with Spark, and fit on the DataFrame"
            )
        columns = found.get("columns")
        has_mask = isinstance(columns, list) and any(
            isinstance(column, dict) and column.get("mask") for column in columns
        )
        if found.get("row_filter") or has_mask:
            raise ValueError(
                f"{label} has a row filter or column masks, which files do not obey: read it with "
                "Spark, and fit on the DataFrame"
            )
        table_id = read_text_field(found, "table_id", label)
        location = read_text_field(found, "storage_location", label)
        return cls(session, name, table_id, _checked_location(location, label), data_format)

    def storage_options(self) -> dict[str, Any]:
        """Returns the options by which the native store reads the files of the table."""
        options: dict[str, Any] = {CREDENTIALS_OPTION: TableCredentials(self)}
        is_on_s3 = self.location.startswith("s3")
        if is_on_s3 and not any(os.environ.get(name) for name in _REGION_VARIABLES):
            region = self._metastore_region()
            options |= {} if region is None else {"region": region}
        return options

    def _metastore_region(self) -> str | None:
        """Returns the region of the catalog, in which its buckets usually are."""
        try:
            found = self.session.request_json(_METASTORE_PATH, None, "the metastore", "")
        except (OSError, ValueError):  # a permission that reading does not need
            return None
        region = found.get("region")
        is_region = isinstance(region, str) and _REGION_PATTERN.fullmatch(region) is not None
        return region if is_region else None


@dataclass(frozen=True)
class TableCredentials:
    """Temporary credentials for the files of a table, to read them: each call requests new ones.

    It is sent to the processes that read, and contains the token or secret of the session.
    """

    table: CatalogTable

    def __call__(self) -> dict[str, Any]:
        """Requests credentials.

        Returns:
            The values of the storage option `credentials`, and their expiry in seconds since 1970.

        Raises:
            ValueError: Credentials of a kind that is not known.
            OSError: The catalog refuses the request, or does not answer.
        """
        label = self.table.session.table_label(self.table.name)
        with log_first_failure(
            f"credentials for {label}", lambda error: str(error).removeprefix(f"{label}: ")
        ):
            return self.request_credentials()

    def request_credentials(self) -> dict[str, Any]:
        """Like a call, without a warning about a failure."""
        table = self.table
        label = table.session.table_label(table.name)
        body = {"table_id": table.table_id, "operation": "READ"}
        found = table.session.request_json(_CREDENTIALS_PATH, body, label, _PERMISSION_ADVICE)
        kind = next(
            (kind for kind in _CREDENTIAL_FIELDS if isinstance(found.get(kind), dict)), None
        )
        if kind is None:
            raise ValueError(f"{label} has no credentials of a kind that is known")
        keys: dict[str, Any] = {
            name: read_text_field(found[kind], field, label)
            for name, field in _CREDENTIAL_FIELDS[kind].items()
        }
        expires = found.get("expiration_time")
        is_whole = isinstance(expires, int) and not isinstance(expires, bool)
        if expires is None or not is_whole or not 0 < expires < _MAX_EXPIRY_MILLISECONDS:
            raise ValueError(f"{label} has credentials without the time of their expiry")
        return {**keys, "expires": expires / _MILLISECONDS_PER_SECOND}


def register_table_location(name: str, storage_options: Mapping[str, Any] | None) -> str:
    """Asks the catalog for a table, registers credentials for its location in this process, and
    returns the location. Processes that get the options of the location read it with them, too.

    Args:
        name: `catalog.schema.table`.
        storage_options: Further options of the location, such as an endpoint.

    Raises:
        ValueError: No token or secret, or a table that is not read.
        OSError: The catalog refuses a request, or does not answer.
    """
    table = CatalogTable.find_table(CatalogSession.from_environment(name), name)
    # Here an error has all its words; of an error in a renewal, the native store shows the type.
    TableCredentials(table).request_credentials()
    options = {**table.storage_options(), **(storage_options or {})}
    StorageOptions((table.location,), options).apply_to_process()
    label = table.session.table_label(name)
    note_table_location(table.location, TableInCatalog(label, table.data_format))
    return table.location


def _checked_location(location: str, label: str) -> str:
    """Returns the location of a table without a slash at its end.

    Raises:
        ValueError: It is no URL of a service that is read.
    """
    parts = urlsplit(location)
    is_plain = (
        location.isprintable()
        and len(location) <= _MAX_LOCATION_CHARACTERS
        and not any(character in location for character in "?#*[")
        and "//" not in parts.path
        and ".." not in parts.path.split("/")
    )
    has_key = bool(parts.path.strip("/"))
    if not is_plain or parts.scheme not in _READ_SCHEMES or not parts.netloc or not has_key:
        raise ValueError(
            f"{label} is at a location that is not read: {_shown(location)}. Locations with one of "
            f"{', '.join(f'{scheme}://' for scheme in _READ_SCHEMES)} are"
        )
    return location.rstrip("/")


def _shown(value: Any) -> str:
    """Returns the text of a value from a catalog, for messages."""
    return repr(value)[:200]
