# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns of lists that have different lengths: how they are stored, and how they become arrays.

Prepared data contains the bytes of each row's values. The native reader pads the rows of a batch to
the shortest of a few lengths that fits the longest, or gathers them without padding for a nested
tensor. Arrays and tensors use its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from farandole.common.argument_checks import check_whole_number
from farandole.data.lazy_pyarrow import is_list_type, pa, pc

if TYPE_CHECKING:
    import numpy.typing as npt

    from farandole._native.reader import Batch

    Array = npt.NDArray[Any]

_ELEMENT_DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "float32",
    "float64",
)
_LONG_ROW_VALUES = 32
"""Values of a row from which on rows are copied one by one: a mask of all places costs more
then.
"""


@dataclass(frozen=True)
class Pad:
    """Pads the rows of a ragged column to one length.

    Args:
        value: The value that fills a row after its last value.
        max_length: Number of values of a row that are kept; default: the length of the longest
            prepared row.
        buckets: Number of lengths that batches may have: 8 of 512 are 64, 128, and so on. With 1,
            the default, each batch has `max_length`.
    """

    value: float = 0
    max_length: int | None = None
    buckets: int = 1

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        _check_whole_numbers(max_length=self.max_length, buckets=self.buckets)
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            raise TypeError(f"value of a ragged column must be a number: {self.value!r}")

    def to_ragged_column(self, dtype: str, longest: int) -> RaggedColumn:
        """Returns the column, once its rows were looked at.

        Args:
            dtype: data type of the values.
            longest: length of the longest row.
        """
        padded_length = self.max_length or longest
        return RaggedColumn(dtype, self.value, padded_length, min(self.buckets, padded_length))


@dataclass(frozen=True)
class Nested:
    """Takes the rows of a ragged column as they are: a batch is one nested tensor of torch, in the
    jagged layout.

    Args:
        max_length: Number of values of a row that are kept; default: the length of the longest
            prepared row.
    """

    max_length: int | None = None

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        _check_whole_numbers(max_length=self.max_length)

    def to_ragged_column(self, dtype: str, longest: int) -> RaggedColumn:
        """Like `Pad.known`."""
        padded_length = self.max_length or longest
        return RaggedColumn(dtype, 0, padded_length, padded_length, nested=True)


def _check_whole_numbers(**numbers: Any) -> None:
    for name, number in numbers.items():
        if number is not None:
            check_whole_number(f"{name} of a ragged column", number)


