# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns of tensors of one shape, as Arrow's type for them and as nested lists of fixed lengths,
and list views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.source_units import convert_source_columns
from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from farandole.data.inputs.source_units import RowSource


def decode_tensors(source: RowSource) -> RowSource:
    """Returns the source with lists instead of tensors and list views; the axes of tensors are in
    the order that the type states.

    Args:
        source: As it was opened.
    """
    return convert_source_columns(source, _type_without_tensors, _tensors_as_lists)


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)


def _is_list_view(kind: Any) -> bool:
    return pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)


def _tensors_as_lists(column: Any, _name: str) -> Any:
    if _is_tensor(column.type):
        return _nest_tensors(column)
    return _list_view_as_lists(column) if _is_list_view(column.type) else column


def _list_view_as_lists(column: Any) -> pa.Array:
    """Returns the lists one after the other; Arrow's own conversion of views breaks the offsets."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    missing = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(ends), column.flatten(), mask=missing)


def _type_without_tensors(kind: Any) -> pa.DataType:
    if _is_tensor(kind):
        return _nested_list_type(kind)
    return pa.large_list(kind.value_type) if _is_list_view(kind) else kind


def _logical_shape(kind: Any) -> list[int]:
    order = kind.permutation or range(len(kind.shape))
    return [kind.shape[axis] for axis in order]


def _nested_list_type(kind: Any) -> pa.DataType:
    nested = kind.value_type
    for length in reversed(_logical_shape(kind)):
        nested = pa.list_(nested, length)
    return nested


def _nest_tensors(column: Any) -> pa.Array:
    """Returns the tensors as nested lists; a null stays a null."""
    kind, rows = column.type, len(column)
    values = column.storage.values[column.storage.offset * kind.storage_type.list_size :].slice(
        0, rows * kind.storage_type.list_size
    )
    if kind.permutation and list(kind.permutation) != sorted(kind.permutation):
        places = np.arange(len(values)).reshape(rows, *kind.shape)
        axes = [0, *(axis + 1 for axis in kind.permutation)]
        values = values.take(pa.array(places.transpose(axes).reshape(-1)))
    for length in reversed(_logical_shape(kind)[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    missing = column.is_null() if column.null_count else None
    return pa.FixedSizeListArray.from_arrays(values, _logical_shape(kind)[0], mask=missing)


def nested_lists_as_tensors(column: pa.Array) -> pa.Array:
    """Returns nested lists of fixed lengths as tensors, which Parquet and the reader take; other
    columns as they are.

    Args:
        column: Column of a record batch.
    """
    shape, values = [], column
    while pa.types.is_fixed_size_list(values.type) and not values.null_count:
        shape.append(values.type.list_size)
        values = values.flatten()
    if len(shape) <= 1 or pa.types.is_nested(values.type):
        return column
    size = 1
    for length in shape:
        size *= length
    rows = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.FixedShapeTensorArray.from_storage(pa.fixed_shape_tensor(values.type, shape), rows)
