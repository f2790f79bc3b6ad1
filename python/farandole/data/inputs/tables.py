# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables by their own clients: DuckDB relations, Delta and Iceberg tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from farandole.data.inputs.catalog_names import resolve_source_options, table_at_location
from farandole.data.inputs.delta_tables import delta_snapshot, is_delta_table, read_delta_table
from farandole.data.inputs.iceberg_tables import (
    iceberg_snapshot,
    is_iceberg_table,
    open_iceberg_table,
    parse_timestamp,
)
from farandole.data.inputs.optional_package_types import is_instance_by_name
from farandole.data.inputs.table_snapshot import TableSnapshot, refuse_files_elsewhere

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

_RELATION_BATCH_ROWS = 65536
_FILE_SUFFIXES = (".parquet", ".pq")
"""Endings of names in a list of paths that are not looked up as tables."""


def is_duckdb_relation(value: Any) -> bool:
    """Returns whether a value is a relation of DuckDB.

    Args:
        value: Anything.
    """
    return is_instance_by_name(value, "duckdb", "DuckDBPyRelation")


def relation_schema(relation: Any) -> pa.Schema:
    """Returns the types of a relation's columns.

    Args:
        relation: Relation of DuckDB.
    """
    return _relation_reader(relation.limit(0)).schema


def run_relation_query(relation: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Runs the query of a relation, whose result is never whole in memory.

    Args:
        relation: Relation of DuckDB.
        columns: Columns that are wanted.
    """
    quoted = ('"' + name.replace('"', '""') + '"' for name in columns)
    yield from _relation_reader(relation.project(", ".join(quoted)))


def _relation_reader(relation: Any) -> Any:
    # Versions before 1.4 have the other name.
    name = "to_arrow_reader" if hasattr(relation, "to_arrow_reader") else "fetch_record_batch"
    return getattr(relation, name)(_RELATION_BATCH_ROWS)


def is_table(value: Any) -> bool:
    """Returns whether a value is a Delta or Iceberg table, and not the path of one.

    Args:
        value: Anything.
    """
    return isinstance(value, TableSnapshot) or is_delta_table(value) or is_iceberg_table(value)


def open_table(
    source: Any,
    version: int | None = None,
    timestamp: dt.datetime | str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> TableSnapshot:
    """Returns a Delta or Iceberg table at one version.

    All readers take it as a source: `ParquetLoader`, `prepare_data`, `frame_loader`, and
    `fit_on_parquet(path=...)`. It keeps its version when others write to the table, also when it is
    pickled for other processes.

    Args:
        source: Path or URL of the directory of a table, or `uc://catalog.schema.table`; or a table
            of deltalake or pyiceberg.
        version: Version of a Delta table, or number of a snapshot of an Iceberg table; default: the
            newest.
        timestamp: Chooses the newest version that is not younger: a datetime or ISO 8601; without a
            time zone, it is in UTC.
        storage_options: Credentials and endpoints of a path, as for a store; further options, such
            as a region or an endpoint, of a name.

    Raises:
        ImportError: deltalake or pyiceberg is not installed.
        TypeError: Options for an object of deltalake or pyiceberg, which has its own.
        ValueError: No table, no such version, or a feature of the table that is not read; the
            message names the table.
    """
    if version is not None and timestamp is not None:
        raise ValueError("at most one of version and timestamp may be given")
    source = resolve_source_options(source, storage_options)
    found = open_if_table(source, version, timestamp)
    if found is None:
        raise ValueError(f"neither a Delta table nor an Iceberg table: {source}")
    return found


def open_if_table(
    source: Any, version: int | None = None, timestamp: dt.datetime | str | None = None
) -> TableSnapshot | None:
    """Returns the table that a source is, or whose only path it is; `None` for everything else.

    Args:
        source: Perhaps a table, or the path of one.
        version: As for `open_table`.
        timestamp: As for `open_table`.

    Raises:
        ImportError: There is one, and deltalake or pyiceberg is not installed.
        ValueError: One among several paths, or a table that is not read.
    """
    moment = None if timestamp is None else parse_timestamp(timestamp)
    if isinstance(source, TableSnapshot):
        if version is not None or moment is not None:
            raise ValueError(f"{source.name} is at version {source.version} already")
        return source
    if is_delta_table(source):
        is_other = version is not None or moment is not None
        return (
            read_delta_table(source.table_uri, version, moment)
            if is_other
            else delta_snapshot(source)
        )
    if is_iceberg_table(source):
        return iceberg_snapshot(source, version, moment)
    given = source if isinstance(source, list | tuple) else [source]
    if not all(isinstance(one, str | os.PathLike) for one in given):
        return None
    paths = [os.fspath(one) for one in given]
    if len(paths) == 1:
        return _open_table_in_directory(paths[0], version, moment)
    for path in paths:
        if (
            not path.endswith(_FILE_SUFFIXES)
            and _open_table_in_directory(path, version, moment) is not None
        ):
            raise ValueError(f"a Delta or Iceberg table must be the only source: {path}")
    return None


def _open_table_in_directory(
    path: str, version: int | None, moment: dt.datetime | None
) -> TableSnapshot | None:
    snapshot = read_delta_table(path, version, moment)
    iceberg = open_iceberg_table(path) if snapshot is None else None
    in_catalog = table_at_location(path)
    if in_catalog is not None:
        # A Delta table without its log would be read with its deleted rows.
        found = "DELTA" if snapshot is not None else "PARQUET" if iceberg is None else "ICEBERG"
        if found != in_catalog.data_format:
            raise ValueError(
                f"{in_catalog.label} has the format {in_catalog.data_format} in the catalog, and "
                f"its directory the format {found}: {path}"
            )
    if snapshot is None:
        return None if iceberg is None else iceberg_snapshot(iceberg, version, moment)
    if in_catalog is not None:
        refuse_files_elsewhere(in_catalog.label, snapshot.location, snapshot.files)
    return snapshot
