# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables of Unity Catalog by name, without Spark: `uc://catalog.schema.table`.

name --REST--> location and ID of the table --REST--> credentials for its files, which the
native store requests again before they expire

An Iceberg table comes from the catalog's own REST catalog of Iceberg, with its credentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from farandole.data.inputs.catalog_names import TableInCatalog, note_table_location
from farandole.stores.catalog_requests import CatalogSession, read_text_field
from farandole.stores.store_options import StorageOptions
from farandole.stores.vended_credentials import (
    API_PATH,
    VendedCredentials,
    check_location,
    refuse_static_credentials,
    shorten_value,
    vended_storage_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ICEBERG_FORMAT: Final = "ICEBERG"
_READ_FORMATS: Final = ("DELTA", "PARQUET", ICEBERG_FORMAT)
_READ_TABLE_TYPES: Final = ("MANAGED", "EXTERNAL", "STREAMING_TABLE")
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
        data_format: `DELTA`, `PARQUET` or `ICEBERG`.
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
        label = session.label_subject(f"the table {name}")
        path = f"{API_PATH}/tables/{quote(name, safe='')}"
        found = session.request_json(path, None, label, _PERMISSION_ADVICE)
        kind, data_format = found.get("table_type"), found.get("data_source_format")
        if kind not in _READ_TABLE_TYPES or data_format not in _READ_FORMATS:
            raise ValueError(
                f"{label} is not read: its type is {shorten_value(kind)}, and its format "
                f"{shorten_value(data_format)}. Tables in the formats "
                f"{', '.join(_READ_FORMATS[:-1])} and {_READ_FORMATS[-1]} are: "
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
        return cls(session, name, table_id, check_location(location, label), data_format)

    @property
    def label(self) -> str:
        """Description for messages."""
        return self.session.label_subject(f"the table {self.name}")

    @property
    def credentials(self) -> VendedCredentials:
        """The function that requests credentials to read the files."""
        body = (("table_id", self.table_id), ("operation", "READ"))
        path = f"{API_PATH}/temporary-table-credentials"
        subject = f"the table {self.name}"
        return VendedCredentials(self.session, subject, path, body, _PERMISSION_ADVICE)


def register_table(name: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Asks the catalog for a table, registers credentials for its location in this process, and
    returns the location, or an Iceberg table of pyiceberg. Processes that get the options of the
    location read it with them, too.

    Args:
        name: `catalog.schema.table`.
        storage_options: Further options of the location, such as an endpoint.

    Raises:
        ImportError: An Iceberg table, and pyiceberg is not installed.
        TypeError: Options with credentials.
        ValueError: No token or secret, or a table that is not read.
        OSError: The catalog refuses a request, or does not answer.
    """
    refuse_static_credentials(f"the table {name}", storage_options or {})
    table = CatalogTable.find_table(CatalogSession.from_environment(f"the table {name}"), name)
    if table.data_format == ICEBERG_FORMAT:
        from farandole.data.inputs.unity_iceberg import load_iceberg_table  # noqa: PLC0415 - few tables

        return load_iceberg_table(table, _PERMISSION_ADVICE, storage_options)
    credentials = table.credentials
    # Here an error has all its words; of an error in a renewal, the native store shows the type.
    credentials.request_grant()
    options = vended_storage_options(credentials, table.location, dict(storage_options or {}))
    StorageOptions((table.location,), options).apply_to_process()
    note_table_location(table.location, TableInCatalog(table.label, table.data_format))
    return table.location
