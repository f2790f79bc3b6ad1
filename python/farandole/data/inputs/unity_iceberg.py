# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Iceberg tables of Unity Catalog by name: its REST catalog of Iceberg sends the metadata of a
table and temporary credentials for its files. A `CatalogSession` makes the requests, so that
the token goes to the workspace alone; pyiceberg reads the metadata and the manifests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from farandole.data.inputs.catalog_names import TableInCatalog, note_table_location
from farandole.data.inputs.iceberg_credentials import (
    CREDENTIAL_PROPERTIES,
    EXPIRY_PROPERTY,
    SERVICE_PROPERTIES,
)
from farandole.data.inputs.table_snapshot import TableFile, refuse_files_elsewhere
from farandole.stores.catalog_requests import read_text_field
from farandole.stores.store_options import StorageOptions
from farandole.stores.vended_credentials import (
    API_PATH,
    VendedCredentials,
    check_location,
    vended_storage_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.data.inputs.unity_catalog import CatalogTable
    from farandole.stores.catalog_requests import CatalogSession

_REST_PATHS: Final = (f"{API_PATH}/iceberg-rest", f"{API_PATH}/iceberg")
"""Paths of the REST catalog of Iceberg: of Databricks, and of the open-source server."""
_DELEGATION_HEADER: Final = {"X-Iceberg-Access-Delegation": "vended-credentials"}
_PREFIX_PATTERN: Final = re.compile(r"[\w%=-]+(\.[\w%=-]+)*(/[\w%=-]+(\.[\w%=-]+)*)*")
_MAX_METADATA_BYTES: Final = 64 << 20
_SERVICE_OPTIONS: Final = {
    "endpoint_url": "s3.endpoint",
    "aws_endpoint_url": "s3.endpoint",
    "aws_endpoint": "s3.endpoint",
    "region": "s3.region",
    "region_name": "s3.region",
    "aws_region": "s3.region",
}
"""Names of options that users may give, and of properties."""
_MAX_EXPIRY_DIGITS: Final = 14
_MILLISECONDS_PER_SECOND: Final = 1e3


@dataclass(frozen=True)
class IcebergTableCredentials(VendedCredentials):
    """A function that loads an Iceberg table again for the credentials that come with it."""

    def request_values(self) -> dict[str, Any]:
        """Like `VendedCredentials.request_values`."""
        return _credentials_in_answer(self.load_table(), self.session.label_subject(self.subject))

    def load_table(self) -> dict[str, Any]:
        """Returns the catalog's answer to a request for the table.

        Raises:
            ValueError: As `CatalogSession.request_json`.
            OSError: As `CatalogSession.request_json`.
        """
        return self.session.request_json(
            self.path,
            None,
            self.session.label_subject(self.subject),
            self.advice,
            headers=_DELEGATION_HEADER,
            max_bytes=_MAX_METADATA_BYTES,
        )


def load_iceberg_table(
    table: CatalogTable, advice: str, storage_options: Mapping[str, Any] | None
) -> Any:
    """Loads a table from the REST catalog of Iceberg, and registers its credentials for its
    location in this process.

    Args:
        table: The table.
        advice: Advice for a request that is refused.
        storage_options: Endpoint and region, if the catalog does not send them.

    Returns:
        A table of pyiceberg.

    Raises:
        ImportError: pyiceberg is not installed.
        ValueError: No credentials for S3, another option, or metadata that cannot be read.
        OSError: The catalog refuses a request, or does not answer.
    """
    try:
        from pyiceberg.exceptions import ValidationError  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        from pyiceberg.io import load_file_io  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        from pyiceberg.table import StaticTable  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        from pyiceberg.table.metadata import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
            TableMetadataUtil,
        )
    except ImportError as error:
        raise ImportError(
            f"{table.label} is an Iceberg table, reading it needs pyiceberg: pip install "
            "'farandole[iceberg]'"
        ) from error
    unknown = sorted(set(storage_options or {}) - set(_SERVICE_OPTIONS))
    if unknown:
        raise ValueError(
            f"{table.label} is an Iceberg table, for which the storage option {unknown[0]!r} is "
            f"not known: {', '.join(_SERVICE_OPTIONS)} are"
        )
    path = _table_path(table, advice)
    credentials = IcebergTableCredentials(
        table.session, f"the table {table.name}", path, (), advice
    )
    answer = credentials.load_table()
    values = _credentials_in_answer(answer, table.label)
    credentials.note_grant(values)
    service = _service_options(answer, storage_options or {})
    options = vended_storage_options(credentials, table.location, service)
    properties = {CREDENTIAL_PROPERTIES[name]: values[name] for name in CREDENTIAL_PROPERTIES}
    properties |= {
        _SERVICE_OPTIONS[name]: str(value)
        for name, value in options.items()
        if name in _SERVICE_OPTIONS
    }
    metadata_location = read_text_field(answer, "metadata-location", table.label)
    try:
        metadata = TableMetadataUtil.parse_obj(_section(answer, "metadata"))
    except (ValueError, ValidationError) as error:
        kind = type(error).__name__
        raise ValueError(f"{table.label} has metadata that cannot be read: {kind}") from None
    location = check_location(metadata.location, table.label)
    _refuse_path_elsewhere(table, f"{location}/metadata")
    # The properties of an answer could choose a class of Python that reads files.
    file_io: Any = load_file_io(properties, location)
    open_input = file_io.new_input

    def open_input_below_location(path: str) -> Any:
        _refuse_path_elsewhere(table, path)
        return open_input(path)

    file_io.new_input = open_input_below_location
    StorageOptions((location,), options).apply_to_process()
    note_table_location(location, TableInCatalog(table.label, table.data_format))
    no_catalog: Any = None
    return StaticTable(
        tuple(table.name.split(".")), metadata, metadata_location, file_io, no_catalog
    )


