# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Iceberg tables, by their metadata: `pyiceberg` reads it."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from farandole._native import store as native
from farandole.data.inputs.catalog_names import table_at_location
from farandole.data.inputs.iceberg_credentials import use_vended_credentials
from farandole.data.inputs.iceberg_deletes import DeleteFiles
from farandole.data.inputs.iceberg_values import (
    identity_partition_values,
    require_parquet_format,
    scalar_of_column_type,
    schema_columns,
)
from farandole.data.inputs.optional_package_types import is_instance_by_name
from farandole.data.inputs.table_snapshot import (
    TableColumn,
    TableFile,
    TableSnapshot,
    full_file_path,
    refuse_files_elsewhere,
    refuse_local_files,
)

_METADATA_FILE_PATTERN = re.compile(r"(?:v(\d+)|(\d+)-[^/]+?)(?:\.gz)?\.metadata\.json(?:\.gz)?")


def is_iceberg_table(value: Any) -> bool:
    """Returns whether a value is a table of pyiceberg, or a scan of one: its rows at a snapshot.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "pyiceberg", "Table", "TableScan")


def open_iceberg_table(path: str) -> Any:
    """Returns the Iceberg table in a directory, by its newest metadata file; `None` where there is
    none.

    Args:
        path: A path or URL.

    Raises:
        ImportError: There is one, and pyiceberg is not installed.
    """
    directory = native.Store(path)
    if any(magic in path for magic in "*?[") or not directory.exists("metadata"):
        return None
    versions = []
    for name, *_ in directory.list_directory("metadata"):
        found = _METADATA_FILE_PATTERN.fullmatch(name)
        if found is not None:
            versions.append((int(found[1] or found[2]), name))
    if not versions:
        return None
    try:
        from pyiceberg.table import StaticTable  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{path} is an Iceberg table, reading it needs pyiceberg: pip install "
            "'farandole[iceberg]'"
        ) from error
    return StaticTable.from_metadata(f"{directory.url.rstrip('/')}/metadata/{max(versions)[1]}")


def iceberg_snapshot(
    source: Any, version: int | None = None, timestamp: dt.datetime | str | None = None
) -> TableSnapshot:
    """Returns an Iceberg table at a snapshot.

    Args:
        source: A table of pyiceberg, or a scan of it without a filter.
        version: Number of the snapshot; default: the current one.
        timestamp: Chooses the newest snapshot that is not younger.

    Raises:
        ValueError: The table has something that is not read, or no such snapshot; the message names
            the table.
    """
    table, names, version = _scanned_table(source, version)
    metadata = table.metadata
    location = full_file_path("", table.location()).rstrip("/")
    has_vended_credentials = use_vended_credentials(table, location)
    name = f"the Iceberg table {location}"
    if timestamp is not None:
        version = _version_at(table, timestamp, name)
    snapshot = table.current_snapshot() if version is None else table.snapshot_by_id(version)
    if version is not None and snapshot is None:
        known = ", ".join(str(each.snapshot_id) for each in table.snapshots()[-20:])
        raise ValueError(f"{name} has no snapshot {version}, there are: {known or 'none'}")
    # As in Spark, a table has its current columns, and an older snapshot the columns of its time.
    is_past = version is not None and snapshot.schema_id is not None
    schema = table.schemas()[snapshot.schema_id] if is_past else table.schema()
    columns = tuple(
        field for field in schema_columns(table, schema) if names is None or field.name in names
    )
    if snapshot is None:
        raise ValueError(f"{name} has no snapshot: nothing has been written to it")
    is_bound = has_vended_credentials or table_at_location(location) is not None
    entries = _manifest_entries(table, snapshot, name, location, is_bound=is_bound)
    files = tuple(_data_files(table, entries, schema, columns, name))
    version_parts = [table.location(), metadata.table_uuid, snapshot.snapshot_id, schema.schema_id]
    chosen = "" if names is None else f" {' '.join(sorted(names))}"
    return TableSnapshot(
        name,
        location,
        str(snapshot.snapshot_id),
        columns,
        files,
        f"iceberg {' '.join(map(str, version_parts))}{chosen}",
    )


def _scanned_table(source: Any, version: int | None) -> tuple[Any, set[str] | None, int | None]:
    """Returns the table of a scan, the columns that it selects, and its snapshot."""
    if not is_instance_by_name(source, "pyiceberg", "TableScan"):
        return source, None, version
    from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from pyiceberg.table import StaticTable  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    if not isinstance(source.row_filter, AlwaysTrue) or source.limit is not None:
        raise ValueError(
            "a scan of an Iceberg table with a filter or a limit is not read: pass "
            "scan.to_arrow_batch_reader(), or prepare_data(where=...)"
        )
    no_catalog: Any = None
    table = StaticTable((), source.table_metadata, "", source.io, no_catalog)
    selected = None if "*" in source.selected_fields else set(source.selected_fields)
    return table, selected, source.snapshot_id if version is None else version


def _version_at(table: Any, timestamp: dt.datetime | str, name: str) -> int:
    moment = parse_timestamp(timestamp)
    found = table.snapshot_as_of_timestamp(int(moment.timestamp() * 1000))
    if found is None:
        raise ValueError(f"{name} has no snapshot at {moment.isoformat()} or before")
    return found.snapshot_id


def parse_timestamp(timestamp: dt.datetime | str) -> dt.datetime:
    """Returns a moment; without a time zone, it is in UTC.

    Args:
        timestamp: ISO 8601, or a datetime.

    Raises:
        ValueError: Another text.
    """
    moment = (
        timestamp if isinstance(timestamp, dt.datetime) else dt.datetime.fromisoformat(timestamp)
    )
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)


def _manifest_entries(
    table: Any, snapshot: Any, name: str, location: str, *, is_bound: bool
) -> list[Any]:
    """Returns the entries of the manifests of a snapshot, before one of their files is read.

    Args:
        table: The table.
        snapshot: The snapshot.
        name: Description of the table, for messages.
        location: Location of the table.
        is_bound: Whether all files must be below the location.

    Raises:
        ValueError: A data or delete file that is not below the location, or a file of this host in
            a table that is elsewhere.
    """
    entries = [
        entry
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]
    files = [TableFile(full_file_path("", entry.data_file.file_path)) for entry in entries]
    refuse_local_files(name, location, files)
    if is_bound:
        refuse_files_elsewhere(name, location, files)
    return entries


def _data_files(
    table: Any, entries: list[Any], schema: Any, columns: tuple[TableColumn, ...], name: str
) -> list[TableFile]:
    """Returns the data files of a snapshot, sorted by path, with their deleted rows."""
    from pyiceberg.manifest import DataFileContent  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    data, deletes = [], DeleteFiles(table, name)
    for entry in entries:
        file = entry.data_file
        if file.content == DataFileContent.DATA:
            require_parquet_format(file, name)
            data.append(entry)
        else:
            deletes.read_delete_file(entry)
    known = {column.field_id: column for column in columns}
    initial = {
        known[field.field_id].name: scalar_of_column_type(
            field.initial_default, known[field.field_id].arrow_field.type
        )
        for field in schema.fields
        if field.field_id in known and getattr(field, "initial_default", None) is not None
    }
    files = []
    for entry in sorted(data, key=lambda entry: entry.data_file.file_path):
        file = entry.data_file
        files.append(
            TableFile(
                full_file_path("", file.file_path),
                initial | identity_partition_values(table, file, columns),
                deletes.deleted_row_positions(entry),
            )
        )
    return files
