# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors

"""PNG and JPEG files as the arrays of a batch, decoded in Rust."""

from collections.abc import Sequence
from typing import Literal, final

from typing_extensions import Buffer

@final
class Pixels(Buffer):
    """Decoded images: a writable contiguous buffer of all values, image after image."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def decode(
    files: list[bytes],
    height: int,
    width: int,
    mode: Literal["RGB", "L"],
    fit: Literal["stretch", "crop", "pad"],
    channels_last: bool,
    scales: Sequence[tuple[float, float]] | None,
) -> tuple[Pixels, list[tuple[int, str]]]:
    """Images of one size, float32 with `scales` and uint8 without, decoded while other threads of Python run.

    Args:
        files: The bytes of each file.
        height: Of the result.
        width: Of the result.
        mode: Channels of the result.
        fit: As in `farandole.data.Image`.
        channels_last: Whether the values of a pixel lie together.
        scales: Of each channel the factor and what is then subtracted.

    Returns:
        The images, and the rows that are left to another decoder, each with a reason. Their values are any.
    """
