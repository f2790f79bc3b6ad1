# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names of tables in Unity Catalog among paths: `uc://catalog.schema.table`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
    is_file_name = path.rpartition(".")[2].lower() in _FILE_SUFFIXES
    return None if is_file_name or is_path_present(Path(path)) else path


def resolve_table_names(source: Any, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Returns a source with the locations of tables in the place of their names. This process, and
    processes that get the options of a location, then read it with credentials of the catalog.

    Args:
        source: A path, URL or name of a table, or a list of them; any other value is returned as it
            is.
        storage_options: Further options of the locations, such as an endpoint.

    Raises:
        ValueError: A name without three parts, no means to sign in, or a table that is not read.
        OSError: The catalog refuses a request, or does not answer.
    """
    if isinstance(source, list | tuple):
        return [resolve_table_names(path, storage_options) for path in source]
    name = table_name_of_path(source) if isinstance(source, str) else None
    if name is None:
        return source
    from farandole.data.inputs.unity_catalog import open_table_location  # noqa: PLC0415 - few sources

    return open_table_location(name, storage_options)
