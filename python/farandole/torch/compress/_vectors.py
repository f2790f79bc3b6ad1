# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compressors of flat vectors: 8-bit codes, and the largest numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole._native.compress import VectorCodec
from farandole.torch.compress._base import VectorCompressor

if TYPE_CHECKING:
    from collections.abc import Callable


class _CodecCompressor(VectorCompressor):
    """A compressor whose codec is native; vectors on a GPU go through host memory."""

    def __init__(
        self, codec: Callable[[Any], VectorCodec], setting: float, *, error_feedback: bool
    ) -> None:
        super().__init__(error_feedback=error_feedback)
        self._codec_recipe = (codec, setting)
        self._codec = codec(setting)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the native codec, so that compressors can be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_codec"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, and creates a codec of the same kind."""
        vars(self).update(state)
        codec, setting = self._codec_recipe
        self._codec = codec(setting)

    def encode(self, vector: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Returns the payload of a flat vector: bytes on the host."""
        count = vector.numel()
        payload = torch.empty(self._codec.payload_bytes(count), dtype=torch.uint8)
        source, host_residual = vector.cpu(), None if residual is None else residual.cpu()
        address = None if host_residual is None else host_residual.data_ptr()
        self._codec.encode(source.data_ptr(), count, address, payload.data_ptr())
        if residual is not None and host_residual is not None and host_residual is not residual:
            residual.copy_(host_residual)
        return payload

    def add(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        """Decodes a payload and adds the result to a flat vector."""
        payload = payload.contiguous()
        target = into.cpu()
        self._codec.accumulate(
            payload.data_ptr(), payload.numel(), target.data_ptr(), target.numel()
        )
        if not into.is_cpu:
            into.copy_(target)


class Int8(_CodecCompressor):
    """8-bit codes in blocks, each with its own scale: a quarter of the bytes of float32.

    Codes are never summed: each rank decodes the payloads and sums in float32.

    Args:
        block: Numbers that share a scale.
        error_feedback: Whether the error of a payload is added to the next gradient.
    """

    def __init__(self, block: int = 256, *, error_feedback: bool = True) -> None:
        if block < 1:
            raise ValueError(f"a block has at least one number: {block!r}")
        super().__init__(VectorCodec.int8, block, error_feedback=error_feedback)
        self.alignment = block


class TopK(_CodecCompressor):
    """The numbers of largest magnitude with their places; the others wait in the residual until
    they have grown.

    Args:
        share: The share of numbers that is sent, 8 bytes each.
        error_feedback: Whether the loss of a payload is added to the next gradient.
    """

    splits = False

    def __init__(self, share: float = 0.01, *, error_feedback: bool = True) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1: {share!r}")
        super().__init__(VectorCodec.top_k, share, error_feedback=error_feedback)
