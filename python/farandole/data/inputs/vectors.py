# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Spark ML vectors, dense and sparse, as lists of float64.

In Arrow and in Parquet files, a vector is `struct<type, size, indices, values>`: type 1 is dense
and has `values` only, type 0 is sparse.
"""

from __future__ import annotations

from typing import Any

VECTOR_FIELDS = ("type", "size", "indices", "values")
_DENSE = 1


def is_vector_type(kind: Any) -> bool:
    """Returns whether a type of Arrow is a Spark ML vector.

    Args:
        kind: The type.
    """
    import pyarrow as pa  # noqa: PLC0415 - a process that only trains needs none

    return pa.types.is_struct(kind) and tuple(field.name for field in kind) == VECTOR_FIELDS


def vectors_as_lists(column: Any, name: str) -> Any:
    """Returns vectors as lists of float64; other columns as they are.

    Args:
        column: An array of Arrow.
        name: Name of the column, for messages.

    Returns:
        An array of large lists; a null stays a null.

    Raises:
        ValueError: A sparse vector has an index outside of its size; naming the column.
    """
    import numpy as np  # noqa: PLC0415 - as above
    import pyarrow as pa  # noqa: PLC0415 - as above

    if not is_vector_type(column.type):
        return column
    kinds, sizes, indices, values = column.flatten()
    is_dense = kinds.fill_null(_DENSE).to_numpy(zero_copy_only=False) == _DENSE
    counts = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    lengths = np.where(is_dense, counts, sizes.fill_null(0).to_numpy(zero_copy_only=False))
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    owners = np.repeat(np.arange(len(column)), counts)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_sparse = ~is_dense[owners]
    places[is_sparse] = indices.filter(pa.array(~is_dense)).flatten()
    outside = (places < 0) | (places >= lengths[owners])
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"column {name!r} has a broken sparse vector, an index outside of its size "
            f"{lengths[owners[first]]}: {places[first]}"
        )
    numbers = np.zeros(starts[-1], dtype=np.float64)
    numbers[starts[owners] + places] = values.flatten()
    missing = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(numbers), mask=missing)


def vector_free_batch(batch: Any) -> Any:
    """Returns a record batch with lists of float64 in place of vectors.

    Args:
        batch: The record batch.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    if not any(is_vector_type(kind) for kind in batch.schema.types):
        return batch
    named = zip(batch.columns, batch.schema.names, strict=True)
    columns = [vectors_as_lists(column, name) for column, name in named]
    return pa.RecordBatch.from_arrays(columns, schema=vector_free_schema(batch.schema))


def vector_free_schema(schema: Any) -> Any:
    """Returns a schema with lists of float64 in place of vectors.

    Args:
        schema: The schema of a source.
    """
    import pyarrow as pa  # noqa: PLC0415 - as above

    lists = pa.large_list(pa.float64())
    return pa.schema(
        [field.with_type(lists) if is_vector_type(field.type) else field for field in schema],
        metadata=schema.metadata,
    )
