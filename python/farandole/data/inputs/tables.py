# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tables that their own client reads: DuckDB relations and Iceberg tables."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_RELATION_BATCH_ROWS = 65536
_METADATA_FILE_PATTERN = re.compile(r"(?:v(\d+)|(\d+)-[^/]+?)(?:\.gz)?\.metadata\.json(?:\.gz)?")


def _is_instance_by_name(value: Any, *names: str) -> bool:
    return any(f"{kind.__module__}.{kind.__name__}" in names for kind in type(value).__mro__)


def is_duckdb_relation(value: Any) -> bool:
    """Returns whether a value is a relation of DuckDB.

    Args:
        value: Anything.
    """
    return _is_instance_by_name(
        value,
        "duckdb._relation.DuckDBPyRelation",
        "duckdb.duckdb.DuckDBPyRelation",
        "_duckdb.DuckDBPyRelation",
    )


def relation_schema(relation: Any) -> pa.Schema:
    """Returns the types of a relation's columns.

    Args:
        relation: Of DuckDB.
    """
    return _relation_reader(relation.limit(0)).schema


def relation_batches(relation: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Runs the query of a relation, whose result is never whole in memory.

    Args:
        relation: Of DuckDB.
        columns: That are wanted.
    """
    quoted = ('"' + name.replace('"', '""') + '"' for name in columns)
    yield from _relation_reader(relation.project(", ".join(quoted)))


def _relation_reader(relation: Any) -> Any:
    # Versions before 1.4 have the other name.
    name = "to_arrow_reader" if hasattr(relation, "to_arrow_reader") else "fetch_record_batch"
    return getattr(relation, name)(_RELATION_BATCH_ROWS)


def is_pyiceberg_table(value: Any) -> bool:
    """Returns whether a value is a table of pyiceberg.

    Args:
        value: Anything.
    """
    return _is_instance_by_name(value, "pyiceberg.table.Table")


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


def iceberg_table_at(source: Any) -> Any:
    """Returns the Iceberg table at a path, or the only path of a list; `None` for everything else.

    Args:
        source: Perhaps a path.

    Raises:
        ImportError: There is one, and pyiceberg is not installed.
        ValueError: One among several paths.
    """
    given = source if isinstance(source, list | tuple) else [source]
    if not all(isinstance(one, str | os.PathLike) for one in given):
        return None
    tables = {path: open_iceberg_table(path) for path in map(os.fspath, given)}
    found = [path for path, table in tables.items() if table is not None]
    if found and len(given) > 1:
        raise ValueError(f"an Iceberg table must be the only source: {found[0]}")
    return tables[found[0]] if found else None


def iceberg_fingerprint(table: Any) -> str:
    """Returns the identity of a table's rows at its snapshot.

    Args:
        table: Of pyiceberg.
    """
    snapshot = table.current_snapshot()
    told = [table.location(), table.metadata.table_uuid, snapshot and snapshot.snapshot_id]
    return f"iceberg {' '.join(map(str, [*told, table.metadata.current_schema_id]))}"


def iceberg_schema(table: Any) -> pa.Schema:
    """Returns the types of a table's columns.

    Args:
        table: Of pyiceberg.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    return schema_to_pyarrow(table.schema(), include_field_ids=False)


def iceberg_batches(table: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the current snapshot, without deleted rows.

    Args:
        table: A pyiceberg table.
        columns: Columns to read.
    """
    for batch in table.scan(selected_fields=tuple(columns)).to_arrow_batch_reader():
        yield batch.select(columns)


def iceberg_field_ids(table: Any) -> dict[str, int]:
    """Returns the number of each column, which stays the same when the column is renamed.

    Args:
        table: Of pyiceberg.
    """
    return {field.name: field.field_id for field in table.schema().fields}


def iceberg_data_files(table: Any) -> tuple[str, list[str]]:
    """Returns the directory of a table, and the files in it that hold exactly its rows.

    Args:
        table: Of pyiceberg.

    Raises:
        ValueError: Its files alone do not tell its rows or columns.
    """
    where = table.location()
    hint = "prepare_data reads it"
    if len(table.schemas()) > 1:
        raise ValueError(f"the Iceberg table {where} had other columns before, {hint}")
    base = native.Store(where)
    files = []
    for task in table.scan().plan_files():
        if task.delete_files:
            raise ValueError(
                f"the Iceberg table {where} has rows that are deleted in other files, {hint}"
            )
        if str(task.file.file_format).rpartition(".")[2].upper() != "PARQUET":
            raise ValueError(
                f"the Iceberg table {where} has files that are not Parquet, {hint}: "
                f"{task.file.file_path}"
            )
        path = native.full_path(task.file.file_path)
        if not path.startswith(base.url.rstrip("/") + "/"):
            raise ValueError(
                f"the Iceberg table {where} has files in other directories, {hint}: {path}"
            )
        files.append(path[len(base.url.rstrip("/")) + 1 :])
    return where, sorted(files)
