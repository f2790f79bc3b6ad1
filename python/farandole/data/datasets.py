# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Opening data that others wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole._native import store as native
from farandole._native.reader import Dataset

if TYPE_CHECKING:
    from farandole.spark.common.store import AbstractFilesystemStore


def open_dataset(url: str) -> Dataset:
    """Opens a directory: prepared data by its manifest, a Delta table by its log, other Parquet by its footers.

    Args:
        url: A path or URL.

    Raises:
        FileNotFoundError: There is no Parquet.
        ImportError: It is a Delta table, and deltalake is not installed.
        ValueError: Files that disagree, a table that deltalake cannot read.
        OSError: Files that cannot be read, or a preparation that has not ended.
    """
    if not native.Store(url).exists("_delta_log"):
        return Dataset.open(url)
    from pyarrow import dataset as ds  # noqa: PLC0415 - only for such tables

    from farandole.data.sources import delta_table  # noqa: PLC0415 - as above

    try:
        fragments = list(delta_table(url).to_pyarrow_dataset().get_fragments())
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "deltalake":
            raise
        raise ValueError(f"the Delta table {url} cannot be read: {error}") from error
    values = [ds.get_partition_keys(fragment.partition_expression) for fragment in fragments]
    told = [{name: str(value) for name, value in one.items() if value is not None} for one in values]
    return Dataset.open_files(url, list(zip((fragment.path for fragment in fragments), told, strict=True)))


def linked(store: AbstractFilesystemStore, dataset: Dataset) -> str:
    """A URL by which every process opens these very files, without a look at each.

    Args:
        store: Where the small file behind the URL goes, if one is needed.
        dataset: What was opened.
    """
    if dataset.prepared:
        return dataset.url
    url = f"{store.prefix_path.rstrip('/')}/plans/{dataset.fingerprint}"
    dataset.link(url)
    return url
