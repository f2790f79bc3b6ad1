# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`Decode`: a `transformation_fn` that converts images and sounds, as bytes or paths, to tensors.

PNG and JPEG are decoded and resized in Rust, other images and rare kinds of these two by Pillow,
and sounds by soundfile (libsndfile). All release the interpreter's lock, so the threads of the
loader decode in parallel.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.common.argument_checks import check_whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_CHANNELS_BY_MODE = {"RGB": 3, "RGBA": 4, "L": 1}
_PILLOW_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow may open. Its other decoders are rarely used, and for EPS it runs
Ghostscript.
"""
_FIT_MODES = ("stretch", "crop", "pad")


@dataclass(frozen=True)
class Image:
    """Decodes a column of images: PNG, JPEG, WebP, GIF, BMP or TIFF. Other formats are refused.

    PNG and JPEG need no other package, but for kinds that are rare: see the guide. All others need
    Pillow.

    An image is turned as its EXIF orientation says, converted to `mode`, and resized. Of 16 bits,
    the high 8 are taken; images of 32-bit integers and of floats are refused, since their range is
    not known. A batch has float32 of shape (rows, channels, height, width), from 0 to 1 before
    `mean` and `std`, or uint8 without scaling.

    Args:
        height: Rows of the result, in pixels.
        width: Pixels of a row of the result; default: `height`.
        mode: `RGB`, `RGBA` or `L` (gray).
        fit: `stretch`: resized without regard to proportions. `crop`: resized until it covers the
            result, and the middle is kept. `pad`: resized until it fits into the result, with black
            around it.
        dtype: `float32` or `uint8`.
        mean: One number for each channel, or one for all, which is subtracted.
        std: As `mean`; the result is divided by it.
        channels_last: Whether the shape is (rows, height, width, channels), as Keras has it by
            default.
    """

    height: int
    width: int | None = None
    mode: str = "RGB"
    fit: str = "stretch"
    dtype: str = "float32"
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        for name, value in (
            ("height", self.height),
            ("width", self.height if self.width is None else self.width),
        ):
            check_whole_number(f"{name} of an image", value)
        for name, value, known in (
            ("mode", self.mode, tuple(_CHANNELS_BY_MODE)),
            ("fit", self.fit, _FIT_MODES),
            ("dtype", self.dtype, ("float32", "uint8")),
        ):
            if value not in known:
                raise ValueError(f"{name} of an image must be one of {', '.join(known)}: {value!r}")
        for name, value in (("mean", self.mean), ("std", self.std)):
            numbers = [value] if isinstance(value, Real) else list(value)  # pyright: ignore[reportArgumentType]
            if len(numbers) not in (1, _CHANNELS_BY_MODE[self.mode]) or not all(
                math.isfinite(number) for number in numbers
            ):
                count = _CHANNELS_BY_MODE[self.mode]
                raise ValueError(
                    f"{name} of an image must be one number or {count}, one for each channel: "
                    f"{value!r}"
                )
            if name == "std" and 0.0 in numbers:
                raise ValueError(f"std of an image must not be 0: {value!r}")
        if self.dtype == "uint8" and (self.mean != 0.0 or self.std != 1.0):
            raise ValueError("mean and std of an image need dtype='float32'")

    def decode(self, blobs: Sequence[Any], column: str, first_row: int = 0) -> Array:
        """Images as one array.

        Args:
            blobs: Bytes, or open files, or images of Pillow, of each row.
            column: For messages.
            first_row: Number of the first row in its batch, for messages.

        Raises:
            ImportError: An image needs Pillow, which is not installed.
            ValueError: An image that cannot be decoded; the message names the column and the row of
                the batch.
        """
        if not blobs:
            return np.empty((0, *self._image_shape), self.dtype)
        images, undecoded = self._decode_natively(blobs)
        for row, reason in undecoded:
            try:
                import PIL.Image  # noqa: PLC0415, F401 - optional
            except ImportError as error:
                raise ImportError(
                    "decoding images needs Pillow: pip install 'farandole[images]' "
                    f"(column {column!r}, row {first_row + row} of a batch: {reason})"
                ) from error
            try:
                images[row] = self._to_batch_layout(
                    np.asarray(self._resize_with_pillow(blobs[row], self.width or self.height))
                )
            except Exception as error:
                raise ValueError(
                    f"column {column!r}, row {first_row + row} of a batch: cannot decode the "
                    f"image: {error}"
                ) from error
        return images

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        """Shape of an image of a batch."""
        width, channels = self.width or self.height, _CHANNELS_BY_MODE[self.mode]
        return (
            (self.height, width, channels) if self.channels_last else (channels, self.height, width)
        )

    def _normalization_factors(self) -> tuple[Array, Array]:
        """Returns the factor of each channel, and the number that is then subtracted:
        (channels,).
        """
        mean, std = np.empty((2, _CHANNELS_BY_MODE[self.mode]), np.float32)
        mean[:], std[:] = self.mean, self.std
        return 1.0 / (255.0 * std), mean / std

    def _decode_natively(self, blobs: Sequence[Any]) -> tuple[Array, list[tuple[int, str]]]:
        """Decodes images in Rust; returns them, and the rows that are left to Pillow, with
        reasons.
        """
        if self.mode == "RGBA":
            return np.empty((len(blobs), *self._image_shape), self.dtype), [
                (row, "RGBA") for row in range(len(blobs))
            ]
        from farandole._native import images as native  # noqa: PLC0415 - images alone need it

        files = [
            bytes(blob) if isinstance(blob, bytes | bytearray | memoryview) else b""
            for blob in blobs
        ]
        scales = (
            None
            if self.dtype == "uint8"
            else list(
                zip(*(values.tolist() for values in self._normalization_factors()), strict=True)
            )
        )
        mode: Any = self.mode
        fit: Any = self.fit
        width = self.width or self.height
        pixels, undecoded = native.decode_images(
            files, self.height, width, mode, fit, self.channels_last, scales
        )
        return np.frombuffer(memoryview(pixels), self.dtype).reshape(
            len(blobs), *self._image_shape
        ), undecoded

    def _to_batch_layout(self, pixels: Array) -> Array:
        """Returns an image in the order and type of the batch.

        Args:
            pixels: From Pillow: uint8 of (height, width), or (height, width, channels).
        """
        pixels = pixels.reshape(
            self.height, self.width or self.height, _CHANNELS_BY_MODE[self.mode]
        )
        if self.dtype == "float32":
            factor, shift = self._normalization_factors()
            pixels = pixels.astype(np.float32) * factor - shift
        return pixels if self.channels_last else pixels.transpose(2, 0, 1)

    def _resize_with_pillow(self, blob: Any, width: int) -> Any:
        from PIL import Image as Pillow  # noqa: PLC0415 - optional
        from PIL import ImageOps  # noqa: PLC0415

        size, smooth = (width, self.height), Pillow.Resampling.BILINEAR
        source = io.BytesIO(blob) if isinstance(blob, bytes | bytearray | memoryview) else blob
        with (
            contextlib.nullcontext(source)
            if isinstance(source, Pillow.Image)
            else Pillow.open(source, formats=_PILLOW_FORMATS)
        ) as opened:
            # A JPEG is decoded at an eighth, a quarter or a half of its size, if that is at least
            # twice the result.
            longest = max(size)
            opened.draft(self.mode if self.mode != "RGBA" else None, (2 * longest, 2 * longest))
            ImageOps.exif_transpose(opened, in_place=True)
            opened.load()
            image = _to_8_bit(opened)
            image = image if image.mode == self.mode else image.convert(self.mode)
        if self.fit == "crop":
            return ImageOps.fit(image, size, smooth)
        if self.fit == "pad":
            return ImageOps.pad(image, size, smooth)
        return image if image.size == size else image.resize(size, smooth)


def _to_8_bit(image: Any) -> Any:
    """Returns an image with 8 bits a channel. Pillow itself would make every gray value of 16
    bits above 255 white.
    """
    from PIL import Image as Pillow  # noqa: PLC0415

    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise ValueError(f"it is of {kind}, whose range is unknown (mode {image.mode} of Pillow)")
    if not image.mode.startswith("I;16"):
        return image
    return Pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))


@dataclass(frozen=True)
class Audio:
    """Decodes a column of sounds: WAV, FLAC, Ogg, MP3 and other formats of libsndfile.

    A batch has float32 of shape (rows, samples), from -1 to 1, or (rows, channels, samples) with
    several channels. A column `<name>__length` has the number of samples of each sound; zeros
    follow them.

    Args:
        samples: Number of samples of each row; longer sounds are cut.
        rate: Samples in a second. Sounds of other rates are resampled.
        channels: 1: the mean of all channels. More: sounds must have as many.
    """

    samples: int
    rate: int
    channels: int = 1

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        for name in ("samples", "rate", "channels"):
            check_whole_number(f"{name} of a sound", getattr(self, name))

    def decode(self, blobs: Sequence[Any], column: str) -> tuple[Array, Array]:
        """Returns the sounds as one array, and the number of samples of each.

        Args:
            blobs: Bytes, or open files, of each row.
            column: For messages.

        Raises:
            ImportError: soundfile, or for other rates soxr, is not installed.
            ValueError: A sound that cannot be decoded; the message names the column and the row of
                the batch.
        """
        try:
            import soundfile  # noqa: PLC0415, F401 - optional
        except ImportError as error:
            raise ImportError(
                "decoding sounds needs soundfile: pip install 'farandole[audio]'"
            ) from error

        whole = np.zeros((len(blobs), self.channels, self.samples), np.float32)
        lengths = np.zeros(len(blobs), np.int64)
        for row, blob in enumerate(blobs):
            try:
                sound = self._read_sound(blob)
            except ImportError:
                raise
            except Exception as error:
                raise ValueError(
                    f"column {column!r}, row {row} of a batch: cannot decode the sound: {error}"
                ) from error
            lengths[row] = len(sound)
            whole[row, :, : len(sound)] = sound.T
        return (whole[:, 0] if self.channels == 1 else whole), lengths

    def _read_sound(self, blob: Any) -> Array:
        """(samples, channels)."""
        import soundfile  # noqa: PLC0415 - optional

        source = io.BytesIO(blob) if isinstance(blob, bytes | bytearray | memoryview) else blob
        with soundfile.SoundFile(source) as opened:
            rate = opened.samplerate
            # a little more, for the resampler's edge
            wanted = -(-self.samples * rate // self.rate) + rate // 100
            sound = opened.read(wanted, dtype="float32", always_2d=True)
        if self.channels == 1:
            sound = sound.mean(axis=1, keepdims=True)
        elif sound.shape[1] != self.channels:
            raise ValueError(f"it has {sound.shape[1]} channels, not {self.channels}")
        if rate != self.rate:
            try:
                import soxr  # noqa: PLC0415 - optional
            except ImportError as error:
                raise ImportError(
                    "sounds of other rates need soxr: pip install 'farandole[audio]'"
                ) from error
            sound = soxr.resample(sound, rate, self.rate)
        return sound[: self.samples]


class Decode:
    """A `transformation_fn` that decodes columns of bytes or paths and keeps all other columns.

    Loaders call it with record batches, estimators with dicts of arrays.
    """

    batched = True
    """For estimators: it takes whole batches."""

    def __init__(
        self, columns: Mapping[str, Image | Audio], *, root: str | os.PathLike[str] | None = None
    ) -> None:
        """Stores the arguments.

        Args:
            columns: The decoder of each column.
            root: The directory of relative paths, local or the URL of a store; default: the current
                directory of the process. Columns of bytes need none.

        Raises:
            TypeError: A decoder that is neither an `Image` nor an `Audio`.
            ValueError: No columns.
        """
        if not columns:
            raise ValueError("Decode needs at least one column")
        for name, decoder in columns.items():
            if not isinstance(decoder, Image | Audio):
                raise TypeError(
                    f"column {name!r} must be decoded by an Image or an Audio: "
                    f"{type(decoder).__name__}"
                )
        self.columns, self.root = dict(columns), None if root is None else os.fspath(root)

    def __call__(self, batch: Any) -> dict[str, Array]:
        """Returns the columns of a batch as arrays.

        Args:
            batch: A `pyarrow.RecordBatch`, or a dict of arrays.

        Raises:
            ValueError: A column that is not there, that holds no bytes or paths, or that cannot be
                decoded.
            FileNotFoundError: A path without a file.
        """
        from farandole.data.batch_transform import column_from_arrow  # noqa: PLC0415 - with cloudpickle

        is_dict = isinstance(batch, Mapping)
        names = list(batch) if is_dict else batch.schema.names
        lacking = [name for name in self.columns if name not in names]
        if lacking:
            raise ValueError(f"there is no column {lacking[0]!r} to decode: {', '.join(names)}")
        made: dict[str, Array] = {}
        for name in names:
            if name not in self.columns:
                made[name] = (
                    batch[name]
                    if is_dict
                    else column_from_arrow(name, batch.column(name), "the data")
                )
                continue
            decoder, values = (
                self.columns[name],
                batch[name] if is_dict else batch.column(name).to_pylist(),
            )
            blobs = [self.read_cell_bytes(value, name, row) for row, value in enumerate(values)]
            if isinstance(decoder, Image):
                made[name] = decoder.decode(blobs, name)
            else:
                made[name], made[f"{name}__length"] = decoder.decode(blobs, name)
        return made

    def read_cell_bytes(self, value: Any, column: str, row: int) -> bytes:
        """Returns the bytes of a file.

        Args:
            value: The bytes, or the path of the file.
            column: For messages.
            row: Number of the row in its batch, for messages.

        Raises:
            ValueError: Neither bytes nor a path.
            FileNotFoundError: There is no such file.
        """
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str):
            raise ValueError(
                f"column {column!r}, row {row} of a batch: {type(value).__name__} is neither "
                "bytes nor a path"
            )
        if self.root is None and "://" not in value:
            with open(value, "rb") as opened:  # noqa: PTH123 - bytes of a path that a user gives
                return opened.read()
        from farandole._native import store as native  # noqa: PLC0415 - paths alone need it

        whole = value if "://" in value else (f"{self.root.rstrip('/')}/{value}")  # pyright: ignore[reportOptionalMemberAccess]
        directory, _, name = native.full_path(whole).rpartition("/")
        return bytes(native.Store(directory).read(name))
