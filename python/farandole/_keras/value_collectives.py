# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values and variables outside of a training step. They are sent as NumPy arrays on every
backend.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import farandole.numpy as arrays


def to_numpy_array(value: Any) -> Any:
    """Returns a NumPy array of a tensor, a variable, or what NumPy makes an array of."""
    if isinstance(value, keras.Variable):
        value = value.value
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else np.asarray(value)


def broadcast_variables(variables: list[Any], root_rank: int) -> None:
    """Overwrites Keras variables by the root's, all at once."""
    dense = [
        variable
        for variable in variables
        if keras.backend.standardize_dtype(variable.dtype) != "string"
    ]
    handles = [
        arrays.broadcast_async(to_numpy_array(variable), root_rank, name=f"keras.variable.{index}")
        for index, variable in enumerate(dense)
    ]
    for handle, variable in zip(handles, dense, strict=True):
        variable.assign(arrays.synchronize(handle))


def allreduce_value(
    value: Any,
    name: str | None,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = None,
) -> Any:
    """Reduces a value; whole numbers stay whole, Python's floats are averaged as doubles."""
    array = to_numpy_array(value)
    own = array.dtype
    small = _compressor_dtype(compression)
    ctx = None
    if small and np.issubdtype(own, np.floating):
        array = array.astype(_numpy_dtype(small))
    elif small == "":
        # A compressor of the user takes tensors.
        tensor, ctx = compression.compress(keras.ops.convert_to_tensor(array))
        array = to_numpy_array(tensor)
    reduced = arrays.allreduce(
        array, name=name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )
    if small == "":
        reduced = to_numpy_array(compression.decompress(keras.ops.convert_to_tensor(reduced), ctx))
    return reduced.astype(own)


_CAST_DTYPES = {"NoneCompressor": None, "FP16Compressor": "float16", "BF16Compressor": "bfloat16"}
"""Types of the known compressors; NumPy can cast to all of them."""


def _compressor_dtype(compression: Any) -> str | None:
    """Returns the type that a compressor casts to; `None` for no cast, and "" for a compressor
    of the user.
    """
    if compression is None:
        return None
    kind = compression if isinstance(compression, type) else type(compression)
    return _CAST_DTYPES.get(kind.__name__, "") if kind.__module__.startswith("farandole.") else ""


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes  # noqa: PLC0415 - NumPy has no bfloat16

        return ml_dtypes.bfloat16
    return np.dtype(name)


def allgather_value(value: Any, name: str | None) -> Any:
    """Returns all ranks' values, one after the other."""
    return arrays.allgather(to_numpy_array(value), name=name)


def broadcast_value(value: Any, root_rank: int, name: str | None) -> Any:
    """Returns the root's value."""
    return arrays.broadcast(to_numpy_array(value), root_rank, name=name)


def reducescatter_value(value: Any, name: str | None, op: int) -> Any:
    """This rank's rows of a reduced value."""
    return arrays.reducescatter(to_numpy_array(value), name=name, op=op)
