# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors

"""PNG and JPEG files as the arrays of a batch, decoded in Rust."""

from collections.abc import Sequence
from typing import Literal, final

from typing_extensions import Buffer

@final
class DecodedPixels(Buffer):
    """Decoded images: a writable contiguous buffer of all values, image after image."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def decode_images(
    files: list[bytes],
    height: int,
    width: int,
    mode: Literal["RGB", "L"],
    fit: Literal["stretch", "crop", "pad"],
    channels_last: bool,
    scales: Sequence[tuple[float, float]] | None,
) -> tuple[DecodedPixels, list[tuple[int, str]]]:
    """Decodes images to one size, float32 with `scales` and uint8 without. Other threads of Python
    run meanwhile.

    Args:
        files: The bytes of each file.
        height: Rows of the result.
        width: Pixels of a row of the result.
        mode: Channels of the result.
        fit: As in `farandole.data.Image`.
        channels_last: Whether the values of a pixel lie together.
        scales: For each channel the factor, and the number that is then subtracted.

    Returns:
        The images, and the rows that are left to another decoder, each with a reason. Their values
        are undefined.
    """
