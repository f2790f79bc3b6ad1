# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Codecs: values of a field, and the bytes or numbers that Parquet has for them.

No codec unpickles: an array of objects in a file is an error.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from petastorm.unischema import UnischemaField

_OPTIONS_OF_SPARK_TYPES = {
    "DecimalType": ("precision", "scale"),
    "ArrayType": ("elementType", "containsNull"),
    "CharType": ("length",),
    "VarcharType": ("length",),
}
SPARK_TYPE_NAMES = (
    *("Byte", "Short", "Integer", "Long", "Float", "Double", "Boolean", "String", "Binary"),
    *("Date", "Timestamp", "TimestampNTZ", "Decimal", "Array", "Char", "Varchar"),
)
SPARK_TYPE_NAMES = tuple(f"{name}Type" for name in SPARK_TYPE_NAMES)
"""Types of Spark that a schema may have."""


class SparkTypeDescription(NamedTuple):
    """A type of Spark, by its name: a process that only reads needs no pyspark."""

    name: str
    options: dict[str, Any]

    def make_type(self) -> Any:
        """Returns the type.

        Raises:
            ImportError: pyspark is not installed.
        """
        from pyspark.sql import types  # noqa: PLC0415 - only for those who write

        names = _OPTIONS_OF_SPARK_TYPES.get(self.name, ())
        values = [self.options[name] for name in names if name in self.options]
        made = [
            value.make_type() if isinstance(value, SparkTypeDescription) else value
            for value in values
        ]
        return getattr(types, self.name)(*made)


class DataframeColumnCodec(ABC):
    """Base class of codecs."""

    @abstractmethod
    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Returns what Parquet stores for a value.

        Args:
            unischema_field: The field of the value.
            value: The value.

        Raises:
            ValueError: A value of another type or shape than the field has.
        """

    @abstractmethod
    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Returns the value that Parquet stores so.

        Args:
            unischema_field: The field of the value.
            value: As it is stored.
        """

    @abstractmethod
    def spark_dtype(self) -> Any:
        """Returns the type of the column in Spark."""

    def __str__(self) -> str:
        """Returns the Python code of the codec."""
        return f"{type(self).__name__}()"


class _BinaryCodec(DataframeColumnCodec):
    """A codec of arrays as bytes of a file."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        """Returns the bytes of an array."""
        _check_array(unischema_field, value)
        file = io.BytesIO()
        self._write_array(file, value)
        return bytearray(file.getbuffer())

    def spark_dtype(self) -> Any:
        """Returns Spark's type of bytes."""
        from pyspark.sql import types  # noqa: PLC0415 - only for those who write

        return types.BinaryType()

    @abstractmethod
    def _write_array(self, file: io.BytesIO, array: Any) -> None:
        """Writes an array, whose type and shape were checked."""


class NdarrayCodec(_BinaryCodec):
    """Arrays of any shape as files of `numpy.save`."""

    def _write_array(self, file: io.BytesIO, array: Any) -> None:
        np.save(file, array, allow_pickle=False)

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:  # noqa: ARG002
        """Returns an array."""
        return np.load(io.BytesIO(value), allow_pickle=False)


class CompressedNdarrayCodec(_BinaryCodec):
    """Arrays of any shape as files of `numpy.savez_compressed`."""

    def _write_array(self, file: io.BytesIO, array: Any) -> None:
        np.savez_compressed(file, arr=array)

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:  # noqa: ARG002
        """Returns an array."""
        return np.load(io.BytesIO(value), allow_pickle=False)["arr"]


