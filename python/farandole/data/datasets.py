# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Opens data that other programs wrote."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from urllib.parse import unquote

from farandole._native import store as native
from farandole._native.reader import Dataset
from farandole.data.inputs.files import (
    FoundFiles,
    find_files,
    is_file_path,
    is_glob_pattern,
    is_prepared_directory,
)
from farandole.data.inputs.tables import iceberg_data_files, open_iceberg_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.stores.store import AbstractFilesystemStore


_PARQUET_SUFFIXES = (".parquet", ".pq")
_HIVE_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def open_dataset(paths: str | Sequence[str]) -> Dataset:
    """Opens a directory: prepared data by its manifest, a Delta or Iceberg table by its log, others
    by footers.

    Args:
        paths: A path or URL of a directory; or files: one, a pattern, or a list of files,
            directories and patterns.

    Raises:
        FileNotFoundError: There is no Parquet.
        ImportError: It is a Delta or an Iceberg table, and deltalake or pyiceberg is not installed.
        ValueError: Files that disagree, a table that deltalake cannot read, an Iceberg table with
            deleted rows; files of prepared data, which opens as one directory only.
        OSError: Files that cannot be read, or a preparation that has not ended.
    """
    if (
        not isinstance(paths, str)
        or is_glob_pattern(paths)
        or (paths.endswith(_PARQUET_SUFFIXES) and is_file_path(paths))
    ):
        return _open_files([paths] if isinstance(paths, str) else paths)
    url = paths
    iceberg = open_iceberg_table(url)
    if iceberg is not None:
        where, files = iceberg_data_files(iceberg)
        return Dataset.open_files(where, [(path, {}) for path in files])
    if not native.Store(url).exists("_delta_log"):
        return Dataset.open_url(url)
    from pyarrow import dataset as ds  # noqa: PLC0415 - only for such tables

    from farandole.data.inputs.sources import delta_table  # noqa: PLC0415 - as above

    try:
        fragments = list(delta_table(url).to_pyarrow_dataset().get_fragments())
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "deltalake":
            raise
        raise ValueError(f"the Delta table {url} cannot be read: {error}") from error
    values = [ds.get_partition_keys(fragment.partition_expression) for fragment in fragments]
    told = [
        {name: str(value) for name, value in one.items() if value is not None} for one in values
    ]
    return Dataset.open_files(
        url, list(zip((fragment.path for fragment in fragments), told, strict=True))
    )


def is_directory_path(paths: str | Sequence[str]) -> bool:
    """Returns whether `open_dataset` would open a directory. It may contain other files than files
    of rows.

    Args:
        paths: As for `open_dataset`.
    """
    return isinstance(paths, str) and not is_glob_pattern(paths) and not is_file_path(paths)


def _open_files(paths: Sequence[str]) -> Dataset:
    """Opens files below the common directory of all paths; the names of its subdirectories become
    columns.
    """
    places = [find_files(path) for path in paths]
    files = sorted(
        {
            file.path
            for place in places
            for file in place.files
            if file.path.endswith(_PARQUET_SUFFIXES)
        }
    )
    if not files:
        raise FileNotFoundError(f"none of these is a Parquet file: {', '.join(paths)}")
    _refuse_prepared_files(places)
    bases = zip(*(place.base.rstrip("/").split("/") for place in places), strict=False)
    common = "/".join(
        parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, bases)
    )
    relative = [path[len(common) + 1 :] for path in files]
    return Dataset.open_files(common or "/", [(path, _partition_values(path)) for path in relative])


def _refuse_prepared_files(places: Sequence[FoundFiles]) -> None:
    """Refuses files of prepared data: its manifest says which ones count, and how they were
    encoded.
    """
    inside = next(
        (base for base in sorted({place.base for place in places}) if is_prepared_directory(base)),
        None,
    )
    for place in places:
        for name in place.prepared_directories:
            directory = f"{place.base.rstrip('/')}/{name}" if name else place.base
            if inside is None and any(
                file.path.startswith(f"{directory.rstrip('/')}/") for file in place.files
            ):
                inside = directory
    if inside is not None:
        raise ValueError(
            f"Farandole prepared the data in {inside}, so files there cannot be read by patterns, "
            "in lists or one by "
            "one: give that directory alone as the path"
        )


def _partition_values(path: str) -> dict[str, str]:
    """Returns the values in the names of a file's directories."""
    pairs = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part]
    return {unquote(name): unquote(value) for name, value in pairs if value != _HIVE_NULL_PARTITION}


def linked_dataset_url(store: AbstractFilesystemStore, dataset: Dataset) -> str:
    """Returns a URL by which every process opens these very files, without a look at each.

    Args:
        store: Where the small file behind the URL goes, if one is needed.
        dataset: The opened data set.
    """
    if dataset.is_prepared:
        return dataset.url
    url = f"{store.prefix_path.rstrip('/')}/plans/{dataset.fingerprint}"
    dataset.write_link_manifest(url)
    return url
