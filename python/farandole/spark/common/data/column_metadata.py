# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The description of columns in Horovod's form, a dict by column, which subclasses of estimators
and models get as `metadata`.
"""

# ruff: noqa: PLC0415 - Spark is imported where there is a description

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farandole.data.columns import PreparedColumn

_SPARK_TYPE_NAMES = {
    "bool": "BooleanType",
    "int8": "ByteType",
    "int16": "ShortType",
    "int32": "IntegerType",
    "float16": "FloatType",
    "float32": "FloatType",
    "float64": "DoubleType",
    "utf8": "StringType",
    "binary": "BinaryType",
}
"""Names of Spark's types, by NumPy's or the reader's name of a type; other integers are long."""


def column_metadata(columns: Iterable[PreparedColumn]) -> dict[str, dict[str, Any]]:
    """Returns the description of columns by name.

    Args:
        columns: columns of prepared data.

    Returns:
        For each column `spark_data_type` (a class of Spark's types, `DenseVector` for vectors and
        lists), `is_sparse_vector_only` (never: prepared vectors are dense), `shape` and `max_size`
        (the number of elements) of one row, `intermediate_format` (always `nochange`), and
        `element`, NumPy's name of the element.
    """
    return {
        column.name: {
            "spark_data_type": _spark_type_class(
                "DenseVector" if column.shape else _SPARK_TYPE_NAMES.get(column.dtype, "LongType")
            ),
            "is_sparse_vector_only": False,
            "shape": column.shape,
            "intermediate_format": "nochange",
            "max_size": column.element_count,
            "element": column.dtype,
        }
        for column in columns
    }


def parse_metadata(_name: str, value: Any) -> Any:
    """Returns a description of columns in which Spark's types are classes, as a file has them by
    name. Anything else is returned as it is.
    """
    return _with_spark_types(
        value, lambda kind: _spark_type_class(kind) if isinstance(kind, str) else kind
    )


def metadata_as_plain_values(value: Any) -> Any:
    """Returns a description of columns with Spark's types by name, for files."""
    return _with_spark_types(
        value, lambda kind: kind.__name__ if isinstance(kind, type) else type(kind).__name__
    )


def _with_spark_types(value: Any, convert: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: {**entry, "spark_data_type": convert(entry["spark_data_type"])}
        if isinstance(entry, dict) and "spark_data_type" in entry
        else entry
        for name, entry in value.items()
    }


def _spark_type_class(name: str) -> type:
    """Returns a class of Spark's types by its name.

    Raises:
        ValueError: there is none.
    """
    from pyspark.ml import linalg
    from pyspark.sql import types

    found = getattr(linalg if name.endswith("Vector") else types, name, None)
    if not isinstance(found, type):
        raise ValueError(f"Spark has no type of this name: {name}")
    return found