class CompressedImageCodec(_BinaryCodec):
    """Images as PNG or JPEG: of shape (height, width), or (height, width, 3) for RGB.

    Pillow decodes, and OpenCV the images that Pillow would reduce to 8 bits.
    """

    def __init__(self, image_codec: str = "png", quality: int = 80) -> None:
        """Creates a codec.

        Args:
            image_codec: Format of new images, such as `png` or `jpeg`.
            quality: Quality of new images in JPEG, 0 to 100.
        """
        self._image_codec = f".{image_codec}"
        self._quality = quality

    @property
    def image_codec(self) -> str:
        """Format of new images."""
        return self._image_codec[1:]

    def _write_array(self, file: io.BytesIO, array: Any) -> None:
        from PIL import Image  # noqa: PLC0415 - only images need it

        image_format = self.image_codec.upper().replace("JPG", "JPEG")
        Image.fromarray(array).save(file, image_format, quality=self._quality)

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Any:
        """Returns the pixels of an image, with the bits that the file has."""
        from PIL import Image  # noqa: PLC0415 - only images need it

        wide = np.dtype(unischema_field.numpy_dtype).itemsize > 1
        with Image.open(io.BytesIO(value), formats=("PNG", "JPEG", "BMP", "TIFF", "WEBP")) as image:
            if image.mode == "RGB" and wide:
                return _decode_wide_image(unischema_field, value)
            mode = {"1": "L", "P": "RGB"}.get(image.mode, image.mode)
            pixels = np.array(image if mode == image.mode else image.convert(mode))
        if mode not in ("L", "RGB", "I;16"):
            raise ValueError(
                f"the image is {mode} of {pixels.shape}; (height, width) and (height, width, 3) "
                "are supported"
            )
        return pixels

    def __str__(self) -> str:
        """Returns the Python code of the codec."""
        return f"{type(self).__name__}('{self.image_codec}', {self._quality})"


class ScalarCodec(DataframeColumnCodec):
    """Numbers, booleans, strings and other scalars as types of Spark."""

    def __init__(self, spark_type: Any) -> None:
        """Creates a codec.

        Args:
            spark_type: An instance of a type of `pyspark.sql.types`.
        """
        self._spark_type = spark_type

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Returns a scalar of Python."""
        scalar = value.item() if isinstance(value, np.ndarray) and value.shape == () else value
        if hasattr(scalar, "__len__") and not isinstance(scalar, str):
            raise TypeError(
                f"field {unischema_field.name!r} needs a scalar, it got {type(value).__name__}"
            )
        if unischema_field.shape:
            raise ValueError(
                f"field {unischema_field.name!r} has ScalarCodec, so its shape must be (): "
                f"{unischema_field.shape}"
            )
        match type(self.spark_dtype()).__name__:
            case "ByteType" | "ShortType" | "IntegerType" | "LongType":
                return int(scalar)
            case "FloatType" | "DoubleType":
                return float(scalar)
            case "BooleanType":
                return bool(scalar)
            case "StringType" if not isinstance(scalar, str):
                raise ValueError(
                    f"field {unischema_field.name!r} needs a string, it got {type(value).__name__}"
                )
        return str(scalar) if isinstance(scalar, str) else scalar

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        """Returns a scalar of the type that the field has."""
        return unischema_field.numpy_dtype(value)

    def spark_dtype(self) -> Any:
        """Returns the type of the column in Spark."""
        described = isinstance(self._spark_type, SparkTypeDescription)
        return self._spark_type.make_type() if described else self._spark_type

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that petastorm can read."""
        return {"_spark_type": self.spark_dtype()}

    def __str__(self) -> str:
        """Returns the Python code of the codec."""
        described = isinstance(self._spark_type, SparkTypeDescription)
        name = self._spark_type.name if described else type(self._spark_type).__name__
        return f"{type(self).__name__}({name}())"


def _decode_wide_image(field: UnischemaField, value: bytes) -> Any:
    """Returns an RGB image of 16 bits."""
    try:
        import cv2  # noqa: PLC0415 - few images need it
    except ImportError as error:
        raise ImportError(
            f"field {field.name!r} has colours of {field.numpy_dtype.__name__}, which Pillow would "
            "reduce to 8 bits: pip install opencv-python-headless"
        ) from error
    pixels = cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_UNCHANGED)
    return pixels[:, :, ::-1]


def _check_array(field: UnischemaField, value: Any) -> None:
    expected = np.dtype(field.numpy_dtype)
    # Strings have a type for each length.
    if not isinstance(value, np.ndarray) or value.dtype.type is not expected.type:
        found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"Unexpected type of {field.name} feature, expected an array of "
            f"{expected.type.__name__}, got {found}"
        )
    if len(value.shape) != len(field.shape) or any(
        wanted and found and wanted != found
        for wanted, found in zip(field.shape, value.shape, strict=True)
    ):
        raise ValueError(
            f"Unexpected dimensions of {field.name} feature, expected {field.shape}, "
            f"got {value.shape}"
        )
