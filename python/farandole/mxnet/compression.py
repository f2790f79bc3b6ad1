# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compression of gradients: casts before and after a reduction."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Makes an array smaller before a reduction and restores it afterwards."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array to reduce and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Restores a reduced array."""
        return tensor if ctx is None else tensor.astype(ctx)


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array itself."""
        return tensor, None


class FP16Compressor(Compressor):
    """Halves of IEEE: 11 bits of precision, up to 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts arrays of 32 and 64 bit floats to float16."""
        name = getattr(tensor.dtype, "__name__", str(tensor.dtype))
        return (
            (tensor.astype("float16"), tensor.dtype)
            if name in ("float32", "float64")
            else (tensor, None)
        )


class Compression:
    """The available compressors."""

    none = NoneCompressor
    """No compression."""
    fp16 = FP16Compressor
    """float16 on the wire."""
