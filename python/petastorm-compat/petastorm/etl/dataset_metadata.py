# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The schema that a data set has in `_common_metadata`."""

from __future__ import annotations

import io
import json
import os
import pickle
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from farandole._native.store import Store
from farandole.data.inputs.file_discovery import is_file_path
from petastorm._pickled_schemas import read_pickled_schema
from petastorm._row_groups import ParquetRowGroups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from petastorm.unischema import Unischema

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
_METADATA_FILE = "_common_metadata"


class PetastormMetadataError(Exception):
    """A data set has no stored schema."""


def find_stored_schema(url: str) -> Unischema | None:
    """Returns the schema that is stored with a data set; `None` if there is none.

    Args:
        url: The data set.

    Raises:
        pickle.UnpicklingError: A schema with other classes than those of petastorm.
    """
    if is_file_path(url) or not (store := Store(url)).exists(_METADATA_FILE):
        return None
    metadata = pq.read_metadata(io.BytesIO(store.read(_METADATA_FILE))).metadata or {}
    stored = metadata.get(UNISCHEMA_KEY)
    source = f"{url.rstrip('/')}/{_METADATA_FILE}"
    return None if stored is None else read_pickled_schema(stored, source)


def get_schema_from_dataset_url(dataset_url_or_urls: str, **_: Any) -> Unischema:
    """Returns the schema that is stored with a data set.

    Args:
        dataset_url_or_urls: The data set.

    Raises:
        PetastormMetadataError: It has none.
    """
    schema = find_stored_schema(dataset_url_or_urls)
    if schema is None:
        raise PetastormMetadataError(
            f"{dataset_url_or_urls} has no stored schema: write it within materialize_dataset"
        )
    return schema


@contextmanager
def materialize_dataset(
    spark: Any,
    dataset_url: str,
    schema: Unischema,
    row_group_size_mb: int | None = None,
    use_summary_metadata: bool = False,  # noqa: ARG001 - footers tell the row groups
    filesystem_factory: Any = None,  # noqa: ARG001 - the URL tells the store
) -> Iterator[None]:
    """Stores a schema with a data set that Spark writes within the `with` block.

    Args:
        spark: The session.
        dataset_url: URL of the data set.
        schema: The schema.
        row_group_size_mb: Size of a row group, in MiB.
        use_summary_metadata: Without effect.
        filesystem_factory: Without effect.
    """
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 - Spark has no other way
    options = {"parquet.summary.metadata.level": "NONE"}
    if row_group_size_mb:
        options |= {
            "parquet.block.size": str(row_group_size_mb << 20),
            "parquet.block.size.row.check.min": "3",
        }
    before = {name: hadoop.get(name) for name in options}
    for name, value in options.items():
        hadoop.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            hadoop.unset(name) if value is None else hadoop.set(name, value)
    store_schema(dataset_url, schema)


def store_schema(dataset_url: str, schema: Unischema) -> None:
    """Stores a schema with a data set, as petastorm does.

    Args:
        dataset_url: URL of the data set.
        schema: The schema.
    """
    source = ParquetRowGroups(dataset_url)
    store, pickled = Store(dataset_url), io.BytesIO()
    _SchemaPickler(pickled, protocol=4).dump(schema)
    base = store.local_path or store.url
    counts: dict[str, int] = {}
    for group in source.groups:
        path = os.path.relpath(group.file.path, base)
        counts[path] = counts.get(path, 0) + 1
    metadata = {
        **(source.schema.metadata or {}),
        UNISCHEMA_KEY: pickled.getvalue(),
        ROW_GROUPS_PER_FILE_KEY: json.dumps(counts).encode(),
    }
    file = io.BytesIO()
    pq.write_metadata(source.schema.with_metadata(metadata), file)
    store.write(_METADATA_FILE, file.getvalue())


class _SchemaPickler(pickle.Pickler):
    """A pickler that uses names that exist in every NumPy."""

    def reducer_override(self, obj: Any) -> Any:
        return "bool_" if obj is np.bool_ else NotImplemented
