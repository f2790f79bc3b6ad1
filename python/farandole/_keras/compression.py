# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compression of gradients, on any Keras backend."""

from __future__ import annotations

from typing import Any

import keras

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class KerasCompressor:
    """Makes a tensor smaller before a reduction and restores it afterwards."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to reduce and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Restores a reduced tensor."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


def _cast_to_narrower(tensor: Any, dtype: str) -> tuple[Any, Any]:
    """Casts floating tensors wider than `dtype`; others stay as they are."""
    own = keras.backend.standardize_dtype(tensor.dtype)
    return (
        (keras.ops.cast(tensor, dtype), own)
        if _DTYPE_BYTES.get(own, 0) > _DTYPE_BYTES[dtype]
        else (tensor, None)
    )


class NoneCompressor(KerasCompressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None


class FP16Compressor(KerasCompressor):
    """Halves of IEEE: 11 bits of precision, up to 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floating tensors to float16."""
        return _cast_to_narrower(tensor, "float16")


class BF16Compressor(KerasCompressor):
    """Brain floats: 8 bits of precision, the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floating tensors to bfloat16."""
        return _cast_to_narrower(tensor, "bfloat16")


class Compression:
    """The available compressors."""

    none = NoneCompressor
    """No compression."""
    fp16 = FP16Compressor
    """float16 on the wire."""
    bf16 = BF16Compressor
    """bfloat16 on the wire."""
