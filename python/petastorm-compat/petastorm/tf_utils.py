# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Readers as `tf.data.Dataset`."""

from __future__ import annotations

import warnings
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
            yield tuple(map(_value_for_tensorflow, fields, row))

    signature = tuple(
        tf.TensorSpec((*leading, *field.shape), _dtype_of_tensorflow(field)) for field in fields
    )
    rows = tf.data.Dataset.from_generator(read_rows, output_signature=signature)
    return rows.map(reader.schema._get_namedtuple())  # noqa: SLF001 - the same package


def _dtype_of_tensorflow(field: UnischemaField) -> Any:
    try:
        return _OTHER_DTYPES.get(field.numpy_dtype) or tf.dtypes.as_dtype(field.numpy_dtype)
    except TypeError as error:
        raise ValueError(
            f"Unknown mapping of numpy {field.numpy_dtype} to tensorflow dtype (field {field.name})"
        ) from error


def _value_for_tensorflow(field: UnischemaField, value: Any) -> Any:
    """Returns a value that TensorFlow converts to the type of the field."""
    if value is None:
        raise RuntimeError(
            f'Encountered "{field.name}"=None. Tensorflow does not support None values as a '
            "tensor. Consider filtering out these rows using a predicate."
        )
    if isinstance(value, Decimal):
        return str(value.normalize())
    if field.numpy_dtype is np.datetime64:
        return np.asarray(value, "datetime64[ns]").astype(np.int64)
    return value
