# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compression of gradients: casts before and after a reduction."""

from __future__ import annotations

import torch

from farandole.torch import _large_tensor_memory


class Compressor:
    """Makes a tensor smaller before a reduction and restores it afterwards."""

    rounds_partial_sums = False
    """Whether the sums of a host's ranks are rounded to 16 bits on their way to other hosts.

    Rounding halves the bytes between hosts with several ranks, and adds a rounding error. It
    applies to sums and averages of float16 and bfloat16. On one host only the result is rounded.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor to reduce and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Restores a reduced tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Returns the tensor itself."""
        del ctx
        return tensor


def _cast_down(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    """Casts floating tensors wider than `dtype`; others stay as they are."""
    if tensor.is_floating_point() and tensor.element_size() > dtype.itemsize:
        return _large_tensor_memory.cast_tensor(tensor, dtype), tensor.dtype
    return tensor, None


def is_used_by_reduction_only(compression: type[Compressor], ctx: torch.dtype | None) -> bool:
    """Returns whether only the reduction uses a compressed tensor, so that the reduction may
    overwrite it.
    """
    return compression in (FP16Compressor, BF16Compressor) and ctx is not None


def _cast_back(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else _large_tensor_memory.cast_tensor(tensor, dtype)


class FP16Compressor(Compressor):
    """Halves of IEEE: 11 bits of precision, up to 65504."""

    rounds_partial_sums = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Casts floating tensors to float16."""
        return _cast_down(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Casts back."""
        return _cast_back(tensor, ctx)


class BF16Compressor(Compressor):
    """Brain floats: 8 bits of precision, the range of float32."""

    rounds_partial_sums = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Casts floating tensors to bfloat16."""
        return _cast_down(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
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
