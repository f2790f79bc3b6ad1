# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lossy forms of vectors of float32 given by address.

This is the low-level interface of `farandole.torch.compress`: the caller keeps the memory valid
during the call, and lets no two arguments overlap.
"""

from typing import final

@final
class VectorCodec:
    """A compressor; without state, so it may be used from any thread."""

    @staticmethod
    def fp16() -> VectorCodec:
        """Halves of IEEE."""
    @staticmethod
    def bf16() -> VectorCodec:
        """Brain floats."""
    @staticmethod
    def int8(block: int, /) -> VectorCodec:
        """8-bit codes with a scale for each block of numbers."""
    @staticmethod
    def top_k(share: float, /) -> VectorCodec:
        """The largest numbers, as many as this share of all."""
    def payload_bytes(self, values: int, /) -> int:
        """Bytes of the payload for so many numbers."""
    def encode(self, values: int, count: int, residual: int | None, payload: int, /) -> None:
        """Writes the payload of `count` numbers.

        With a residual, the payload is that of the numbers and the residual, which then holds what
        was lost.
        """
    def accumulate(self, payload: int, length: int, into: int, count: int, /) -> None:
        """Adds what the payload says to `count` numbers.

        Raises:
            ValueError: When it is no payload for so many numbers.
        """
