# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Images of Spark's source `image`, as bytes.

There, an image is `struct<origin, height, width, nChannels, mode, data>`: rows of pixels of 8 bits
a channel, in the order blue, green, red, alpha. Prepared data holds no structs. So an image is
packed: `PACKED_MAGIC`, height, width, channels and mode as big-endian int32, and the pixels.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from farandole.data.lazy_pyarrow import pa

IMAGE_FIELDS = ("origin", "height", "width", "nChannels", "mode", "data")
PACKED_FIELDS = IMAGE_FIELDS[1:5]
"""Fields of the header."""
PACKED_MAGIC = b"\x00SIM"
"""Begins a packed image. No file of an image begins so."""
_HEADER = struct.Struct(">4i")
_CHANNELS_BY_MODE = {0: 1, 16: 3, 24: 4}
"""Spark's modes, which are OpenCV's types of 8 bits."""


def is_spark_image_type(kind: Any) -> bool:
    """Returns whether a type of Arrow is an image of Spark's source.

    Args:
        kind: The type.
    """
    return pa.types.is_struct(kind) and tuple(field.name for field in kind) == IMAGE_FIELDS


def pack_spark_images(column: Any) -> Any:
    """Returns packed images; a null stays a null.

    Args:
        column: An array of Arrow, chunked or not, of a type that `is_spark_image_type` accepts.
    """
    return pa.array([_pack_image(one) for one in column.to_pylist()], pa.large_binary())


def _pack_image(image: dict[str, Any] | None) -> bytes | None:
    if image is None or image["data"] is None:
        return None
    # Beside a null, pandas makes floats of integers.
    header = [-1 if image[name] is None else int(image[name]) for name in PACKED_FIELDS]
    return PACKED_MAGIC + _HEADER.pack(*header) + image["data"]


def is_packed_image(blob: bytes) -> bool:
    """Returns whether bytes are a packed image.

    Args:
        blob: The bytes.
    """
    return blob.startswith(PACKED_MAGIC)


def unpack_image(blob: bytes) -> Any:
    """Returns a packed image as an image of Pillow, of the mode L, RGB or RGBA.

    Args:
        blob: The packed image.

    Raises:
        ValueError: Its size, its mode or the number of its bytes is impossible.
        ImportError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError(
            "structs of Spark's image source need Pillow: pip install pillow"
        ) from error
    start = len(PACKED_MAGIC) + _HEADER.size
    if len(blob) < start:
        raise ValueError("its header is cut off")
    height, width, channels, mode = _HEADER.unpack_from(blob, len(PACKED_MAGIC))
    if height < 1 or width < 1:
        raise ValueError(
            f"it has {height} rows of {width} pixels, as Spark marks a file that it cannot decode"
        )
    if _CHANNELS_BY_MODE.get(mode) != channels:
        known = ", ".join(f"{key} ({count})" for key, count in _CHANNELS_BY_MODE.items())
        raise ValueError(f"its mode is {mode} with {channels} channels, known are {known}")
    if len(blob) - start != height * width * channels:
        raise ValueError(f"it has {len(blob) - start} bytes, not {height} x {width} x {channels}")
    pixels = np.frombuffer(blob, np.uint8, offset=start).reshape(height, width, channels)
    if channels == 1:
        return PIL.Image.fromarray(pixels[:, :, 0])
    return PIL.Image.fromarray(np.ascontiguousarray(pixels[:, :, [2, 1, 0, 3][:channels]]))
