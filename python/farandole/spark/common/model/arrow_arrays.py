# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts between Arrow columns, as Spark passes them to Python, and NumPy arrays for models.

Spark's vectors arrive as `struct<type, size, indices, values>`: type 1 is dense and its `values`
hold every element, type 0 is sparse and uses `size`, `indices` and `values`. Predictions are
returned in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from farandole.data.inputs.number_conversion import dates_and_decimals_to_numbers
from farandole.data.inputs.spark_images import is_spark_image_type, pack_spark_images
from farandole.data.inputs.spark_vectors import is_spark_vector_type, spark_vectors_as_lists
from farandole.data.ragged import lengths_column_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from farandole.data.encoding import ColumnEncoding

VECTOR_TYPE = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class ColumnFill:
    """The replacement of nulls and NaN in one column, as in prepared data."""

    text: str
    """The value, written out: each type reads it in its own way."""
    named: bool
    """Whether the value was given for this column, and not for all columns that can hold it."""


def column_fill(fill: Any, name: str) -> ColumnFill | None:
    """Returns the replacement of missing values in a column.

    Args:
        fill: fill parameter of an estimator: a value for all columns, or values by column. The
            key `"*"` stands for all other columns.
        name: name of the column.
    """
    given = fill if isinstance(fill, Mapping) else {"*": fill}
    named = name in given
    value = given[name] if named else given.get("*")
    if value is None:
        return None
    return ColumnFill(str(value).lower() if isinstance(value, bool) else str(value), named)


def feature_arrays(
    batch: pa.RecordBatch,
    present: Sequence[str],
    names: Iterable[str],
    encoding: ColumnEncoding,
    *,
    fixed: bool = False,
    texts: bool = False,
) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns as arrays by name, as in training; for nested columns padded rows and,
    beside them, lengths.

    Args:
        batch: whose columns go by number.
        present: their names.
        names: of the columns that are wanted.
        encoding: categories and what replaces nulls and NaN.
        fixed: whether lists of different lengths are padded to the largest length.
        texts: whether strings and bytes are welcome, as objects, and structs of Spark's image
            source, as bytes of `spark_images`.

    Raises:
        ValueError: as `column_to_array`.
    """
    places = {name: index for index, name in enumerate(present)}

    def feature_array(name: str) -> npt.NDArray[Any]:
        if name in encoding.ragged:
            return encoding.ragged[name].pad_arrow_column(
                batch.column(places[name]), name, fixed=fixed
            )
        column = encoding.encode_column(name, places, lambda source: batch.column(places[source]))
        fill = None if name in encoding.categories else column_fill(encoding.fill, name)
        if texts and is_spark_image_type(column.type):
            column = pack_spark_images(column)
        if texts and _is_text_type(column.type):
            if fill is not None:
                column = column.fill_null(pa.scalar(fill.text).cast(column.type))
            if not column.null_count:
                # one more, or NumPy looks into them
                return np.array([*column.to_pylist(), None], dtype=object)[:-1]
        return column_to_array(column, name, fill)

    found = {name: feature_array(name) for name in names}
    nested = [name for name in found if name in encoding.ragged and encoding.ragged[name].nested]
    lengths = {
        name: encoding.ragged[name].arrow_row_lengths(batch.column(places[name])) for name in nested
    }
    return found | {lengths_column_name(name): counts for name, counts in lengths.items()}


def column_to_array(
    column: pa.Array, name: str, fill: ColumnFill | None = None
) -> npt.NDArray[Any]:
    """Returns the column as one array with rows as first axis: `(rows,)` for scalars, else `(rows,
    length, ...)`.

    Values are converted as in prepared data: decimals to float64, dates to days, and timestamps,
    times and durations to microseconds.

    Args:
        column: numbers, booleans, dates, timestamps, lists of these of one length, or Spark's
            vectors of one size.
        name: name of the column, for messages.
        fill: replacement of nulls and NaN; without it, nulls raise an error.

    Raises:
        ValueError: nulls, rows of different length, a type that no tensor can hold, or a fill that
            the column cannot hold; naming the column.
    """
    kind = column.type
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_scalar = is_number or is_time or pa.types.is_decimal(kind)
    if is_scalar:
        column = dates_and_decimals_to_numbers(column, name)
        if pa.types.is_float16(column.type):
            column = column.cast(pa.float32())
    if is_scalar and fill is not None:
        column = _fill_missing(column, kind, name, fill)
    if column.null_count:
        raise ValueError(f"column {name!r} has nulls: {column.null_count} of {len(column)} rows")
    if is_scalar:
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists_to_array(column, name, fill)
    if is_spark_vector_type(kind):
        return _lists_to_array(spark_vectors_as_lists(column, name), name, fill)
    raise ValueError(f"column {name!r} has type {kind}, which no tensor can hold")


def _is_text_type(kind: pa.DataType) -> bool:
    return any(
        of_kind(kind)
        for of_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )


def to_spark_vectors(values: npt.NDArray[Any]) -> pa.StructArray:
    """Returns the rows of a matrix as dense Spark vectors.

    Args:
        values: shape `(rows, length)`.
    """
    count, length = values.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(length)
    flat = pa.array(np.ascontiguousarray(values, dtype=np.float64).reshape(-1))
    nothing = (
        pa.nulls(count, VECTOR_TYPE.field("size").type),
        pa.nulls(count, VECTOR_TYPE.field("indices").type),
    )
    dense = pa.ListArray.from_arrays(pa.array(offsets), flat)
    return pa.StructArray.from_arrays(
        [pa.array(np.ones(count, np.int8)), *nothing, dense], fields=list(VECTOR_TYPE)
    )


def _fill_missing(column: Any, kind: pa.DataType, name: str, fill: ColumnFill) -> Any:
    """Fills numbers of batches; `kind` is the type of the column before the conversion."""
    compute: Any = pc  # its functions are made when it is imported
    # NaN counts as missing here, as it does when data is prepared.
    missing = compute.is_null(column, nan_is_null=True)
    if not compute.any(missing).as_py():
        return column
    value = _fill_scalar(column.type, kind, name, fill.text)
    if value is None:
        if fill.named:
            raise ValueError(
                f"column {name!r} is {kind}, which cannot hold the value of fill: {fill.text}"
            )
        return column
    return compute.if_else(missing, value, column)


def _fill_scalar(numbers: pa.DataType, kind: pa.DataType, name: str, text: str) -> Any:
    """Returns the replacement as a number of batches; `None` if it is none."""
    kinds = [numbers, kind] if pa.types.is_temporal(kind) else [numbers]
    for one in kinds:
        try:
            return dates_and_decimals_to_numbers(pa.array([text]).cast(one), name)[0]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return None


def _lists_to_array(column: Any, name: str, fill: ColumnFill | None = None) -> npt.NDArray[Any]:
    if len(column) == 0:
        return np.empty((0, 0), dtype=np.float32)
    if pa.types.is_fixed_size_list(column.type):
        lengths = [column.type.list_size]
    else:
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    if len(lengths) != 1:
        raise ValueError(
            f"column {name!r} has rows of different length: {', '.join(map(str, lengths[:3]))}"
        )
    inner = column_to_array(column.flatten(), name, fill)
    return inner.reshape(len(column), lengths[0], *inner.shape[1:])
