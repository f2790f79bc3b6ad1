# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compression to 16-bit floats, which the engine sums in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole.torch.compress._base import Compressor, NamedGradients, ReductionGenerator

if TYPE_CHECKING:
    from farandole.torch.compress._exchange import Exchange


class Cast(Compressor):
    """16-bit floats: half the bytes of float32.

    Over Farandole's engine, sums accumulate in float32. They are rounded once, or twice if hosts
    have several ranks.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        error_feedback: Whether the rounding error is added to the next gradient.
        rounds_partial_sums: Whether the sums of a host's ranks are rounded to `dtype` on their way
            to other hosts. If not, they are sent as float32: twice the bytes in one of two
            directions, one rounding less.
    """

    def __init__(
        self, dtype: torch.dtype, *, error_feedback: bool = False, rounds_partial_sums: bool = True
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16: {dtype}")
        self._dtype = dtype
        self._feeds_back = error_feedback
        self.rounds_partial_sums = rounds_partial_sums
        self._residuals: dict[str, torch.Tensor] = {}

    def reduce(self, gradients: NamedGradients, exchange: Exchange) -> ReductionGenerator:
        """Sums gradients over all ranks."""
        narrow = torch.cat(
            [self._narrow_gradient(name, gradient).reshape(-1) for name, gradient in gradients]
        )
        total = yield exchange.allreduce(narrow, rounds=self.rounds_partial_sums)
        parts = total.split([gradient.numel() for _, gradient in gradients])
        pairs = zip(parts, gradients, strict=True)
        return [part.view(gradient.shape).to(gradient.dtype) for part, (_, gradient) in pairs]

    def _narrow_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if not self._feeds_back:
            return gradient.to(self._dtype)
        residual = self._residuals.get(name)
        whole = (
            gradient
            if residual is None or residual.shape != gradient.shape
            else gradient + residual
        )
        narrow = whole.to(self._dtype)
        self._residuals[name] = torch.nan_to_num_(whole - narrow, 0.0, 0.0, 0.0)
        return narrow


class Fp16(Cast):
    """Halves of IEEE: 11 bits of precision, up to 65504."""

    def __init__(self, *, error_feedback: bool = False, rounds_partial_sums: bool = True) -> None:
        super().__init__(
            torch.float16, error_feedback=error_feedback, rounds_partial_sums=rounds_partial_sums
        )


class Bf16(Cast):
    """Brain floats: 8 bits of precision, the range of float32."""

    def __init__(self, *, error_feedback: bool = False, rounds_partial_sums: bool = True) -> None:
        super().__init__(
            torch.bfloat16, error_feedback=error_feedback, rounds_partial_sums=rounds_partial_sums
        )