def _refuse_path_elsewhere(table: CatalogTable, path: str) -> None:
    refuse_files_elsewhere(table.label, table.location, [TableFile(path)])


def _table_path(table: CatalogTable, advice: str) -> str:
    """Returns the path of the table in the REST catalog."""
    catalog, schema, name = (quote(part, safe="") for part in table.name.split("."))
    rest, config = _find_rest_catalog(table.session, catalog, table.label, advice)
    prefix = {
        **_section(config, "defaults"),
        **_section(config, "overrides"),
    }.get("prefix", "")
    if prefix and (not isinstance(prefix, str) or _PREFIX_PATTERN.fullmatch(prefix) is None):
        raise ValueError(f"{table.label}: the answer has no usable field prefix")
    below = f"{prefix}/" if prefix else ""
    return f"{rest}/v1/{below}namespaces/{schema}/tables/{name}"


def _find_rest_catalog(
    session: CatalogSession, catalog: str, label: str, advice: str
) -> tuple[str, dict[str, Any]]:
    """Returns the path of the REST catalog of Iceberg, and its configuration for a catalog."""
    *others, last = _REST_PATHS
    for path in others:
        try:
            return path, session.request_json(
                f"{path}/v1/config?warehouse={catalog}", None, label, advice
            )
        except FileNotFoundError:
            continue
    return last, session.request_json(f"{last}/v1/config?warehouse={catalog}", None, label, advice)


def _section(answer: dict[str, Any], name: str) -> dict[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, dict) else {}


def _properties_in_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties with which the files of a table are read."""
    location, config = str(answer.get("metadata-location")), _section(answer, "config")
    given, best = answer.get("storage-credentials"), ""
    chosen: dict[str, Any] = {}
    for entry in given if isinstance(given, list) else []:
        prefix = str(entry.get("prefix") or "") if isinstance(entry, dict) else ""
        if location.startswith(prefix) and len(prefix) > len(best):
            best, chosen = prefix, _section(entry, "config")
    return config | chosen


def _credentials_in_answer(answer: dict[str, Any], label: str) -> dict[str, Any]:
    """Returns the values of the storage option `credentials`.

    Raises:
        ValueError: There are none for S3.
    """
    properties = _properties_in_answer(answer)
    if not all(properties.get(name) for name in CREDENTIAL_PROPERTIES.values()):
        raise ValueError(
            f"{label} comes without temporary credentials for S3. Iceberg tables on other "
            "services, and of catalogs that give out no credentials, are not read by name: read it "
            "with Spark, and fit on the DataFrame"
        )
    values: dict[str, Any] = {
        name: read_text_field(properties, property_name, label)
        for name, property_name in CREDENTIAL_PROPERTIES.items()
    }
    expires = str(properties.get(EXPIRY_PROPERTY) or "")
    if expires.isdecimal() and len(expires) <= _MAX_EXPIRY_DIGITS:
        values["expires"] = int(expires) / _MILLISECONDS_PER_SECOND
    return values


def _service_options(answer: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns endpoint and region of an answer, unless the user gives them by one of their names,
    and the options of the user.
    """
    properties = _properties_in_answer(answer)
    taken = {_SERVICE_OPTIONS[name] for name in given}
    options: dict[str, Any] = {}
    for option, names in SERVICE_PROPERTIES.items():
        found = [properties[name] for name in names if isinstance(properties.get(name), str)]
        if found and _SERVICE_OPTIONS[option] not in taken:
            options[option] = found[0]
    return {**options, **given}
