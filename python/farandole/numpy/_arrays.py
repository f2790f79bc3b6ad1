# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Arrays as the engine sees them: an address, a dtype, a shape; and the table of operations in
progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from farandole.common.handles import HandleTable

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

DTYPE_NUMBERS: dict[str, int] = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bool": 9,
    "bfloat16": 10,
    "uint32": 11,
    "uint64": 12,
    "complex64": 13,
    "complex128": 14,
    "float8_e4m3fn": 15,
    "float8_e5m2": 16,
}
"""The engine's number of every dtype it knows, by NumPy's name; those NumPy itself lacks come
with ml_dtypes.
"""

table = HandleTable("numpy")
"""The operations of this module under way."""


def dtype_number(dtype: np.dtype[Any]) -> int:
    """Returns the engine's number of a dtype.

    Raises:
        ValueError: When it has none.
    """
    number = DTYPE_NUMBERS.get(dtype.name)
    if number is None:
        raise ValueError(f"dtype is not supported: {dtype}")
    return number


def data_address(array: Array) -> int:
    """Returns the address of the first element."""
    return array.__array_interface__["data"][0]


def to_engine_input(value: ArrayLike) -> Array:
    """Returns `value` as memory that the engine can read: the array itself if it is contiguous,
    aligned and in native byte order, else a copy.

    Raises:
        ValueError: When the engine has no dtype for it, or it is masked.
    """
    array = _check_array(value)
    return array if has_native_layout(array) else _copy_to_native_layout(array)


def to_engine_input_and_output(value: ArrayLike) -> tuple[Array, Array]:
    """Like `to_engine_input`, with memory for a result of the same shape and dtype, which may be
    the private copy.
    """
    array = _check_array(value)
    if has_native_layout(array):
        return array, np.empty_like(array)
    copy = _copy_to_native_layout(array)
    return copy, copy


def _check_array(value: ArrayLike) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError("masked arrays are not supported: fill the masked elements first")
    array = np.asarray(value)
    dtype_number(array.dtype)
    return array


def _copy_to_native_layout(array: Array) -> Array:
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def has_native_layout(array: Array) -> bool:
    """Returns whether the engine can work on the array's own memory."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def require_writable_array(value: Any) -> Array:
    """Refuses values that an in-place operation cannot write to.

    Raises:
        ValueError: When it is no array, or read-only.
    """
    if not isinstance(value, np.ndarray):
        raise ValueError(f"in-place operations need a NumPy array: {type(value).__name__}")
    if not value.flags.writeable:
        raise ValueError(f"in-place operations need a writable array: shape {value.shape}")
    return value


def copy_unless_same_memory(target: Array, source: Array) -> Array:
    """Moves a result to where it belongs, if the engine has not written it there; returns
    `target`.
    """
    if data_address(target) != data_address(source):
        np.copyto(target, source, casting="equiv")
    return target


def wrap_engine_output(
    outcome: Any, dtype: np.dtype[Any], tail: tuple[int, ...]
) -> tuple[Array, list[int]]:
    """Returns the array in memory the engine has filled, without a copy, and the rows every
    member gave.
    """
    rows: list[int] = outcome.rows if outcome is not None else []
    shape = (sum(rows), *tail)
    if outcome is None or len(outcome) == 0:
        return np.empty(shape, dtype=dtype), rows
    return np.frombuffer(outcome, dtype=dtype).reshape(shape), rows


def poll(handle: int) -> bool:
    """Returns whether `synchronize(handle)` would return at once.

    Raises:
        ValueError: When the handle was consumed already, or never given out.
    """
    return table.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result.

    The handle is consumed, whether the operation succeeded or failed. Ctrl-C interrupts the wait
    and leaves it valid.

    Args:
        handle: Result of an `*_async` function.

    Returns:
        The array; a list of arrays for a grouped operation; the array and the rows received from
        every member for `alltoall_async`.

    Raises:
        ValueError: When the handle was consumed already, or never given out; or when ranks disagree
            about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return table.synchronize(handle)