@dataclass(frozen=True, eq=False)
class Jagged:
    """Rows of different lengths as NumPy arrays: row `i` is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.offsets) - 1


def becomes_nested_tensor(value: Any) -> bool:
    """Returns whether a column becomes nested tensors.

    Args:
        value: a `Pad`, `Nested` or `RaggedColumn`, or the fields of one in a dict.
    """
    nested = (
        value.get("nested", False)
        if isinstance(value, Mapping)
        else getattr(value, "nested", False)
    )
    return isinstance(value, Nested) or bool(nested)


def lengths_column_name(name: str) -> str:
    """Returns the name of the column of lengths that accompanies the values of a nested column.

    Args:
        name: name of the nested column.
    """
    return f"{name}\0lengths"


@dataclass(frozen=True)
class RaggedColumn:
    """A ragged column with all its properties."""

    dtype: str
    value: float
    max_length: int
    buckets: int = 1
    nested: bool = False
    """Whether batches are nested tensors: without padding."""

    @classmethod
    def from_fields_or_instance(cls, value: Any) -> Self:
        """Returns an instance from the form of a file or of a caller.

        Args:
            value: an instance, or a dict of its fields.
        """
        return cls(**value) if isinstance(value, Mapping) else value

    def padded_width(self, longest: int) -> int:
        """Returns the length of a batch.

        Args:
            longest: largest length of its rows.
        """
        return min(
            self.max_length,
            max(1, -(-longest // self._padded_length_step)) * self._padded_length_step,
        )

    @property
    def _padded_length_step(self) -> int:
        """Step between the lengths of batches: every length is a multiple."""
        return -(-self.max_length // self.buckets)

    def pad_rows(self, starts: Array, values: Array, *, fixed: bool = False) -> Array:
        """Returns the rows of one length, (rows, length).

        Args:
            starts: offset of each row's first value, and the end of the last row's values.
            values: values of all rows, one after the other.
            fixed: whether every batch has the largest length.
        """
        rows = len(starts) - 1
        lengths = np.minimum(np.diff(starts), self.max_length)
        width = self.max_length if fixed else self.padded_width(int(lengths.max(initial=0)))
        out = np.full((rows, width), self.value, self.dtype)
        whole = values[starts[0] : starts[-1]]
        if len(whole) == int(lengths.sum()) and len(whole) < _LONG_ROW_VALUES * rows:
            out[np.arange(width) < lengths[:, None]] = whole
        else:
            for row, (start, length) in enumerate(
                zip(starts.tolist(), lengths.tolist(), strict=False)
            ):
                out[row, :length] = values[start : start + length]
        return out

    def row_lengths(self, batch: Batch, name: str) -> Array:
        """Returns the number of values in each row of a batch of prepared data, (rows,).

        Args:
            batch: batch of the native reader.
            name: name of the column.
        """
        ends, _ = batch.text_buffers(name)
        return np.minimum(
            np.diff(np.frombuffer(ends, np.int64)) // np.dtype(self.dtype).itemsize, self.max_length
        )

    def native_padding_argument(self, *, fixed: bool = False) -> tuple[bytes, int, int, bool]:
        """Returns how the native reader pads the rows: an item of its argument `pad`.

        Args:
            fixed: as in `padded`.
        """
        return (
            np.array(self.value, self.dtype).tobytes(),
            self.max_length,
            self._padded_length_step,
            fixed,
        )

    def read_padded(self, batch: Batch, name: str) -> Array:
        """Returns the padded rows of a batch of prepared data, (rows, length), in the memory of the
        batch.

        Args:
            batch: batch of a native reader that was made with `padding`.
            name: name of the column.
        """
        _, values = batch.text_buffers(name)
        return np.frombuffer(values, self.dtype).reshape(batch.rows, batch.padded_length(name) or 0)

    def read_jagged(self, batch: Batch, name: str) -> Jagged:
        """Returns the rows of a batch of prepared data, without padding. Their values are in the
        memory of the batch.

        Args:
            batch: batch of the native reader.
            name: name of the column.
        """
        ends, values = batch.text_buffers(name)
        starts = np.frombuffer(ends, np.int64) // np.dtype(self.dtype).itemsize
        return Jagged(np.frombuffer(values, self.dtype), starts)

    def pad_arrow_column(self, column: Any, name: str, *, fixed: bool = False) -> Array:
        """Returns the rows of an Arrow column; a null has no values.

        Args:
            column: column of lists.
            name: name of the column.
            fixed: as in `padded`.
        """
        starts, values = self._flatten_arrow_column(column, name)
        return self.pad_rows(starts, values, fixed=fixed)

    def arrow_row_lengths(self, column: Any) -> Array:
        """Returns the number of values in each row of an Arrow column, (rows,).

        Args:
            column: column of lists.
        """
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return np.minimum(lengths.astype(np.int64), self.max_length)

    def encode_arrow_column(self, column: Any, name: str) -> pa.Array:
        """Returns an Arrow column of lists as it is prepared: the bytes of each row's values.

        Args:
            column: column of lists; a null has no values.
            name: name of the column.

        Raises:
            ValueError: lists of other things than numbers, or with nulls in them.
        """
        starts, values = self._flatten_arrow_column(column, name)
        size = np.dtype(self.dtype).itemsize
        ends = pa.py_buffer(np.ascontiguousarray((starts - starts[0]) * size))
        whole = pa.py_buffer(np.ascontiguousarray(values[starts[0] : starts[-1]]))
        return pa.Array.from_buffers(pa.large_binary(), len(column), [None, ends, whole])

    def _flatten_arrow_column(self, column: Any, name: str) -> tuple[Array, Array]:
        """Returns the offset of each row's first value, and the values of rows cut to the
        greatest length.
        """
        list_element_dtype(column.type, name)
        lengths = (
            column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        )
        if lengths.max(initial=0) > self.max_length:
            column = pc.list_slice(column, 0, self.max_length)
            lengths = np.minimum(lengths, self.max_length)
        values = column.flatten()
        if values.null_count:
            raise ValueError(
                f"column {name!r} has nulls inside of lists: {values.null_count} of {len(values)} "
                "values"
            )
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return starts, values.to_numpy(zero_copy_only=False).astype(self.dtype, copy=False)


def check_pad_value(layout: Any, dtype: str, name: str) -> None:
    """Refuses a value for padding that the values of a column cannot be.

    Args:
        layout: a `Pad`, or another value, which is not checked.
        dtype: data type of the values.
        name: name of the column.

    Raises:
        ValueError: a fraction, or a number out of range, among whole numbers.
    """
    if not isinstance(layout, Pad) or np.dtype(dtype).kind not in "iu":
        return
    limits = np.iinfo(dtype)
    if not (limits.min <= layout.value <= limits.max and layout.value == int(layout.value)):
        raise ValueError(
            f"column {name!r} has lists of {dtype}, which cannot be padded with {layout.value!r}: "
            f"give Pad a whole number from {limits.min} to {limits.max}"
        )


def list_element_dtype(kind: pa.DataType, name: str) -> str:
    """Returns NumPy's name of the type of list elements.

    Args:
        kind: kind of the column.
        name: name of the column.

    Raises:
        ValueError: no lists of numbers.
    """
    if not is_list_type(kind):
        raise ValueError(f"column {name!r} is {kind}: ragged columns are lists of numbers")
    inner = {"halffloat": "float32", "float": "float32", "double": "float64"}.get(
        str(kind.value_type), str(kind.value_type)
    )
    if inner not in _ELEMENT_DTYPES:
        raise ValueError(f"column {name!r} is {kind}: ragged columns are lists of numbers")
    return inner
