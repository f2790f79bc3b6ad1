# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of tables in Unity Catalog among paths: `uc://catalog.schema.table`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole._native import store as native
from farandole.stores.durable_writes import is_path_present

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_SCHEME: Final = "uc://"
HOST_VARIABLE: Final = "DATABRICKS_HOST"
_NAME_PART: Final = r"[^./\\:*?\[\s\x00-\x1f\x7f]{1,255}"
_NAME_PATTERN: Final = re.compile(rf"{_NAME_PART}(\.{_NAME_PART}){{2}}")
_FILE_SUFFIXES: Final = frozenset(
    [
        "parquet",
        "pq",
        "csv",
        "tsv",
        "json",
        "jsonl",
        "ndjson",
        "arrow",
        "ipc",
        "feather",
        "gz",
        "zst",
        "bz2",
        "lz4",
    ]
)
"""Last parts of names without a scheme that are files and not tables."""


@dataclass(frozen=True)
class TableInCatalog:
    """Facts about a table that this process has found by its name.

    Attributes:
        label: description of the table and its catalog, for messages.
        data_format: `DELTA` or `PARQUET`.
    """

    label: str
    data_format: str


_TABLES_BY_LOCATION: Final[dict[str, TableInCatalog]] = {}


def note_table_location(location: str, table: TableInCatalog) -> None:
    """Takes note of a table that is found by its name.

    Args:
        location: URL of its directory.
        table: The table.
    """
    _TABLES_BY_LOCATION[native.full_path(location).rstrip("/")] = table


def table_at_location(location: str) -> TableInCatalog | None:
    """Returns the table that this process has found by its name, and that is at a location.

    Args:
        location: A path or URL.
    """
    if not _TABLES_BY_LOCATION:
        return None
    return _TABLES_BY_LOCATION.get(native.full_path(location).rstrip("/"))


def table_name_of_path(path: str) -> str | None:
    """Returns the name `catalog.schema.table` if a path is the name of a table of Unity Catalog;
    else `None`.

    Args:
        path: `uc://catalog.schema.table`; or the name alone, if `DATABRICKS_HOST` is set and no
            file has this name.

    Raises:
        ValueError: A name after `uc://` without three parts.
    """
    if path.startswith(NAME_SCHEME):
        name = path.removeprefix(NAME_SCHEME)
        if _NAME_PATTERN.fullmatch(name) is None:
            raise ValueError(f"a table of Unity Catalog is uc://catalog.schema.table: {path}")
        return name
    if not os.environ.get(HOST_VARIABLE) or _NAME_PATTERN.fullmatch(path) is None:
        return None
    if path.rpartition(".")[2].lower() in _FILE_SUFFIXES:
        return None
    try:
        return None if is_path_present(Path(path)) else path
    except OSError:  # such as a name that is too long for a file
        return path


def resolve_table_names(source: Any, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Returns a source with the location of a table in the place of its name. If it is a name, this
    asks the catalog, and registers credentials for the location in this process.

    Args:
        source: A path, URL or name of a table, or a list of paths and URLs, or of one name; any
            other value is returned as it is.
        storage_options: Further options of the location, such as an endpoint.

    Raises:
        ValueError: A name without three parts or among other sources, no token or secret, or a
            table that is not read.
        OSError: The catalog refuses a request, or does not answer.
    """
    if isinstance(source, list | tuple):
        if len(source) > 1:
            for path in source:
                if isinstance(path, str) and table_name_of_path(path) is not None:
                    raise ValueError(f"a table of Unity Catalog must be the only source: {path}")
        return [resolve_table_names(path, storage_options) for path in source]
    name = table_name_of_path(source) if isinstance(source, str) else None
    if name is None:
        return source
    from farandole.data.inputs.unity_catalog import register_table_location  # noqa: PLC0415 - few sources

    try:
        return register_table_location(name, storage_options)
    except (OSError, ValueError) as error:
        if source.startswith(NAME_SCHEME):
            raise
        raise type(error)(
            f"{error}. No file has the name {source}: because {HOST_VARIABLE} is set, such names "
            f"are tables of Unity Catalog, also without {NAME_SCHEME}"
        ) from error
