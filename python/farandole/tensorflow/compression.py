# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compression of gradients: casts before and after a reduction."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Makes a tensor smaller before a reduction and restores it afterwards."""

    rounds_partial_sums = False
    """Whether the sums of a host's ranks are rounded to 16 bits on their way to other hosts.

    That halves the bytes between hosts with several ranks, and rounds once more. It concerns sums
    and averages of float16 and bfloat16. On one host nothing is rounded but the result.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to reduce and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Restores a reduced tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor itself."""
        del ctx
        return tensor


def _cast_to_narrower(tensor: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """Casts floating tensors wider than `dtype`; others stay as they are."""
    if tensor.dtype.is_floating and tensor.dtype.size > dtype.size:
        return tf.cast(tensor, dtype), tensor.dtype
    return tensor, None


def _cast_back(tensor: Any, dtype: Any) -> Any:
    return tensor if dtype is None else tf.cast(tensor, dtype)


class FP16Compressor(Compressor):
    """Halves of IEEE: 11 bits of precision, up to 65504."""

    rounds_partial_sums = True

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floating tensors to float16."""
        return _cast_to_narrower(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts back."""
        return _cast_back(tensor, ctx)


class BF16Compressor(Compressor):
    """Brain floats: 8 bits of precision, the range of float32."""

    rounds_partial_sums = True

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Casts floating tensors to bfloat16."""
        return _cast_to_narrower(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Casts back."""
        return _cast_back(tensor, ctx)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    """No compression."""
    fp16 = FP16Compressor
    """float16 on the wire."""
    bf16 = BF16Compressor
    """bfloat16 on the wire."""
