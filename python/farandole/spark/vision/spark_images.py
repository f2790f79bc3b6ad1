# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The column of images of a DataFrame or a table: its type, and structs as bytes."""

# ruff: noqa: PLC0415 - a fit without Spark loads no functions of it

from __future__ import annotations

from functools import reduce
from typing import Any

import pyarrow as pa

from farandole.data.inputs.spark_images import (
    IMAGE_FIELDS,
    PACKED_FIELDS,
    PACKED_MAGIC,
    is_spark_image_type,
    pack_spark_images,
)

_TEXT_TYPES = ("binary", "string", "varchar", "char")
_HEX_DIGITS_PER_INT = 8


def pack_image_column(dataset: Any, name: str) -> Any:
    """Returns rows in which structs of Spark's source `image` are packed images.

    Args:
        dataset: a Spark DataFrame, or rows that Spark does not hold.
        name: the column.

    Raises:
        ValueError: the column has a type that holds no images.
    """
    if hasattr(dataset, "mapInArrow"):
        check_spark_type(dataset.schema, name)
        is_struct = name in dataset.columns and _is_image_struct(dataset.schema[name].dataType)
        return dataset.withColumn(name, _packed_column(name)) if is_struct else dataset
    if not isinstance(dataset, pa.Table) or name not in dataset.column_names:
        return dataset
    kind = dataset.schema.field(name).type
    if is_spark_image_type(kind):
        index = dataset.column_names.index(name)
        return dataset.set_column(index, name, pack_spark_images(dataset.column(name)))
    is_file = (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )
    is_path = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_file or is_path or pa.types.is_string_view(kind) or pa.types.is_dictionary(kind)):
        raise ValueError(describe_wrong_type(name, str(kind)))
    return dataset


def check_spark_type(schema: Any, name: str) -> None:
    """Refuses a column of a DataFrame that holds no images.

    Args:
        schema: schema of the DataFrame.
        name: the column; a missing one is accepted.

    Raises:
        ValueError: the column has another type.
    """
    if name not in schema.names:
        return
    kind = schema[name].dataType
    if kind.typeName() not in _TEXT_TYPES and not _is_image_struct(kind):
        raise ValueError(describe_wrong_type(name, kind.simpleString()))


def describe_wrong_type(name: str, kind: str) -> str:
    """Returns the sentence about a column that holds no images.

    Args:
        name: the column.
        kind: its type.
    """
    return (
        f"image column {name!r} has type {kind}: images are bytes of files, paths, or structs of "
        "Spark's source image"
    )


def _is_image_struct(kind: Any) -> bool:
    return kind.typeName() == "struct" and tuple(kind.names) == IMAGE_FIELDS


def _packed_column(name: str) -> Any:
    """Returns the expression of packed images, see `farandole.data.inputs.spark_images`."""
    from pyspark.sql import functions as sf

    image = sf.col(f"`{name.replace('`', '``')}`")
    numbers = [sf.lpad(sf.hex(image[field]), _HEX_DIGITS_PER_INT, "0") for field in PACKED_FIELDS]
    # A negative number has 16 digits, which all are F for -1.
    header = reduce(sf.concat, numbers, sf.lit(PACKED_MAGIC.hex()))
    return sf.concat(sf.unhex(header), image["data"])
