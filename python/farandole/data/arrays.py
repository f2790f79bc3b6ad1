# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches as NumPy arrays or torch tensors, without copies; strings as arrays of objects.

Neighbouring scalar columns of one type are at equal distances in the memory of a batch. They become
one matrix, which the framework splits. This is much faster than creating each tensor from Python.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole._native.reader import Batch, DatasetField
    from farandole.data.ragged import Jagged

    Convert = Callable[[Batch, Sequence[DatasetField], str | None], dict[str, Any]]
    Wrap = Callable[[Batch, Mapping[str, Any], str | None], dict[str, Any]]

COLUMN_ALIGNMENT_BYTES = 64
"""Columns start at multiples of this."""

MIN_MATRIX_COLUMNS = 2
"""Columns from this many on are worth a matrix."""


@dataclass(frozen=True)
class AdjacentColumns:
    """Neighbouring columns of one type: `names` with `stride` elements from one to the next."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    stride: int


def make_batch_converter(framework: str) -> Convert:
    """Returns the function that turns batches into dicts.

    Args:
        framework: `numpy` or `torch`.

    Raises:
        ValueError: Another framework.
        ImportError: The framework is not installed.
    """
    if framework == "numpy":
        return _numpy_converter()
    if framework == "torch":
        return _torch_converter()
    raise ValueError(f"framework must be numpy or torch: {framework}")


def group_adjacent_columns(
    columns: tuple[tuple[str, str, tuple[int, ...], int], ...], rows: int
) -> list[AdjacentColumns]:
    """Puts neighbouring scalar columns of one type together.

    Args:
        columns: Name, dtype, shape of a row and bytes of an element, of each column in order.
        rows: Rows of the batch.
    """
    found: list[AdjacentColumns] = []
    offset = 0
    for name, dtype, shape, width in columns:
        size = (
            -(-rows * width * math.prod(shape) // COLUMN_ALIGNMENT_BYTES) * COLUMN_ALIGNMENT_BYTES
        )
        last = found[-1] if found else None
        if last is not None and not shape and not last.shape and last.dtype == dtype:
            found[-1] = AdjacentColumns((*last.names, name), dtype, (), last.offset, last.stride)
        else:
            found.append(AdjacentColumns((name,), dtype, shape, offset, size // width))
        offset += size
    return found


ELEMENT_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
}


@cache
def _cached_column_runs(
    columns: tuple[tuple[str, str, tuple[int, ...]], ...], rows: int
) -> list[AdjacentColumns]:
    return group_adjacent_columns(
        tuple((*column, ELEMENT_BYTES.get(column[1], 8)) for column in columns), rows
    )


VARIABLE_WIDTH_DTYPES: tuple[str, ...] = ("utf8", "binary")
"""Types of values that have no fixed size."""


def text_column_as_objects(batch: Batch, name: str, dtype: str) -> Any:
    """Returns the values of a column of texts or bytes, as a NumPy array of `str` or `bytes`.

    Args:
        batch: As the reader gives it.
        name: Name of the column.
        dtype: `utf8` or `binary`.
    """
    ends, values = batch.text_buffers(name)
    pieces = [values[start:end] for start, end in itertools.pairwise(ends.cast("q"))]
    array = np.empty(len(pieces), object)
    array[:] = (
        [str(piece, "utf-8") for piece in pieces]
        if dtype == "utf8"
        else [bytes(piece) for piece in pieces]
    )
    return array


def _adjacent_column_runs(
    batch: Batch, fields: Sequence[DatasetField], weights: str | None
) -> list[AdjacentColumns]:
    columns = [
        (field.name, field.dtype, field.shape)
        for field in fields
        if field.dtype not in VARIABLE_WIDTH_DTYPES
    ]
    if weights is not None:
        columns.append((weights, "float32", ()))
    return _cached_column_runs(tuple(columns), batch.rows)


def _numpy_converter() -> Convert:
    def view_batch_numbers(batch: Batch, dtype: str, count: int, offset: int) -> Any:
        return np.frombuffer(memoryview(batch), dtype, count, offset)

    return _batch_converter(view_batch_numbers, np.empty)


def _torch_converter() -> Convert:
    try:
        import torch  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("tensors need torch: pip install 'farandole[torch]'") from error

    def view_batch_numbers(batch: Batch, dtype: str, count: int, offset: int) -> Any:
        kind = getattr(torch, dtype)
        return torch.frombuffer(batch, dtype=kind, count=count, offset=offset)

    return _batch_converter(
        view_batch_numbers, lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype))
    )


def _batch_converter(
    view_batch_numbers: Callable[[Batch, str, int, int], Any],
    make_empty: Callable[[tuple[int, ...], str], Any],
) -> Convert:
    """Returns the function that turns batches into dicts.

    Args:
        view_batch_numbers: Returns so many numbers of a type in the memory of a batch, from a byte
            on.
        make_empty: Returns an array without elements, of a shape and a type.
    """

    def convert_batch(
        batch: Batch, fields: Sequence[DatasetField], weights: str | None
    ) -> dict[str, Any]:
        rows = batch.rows
        arrays: dict[str, Any] = {}
        for run in _adjacent_column_runs(batch, fields, weights):
            if rows == 0:
                arrays.update((name, make_empty((0, *run.shape), run.dtype)) for name in run.names)
            elif len(run.names) < MIN_MATRIX_COLUMNS:
                flat = view_batch_numbers(batch, run.dtype, rows * math.prod(run.shape), run.offset)
                arrays[run.names[0]] = flat.reshape(rows, *run.shape)
            else:
                flat = view_batch_numbers(batch, run.dtype, len(run.names) * run.stride, run.offset)
                matrix = flat.reshape(len(run.names), run.stride)[:, :rows]
                arrays.update(zip(run.names, matrix, strict=True))
        texts = [field for field in fields if field.dtype in VARIABLE_WIDTH_DTYPES]
        arrays.update(
            (field.name, text_column_as_objects(batch, field.name, field.dtype)) for field in texts
        )
        return arrays

    return convert_batch


def to_nested_column(rows: Jagged, framework: str) -> Any:
    """Returns a column of nested rows as a batch has it.

    Args:
        rows: Their values and offsets.
        framework: `numpy`, which leaves them as they are, or `torch`: a nested tensor in the jagged
            layout.
    """
    if framework == "numpy":
        return rows
    import torch  # noqa: PLC0415 - optional

    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(rows.values), torch.from_numpy(rows.offsets)
    )


def make_result_converter(framework: str) -> Wrap:
    """Returns the function that makes a batch from the result of a `transformation_fn`.

    Args:
        framework: `numpy` or `torch`, which `make_batch_converter` has accepted.
    """
    if framework == "torch":
        import torch  # noqa: PLC0415 - optional

        def to_writable_array(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value
            array = np.asarray(value)
            return torch.from_numpy(array if array.flags.writeable else array.copy())
    else:

        def to_writable_array(value: Any) -> Any:
            array = np.asarray(value)
            return array if array.flags.writeable else array.copy()

    def convert_result(
        batch: Batch, result: Mapping[str, Any], weights: str | None
    ) -> dict[str, Any]:
        values = {name: to_writable_array(value) for name, value in result.items()}
        lengths = {name: len(value) for name, value in values.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"transformation_fn returned columns of different lengths: {lengths}")
        if weights is not None:
            if any(length != batch.rows for length in lengths.values()):
                raise ValueError(
                    f"transformation_fn must keep the {batch.rows} rows of a batch with "
                    'tail="pad", but '
                    f"it returned {lengths}"
                )
            values[weights] = to_writable_array(
                np.frombuffer(memoryview(batch.row_weights()), np.float32)
            )
        return values

    return convert_result
