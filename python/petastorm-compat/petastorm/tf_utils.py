# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Readers as `tf.data.Dataset`."""

from __future__ import annotations

import datetime as dt
import warnings
from calendar import timegm
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from petastorm.reader import Reader
    from petastorm.unischema import UnischemaField

_OTHER_DTYPES = {
    np.uint16: tf.int32,
    np.uint32: tf.int64,
    np.str_: tf.string,
    np.bytes_: tf.string,
    Decimal: tf.string,
    np.datetime64: tf.int64,
}


def make_petastorm_dataset(reader: Reader) -> Any:
    """Returns a dataset of named tuples of tensors: of rows, or of batches of a row group.

    Decimals become strings, and times nanoseconds since 1970. A second iteration resets the reader.

    Args:
        reader: The reader.

    Raises:
        ValueError: A field of a type that TensorFlow does not have.
    """
    fields = list(reader.schema.fields.values())
    leading = (None,) if reader.batched_output else ()
    make_row = reader.schema._get_namedtuple()  # noqa: SLF001 - the same package

    def read_rows() -> Iterator[tuple[Any, ...]]:
        if reader.last_row_consumed:
            warnings.warn(
                "a second pass over make_petastorm_dataset reads all files again: num_epochs of "
                "the reader, or cache() of the dataset, is faster",
                UserWarning,
                stacklevel=2,
            )
            reader.reset()
        for row in reader:
            yield tuple(
                _value_for_tensorflow(field.name, value)
                for field, value in zip(fields, row, strict=True)
            )

    signature = tuple(
        tf.TensorSpec((*leading, *field.shape), _dtype_of_tensorflow(field)) for field in fields
    )
    return tf.data.Dataset.from_generator(read_rows, output_signature=signature).map(
        lambda *columns: make_row(*columns)
    )


def _dtype_of_tensorflow(field: UnischemaField) -> Any:
    try:
        return _OTHER_DTYPES.get(field.numpy_dtype) or tf.dtypes.as_dtype(field.numpy_dtype)
    except TypeError as error:
        raise ValueError(
            f"Unknown mapping of numpy {field.numpy_dtype} to tensorflow dtype (field {field.name})"
        ) from error


def _value_for_tensorflow(name: str, value: Any) -> Any:
    """Returns a value in a type that TensorFlow has."""
    if value is None:
        raise RuntimeError(
            f'Encountered "{name}"=None. Tensorflow does not support None values as a tensor. '
            "Consider filtering out these rows using a predicate."
        )
    if isinstance(value, Decimal):
        return str(value.normalize())
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if value.dtype.kind == "M":
        return value.astype("datetime64[ns]").astype(np.int64)
    if value.dtype in (np.uint16, np.uint32):
        return value.astype(np.int32 if value.dtype == np.uint16 else np.int64)
    if value.dtype.kind in "SU":
        return value.tolist()
    if value.dtype.kind == "O" and len(value) and isinstance(value[0], dt.date):
        return np.array([timegm(day.timetuple()) * 10**9 for day in value], np.int64)
    return value
