# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Opens data that other programs wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from farandole._native.reader import Dataset, partition_values
from farandole.data.inputs.directory_partitions import common_directory
from farandole.data.inputs.file_discovery import (
    FilesBelowDirectory,
    find_files,
    is_file_path,
    is_glob_pattern,
    is_prepared_directory,
)
from farandole.data.inputs.tables import open_if_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.data.inputs.table_snapshot import TableSnapshot
    from farandole.stores.store import AbstractFilesystemStore


_PARQUET_SUFFIXES = (".parquet", ".pq")


def open_dataset(
    paths: str | Sequence[str] | TableSnapshot, types: Mapping[str, str] | None = None
) -> Dataset:
    """Opens a directory: prepared data by its manifest, a Delta or Iceberg table by its log, others
    by footers.

    Args:
        paths: A path or URL of a directory; or files: one, a pattern, or a list of files,
            directories and patterns; or a table at one version.
        types: Types of columns whose values are in the names of directories, as NumPy or `utf8`.

    Raises:
        FileNotFoundError: There is no Parquet.
        ImportError: It is a Delta or an Iceberg table, and deltalake or pyiceberg is not installed.
        ValueError: Files that disagree, a table with a feature that is not read; files of prepared
            data, which opens as one directory only.
        OSError: Files that cannot be read, or a preparation that has not ended.
    """
    table = open_if_table(paths)
    if table is not None:
        refuse_types_for_table(table, types)
        return table.open_dataset()
    return open_parquet(cast("str | Sequence[str]", paths), types)


def refuse_types_for_table(table: TableSnapshot, types: Mapping[str, Any] | None) -> None:
    """Refuses types for a table, which has its own.

    Args:
        table: A table at one version.
        types: Types of columns whose values are in the names of directories.

    Raises:
        ValueError: There are such types.
    """
    if types:
        raise ValueError(
            f"types {dict(types)}: they are for values in names of directories, but "
            f"{table.name} has the types of all its columns"
        )


def open_parquet(paths: str | Sequence[str], types: Mapping[str, str] | None = None) -> Dataset:
    """Opens Parquet files that are not a table, like `open_dataset`.

    Args:
        paths: As for `open_dataset`.
        types: As for `open_dataset`.

    Raises:
        FileNotFoundError: There is no Parquet.
        ValueError: Files that disagree, or files of prepared data.
        OSError: Files that cannot be read, or a preparation that has not ended.
    """
    if (
        not isinstance(paths, str)
        or is_glob_pattern(paths)
        or (paths.endswith(_PARQUET_SUFFIXES) and is_file_path(paths))
    ):
        given = dict(types or {})
        return _open_files([paths] if isinstance(paths, str) else paths, given)
    return Dataset.open_url(paths, dict(types or {}))


def is_directory_path(paths: str | Sequence[str] | TableSnapshot) -> bool:
    """Returns whether `open_dataset` would open a directory. It may contain other files than files
    of rows.

    Args:
        paths: As for `open_dataset`.
    """
    return isinstance(paths, str) and not is_glob_pattern(paths) and not is_file_path(paths)


def _open_files(paths: Sequence[str], types: dict[str, str]) -> Dataset:
    """Opens files below the common directory of all paths; the names of its subdirectories become
    columns.
    """
    locations = [find_files(path) for path in paths]
    files = sorted(
        {
            file.path
            for location in locations
            for file in location.files
            if file.path.endswith(_PARQUET_SUFFIXES)
        }
    )
    if not files:
        raise FileNotFoundError(f"none of these is a Parquet file: {', '.join(paths)}")
    _refuse_prepared_files(locations)
    common = common_directory(location.base for location in locations)
    relative = [path[len(common) + 1 :] for path in files]
    values = [(path, partition_values(path)) for path in relative]
    return Dataset.open_files(common or "/", values, types)


def _refuse_prepared_files(found: Sequence[FilesBelowDirectory]) -> None:
    """Refuses files of prepared data: its manifest says which ones count, and how they were
    encoded.
    """
    inside = next(
        (
            base
            for base in sorted({location.base for location in found})
            if is_prepared_directory(base)
        ),
        None,
    )
    for location in found:
        for name in location.prepared_directories:
            directory = f"{location.base.rstrip('/')}/{name}" if name else location.base
            if inside is None and any(
                file.path.startswith(f"{directory.rstrip('/')}/") for file in location.files
            ):
                inside = directory
    if inside is not None:
        raise ValueError(
            f"Farandole prepared the data in {inside}, so files there cannot be read by patterns, "
            "in lists or one by "
            "one: give that directory alone as the path"
        )


def write_dataset_link(store: AbstractFilesystemStore, dataset: Dataset) -> str:
    """Returns a URL by which every process opens these very files, without a look at each.

    Args:
        store: Store that receives the small file behind the URL, if one is needed.
        dataset: The opened data set.
    """
    if dataset.is_prepared:
        return dataset.url
    url = f"{store.prefix_path.rstrip('/')}/plans/{dataset.fingerprint}"
    dataset.write_link_manifest(url)
    return url
