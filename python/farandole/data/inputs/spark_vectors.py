# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Spark ML vectors, dense and sparse, as lists of float64.

In Arrow and in Parquet files, a vector is `struct<type, size, indices, values>`: type 1 is dense
and has `values` only, type 0 is sparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.source_units import convert_source_columns
from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from farandole.data.inputs.source_units import RowSource

VECTOR_FIELDS = ("type", "size", "indices", "values")
_DENSE = 1


def is_spark_vector_type(kind: Any) -> bool:
    """Returns whether a type of Arrow is a Spark ML vector.

    Args:
        kind: The type.
    """
    return pa.types.is_struct(kind) and tuple(field.name for field in kind) == VECTOR_FIELDS


def spark_vectors_as_lists(column: Any, name: str) -> Any:
    """Returns vectors as lists of float64; other columns as they are.

    Args:
        column: An array of Arrow.
        name: Name of the column, for messages.

    Returns:
        An array of large lists; a null stays a null.

    Raises:
        ValueError: A sparse vector has an index outside of its size; naming the column.
    """
    if not is_spark_vector_type(column.type):
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


def decode_spark_vectors(source: RowSource) -> RowSource:
    """Returns the source with lists of float64 instead of vectors.

    Args:
        source: As it was opened.
    """

    def plain_type(kind: Any) -> pa.DataType:
        return pa.large_list(pa.float64()) if is_spark_vector_type(kind) else kind

    return convert_source_columns(source, plain_type, spark_vectors_as_lists)
