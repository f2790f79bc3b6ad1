# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of Unity Catalog among paths: `uc://catalog.schema.table`, and
`uc://catalog.schema.volume/path`. Options of the other paths.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole._native import store as native
from farandole.stores.catalog_requests import HOST_VARIABLE
from farandole.stores.durable_writes import is_path_present
from farandole.stores.unity_volumes import NAME_PATTERN, NAME_SCHEME, VolumePath, VolumeReader

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        if NAME_PATTERN.fullmatch(name) is not None:
            return name
        if NAME_PATTERN.fullmatch(name.partition("/")[0]) is not None and "/" in name:
            return None  # a path in a volume
        raise ValueError(
            "a table of Unity Catalog is uc://catalog.schema.table, and a path in a volume "
            f"uc://catalog.schema.volume/path: {path}"
        )
    if not os.environ.get(HOST_VARIABLE) or NAME_PATTERN.fullmatch(path) is None:
        return None
    if path.rpartition(".")[2].lower() in _FILE_SUFFIXES:
        return None
    try:
        return None if is_path_present(Path(path)) else path
    except OSError:  # such as a name that is too long for a file
        return path


def resolve_source_options(source: Any, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Returns a source with locations in the place of names of Unity Catalog, and puts the options
    of its paths in force in this process. For a name, this asks the catalog, and registers
    credentials for the location. Without options, a path in a store of this process is read with
    the options of the store.

    Args:
        source: A path, URL or name of a table, or a list of paths and URLs, or of one name; any
            other value is returned as it is.
        storage_options: Options of all paths, such as an endpoint or a region.

    Returns:
        A path or URL, or a list of these; a table of pyiceberg, for a name of an Iceberg table; or
        the other value.

    Raises:
        TypeError: Options for a source without a path, or credentials for a name.
        ValueError: A name without three parts or among other sources, no token or secret, or a
            table that is not read.
        OSError: The catalog refuses a request, or does not answer.
    """
    is_list = isinstance(source, list | tuple)
    given = [
        os.fspath(path) if isinstance(path, str | os.PathLike) else path
        for path in (source if is_list else [source])
    ]
    texts = [path for path in given if isinstance(path, str)]
    others = [path for path in given if not isinstance(path, str)]
    if storage_options and others:
        kind = type(others[0]).__name__
        raise TypeError(f"storage_options are for paths and names of tables, and not for a {kind}")
    tables = [path for path in texts if table_name_of_path(path) is not None]
    if tables and len(given) > 1:
        raise ValueError(f"a table of Unity Catalog must be the only source: {tables[0]}")
    if tables:
        found: Any = _find_table(tables[0], storage_options)
        return [found] if is_list and isinstance(found, str) else found
    if others:
        return source
    reader = VolumeReader(storage_options)
    found = [_apply_path_options(path, storage_options, reader) for path in texts]
    return found if is_list else found[0]


def _apply_path_options(
    path: str, storage_options: Mapping[str, Any] | None, reader: VolumeReader
) -> str:
    from farandole.stores.store_options import (  # noqa: PLC0415 - loaded with fsspec
        StorageOptions,
        apply_options_covering_url,
    )

    volume = VolumePath.parse(path)
    if volume is not None:
        return reader.register_path(volume)
    url = native.full_path(path)
    # The location by itself may have another table in the meantime.
    _TABLES_BY_LOCATION.pop(url.rstrip("/"), None)
    if storage_options:
        StorageOptions((url,), storage_options).apply_to_process()
    else:
        apply_options_covering_url(url)
    return path


def _find_table(path: str, storage_options: Mapping[str, Any] | None) -> Any:
    from farandole.data.inputs.unity_catalog import register_table  # noqa: PLC0415 - few sources

    name = table_name_of_path(path)
    assert name is not None  # noqa: S101 - the caller has checked it
    try:
        return register_table(name, storage_options)
    except (OSError, ValueError) as error:
        if path.startswith(NAME_SCHEME):
            raise
        raise type(error)(
            f"{error}. No file has the name {path}: because {HOST_VARIABLE} is set, such names "
            f"are tables of Unity Catalog, also without {NAME_SCHEME}"
        ) from error
