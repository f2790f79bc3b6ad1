# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Opens data that other programs wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole._native import store as native
from farandole._native.reader import Dataset, partition_values
from farandole.data.inputs.files import (
    FoundFiles,
    find_files,
    is_file_path,
    is_glob_pattern,
    is_prepared_directory,
)
from farandole.data.inputs.partitions import common_directory
from farandole.data.inputs.tables import (
    iceberg_data_files,
    iceberg_field_ids,
    open_iceberg_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farandole.stores.store import AbstractFilesystemStore


_PARQUET_SUFFIXES = (".parquet", ".pq")


def open_dataset(paths: str | Sequence[str], types: Mapping[str, str] | None = None) -> Dataset:
    """Opens a directory: prepared data by its manifest, a Delta or Iceberg table by its log, others
    by footers.

    Args:
        paths: A path or URL of a directory; or files: one, a pattern, or a list of files,
            directories and patterns.
        types: Types of columns whose values are in the names of directories, as NumPy or `utf8`.

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
        given = dict(types or {})
        return _open_files([paths] if isinstance(paths, str) else paths, given)
    url = paths
    iceberg = open_iceberg_table(url)
    if iceberg is not None:
        where, files = iceberg_data_files(iceberg)
        return Dataset.open_files(
            where, [(path, {}) for path in files], field_ids=iceberg_field_ids(iceberg)
        )
    if not native.Store(url).exists("_delta_log"):
        return Dataset.open_url(url, dict(types or {}))
    return _open_delta(url)


def _open_delta(url: str) -> Dataset:
    """Opens a Delta table. The values of its partitions are in its log, and their types in its
    schema.
    """
    from farandole.data.inputs.partitions import (  # noqa: PLC0415 - only for such tables
        fragment_partitions,
        partition_dtype,
        partition_text,
    )
    from farandole.data.inputs.sources import delta_dataset, delta_table  # noqa: PLC0415 - as above

    table = delta_table(url)
    opened = delta_dataset(table, url)
    names = table.metadata().partition_columns
    kinds = {name: opened.schema.field(name).type for name in names}
    try:
        types = {name: partition_dtype(kind) for name, kind in kinds.items()}
    except ValueError as error:
        raise ValueError(
            f"the Delta table {url} is partitioned by such a column: {error}"
        ) from None

    def file_values(fragment: Any) -> dict[str, str | None]:
        values = fragment_partitions(fragment)
        return {name: partition_text(values.get(name), kind, name) for name, kind in kinds.items()}

    files = [(fragment.path, file_values(fragment)) for fragment in opened.get_fragments()]
    return Dataset.open_files(url, files, types)


def is_directory_path(paths: str | Sequence[str]) -> bool:
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
    common = common_directory(place.base for place in places)
    relative = [path[len(common) + 1 :] for path in files]
    values = [(path, partition_values(path)) for path in relative]
    return Dataset.open_files(common or "/", values, types)


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
