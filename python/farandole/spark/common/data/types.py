# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Conversions of Spark's types to types of NumPy and Python, and to the names in Horovod's
metadata.
"""

# ruff: noqa: PLC0415 - Spark is imported only by the functions that need it

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql.types import StructType

_SCALAR_TYPES = {
    "IntegerType": ("Int", np.int32, int),
    "StringType": ("String", np.str_, str),
    "FloatType": ("Float", np.float32, float),
    "BinaryType": ("Binary", np.uint8, bytes),
    "DoubleType": ("Double", np.float64, float),
    "LongType": ("Long", np.int64, int),
    "BooleanType": ("Boolean", np.bool_, bool),
}
"""Spark's scalar types: the word, NumPy's type, Python's type."""
_VECTOR_TYPES = ("VectorUDT", "SparseVector", "DenseVector")


def _type_name(dtype: Any) -> str:
    return dtype.__name__ if isinstance(dtype, type) else type(dtype).__name__


def data_type_to_str(dtype: Any) -> str:
    """Returns the word for a class of Spark's types, such as `Int` for `IntegerType`.

    Raises:
        ValueError: There is none.
    """
    name = _type_name(dtype)
    if name in _VECTOR_TYPES:
        return "Vector"
    if name not in _SCALAR_TYPES:
        raise ValueError(f"this Spark type has no name here: {dtype}")
    return _SCALAR_TYPES[name][0]


def numpy_type_to_str(dtype: Any) -> str:
    """Returns the word for a NumPy type, such as `Int` for `int32`.

    Raises:
        ValueError: There is none.
    """
    for word, known, _ in _SCALAR_TYPES.values():
        if known is not np.str_ and np.dtype(dtype) == np.dtype(known):
            return word
    raise ValueError(f"this NumPy type has no name here: {dtype}")


def spark_scalar_to_python_type(dtype: Any) -> type:
    """Python's type for a class of Spark's scalar types.

    Raises:
        ValueError: There is none.
    """
    if _type_name(dtype) not in _SCALAR_TYPES:
        raise ValueError(f"Python has no equivalent of this Spark type: {dtype}")
    return _SCALAR_TYPES[_type_name(dtype)][2]


def data_type_to_numpy(dtype: Any) -> type:
    """NumPy's type for the elements of a class of Spark's types.

    Raises:
        ValueError: There is none.
    """
    name = _type_name(dtype)
    if name in (*_VECTOR_TYPES, "ArrayType"):
        return np.float64
    if name not in _SCALAR_TYPES:
        raise ValueError(f"NumPy has no equivalent of this Spark type: {dtype}")
    return _SCALAR_TYPES[name][1]


def pyarrow_to_spark_data_type(dtype: pa.DataType) -> type:
    """Returns the class of Spark's types for a type of Arrow's; lists are dense vectors."""
    from pyspark.ml.linalg import DenseVector
    from pyspark.sql.pandas.types import from_arrow_type

    return DenseVector if pa.types.is_list(dtype) else type(from_arrow_type(dtype))


def get_output_cols(input_df_schema: StructType, output_cols: Sequence[str]) -> list[str]:
    """Returns the columns of a DataFrame, followed by the columns that a model adds."""
    return [*input_df_schema.names, *output_cols]


def get_spark_df_output_schema(
    input_df_schema: StructType,
    label_cols: Sequence[str],
    output_cols: Sequence[str],
    metadata: Mapping[str, Mapping[str, Any]],
) -> StructType:
    """Returns the schema of a DataFrame with a model's outputs.

    Args:
        input_df_schema: the DataFrame's.
        label_cols: the labels, one for each output.
        output_cols: names of the outputs, which are of their labels' types.
        metadata: the labels' types, as `spark_data_type`.

    Raises:
        ValueError: the numbers of columns differ, or a column is there already.
    """
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructField, StructType

    if len(label_cols) != len(output_cols):
        raise ValueError(
            f"there must be one output for each label: {list(output_cols)} for {list(label_cols)}"
        )
    taken = sorted({*output_cols} & {*input_df_schema.names})
    if taken:
        raise ValueError(f"columns of these names are there already: {', '.join(taken)}")
    fields = copy.deepcopy(input_df_schema.fields)
    for label, output in zip(label_cols, output_cols, strict=True):
        kind = metadata[label]["spark_data_type"]
        fields.append(
            StructField(
                output, VectorUDT() if _type_name(kind) in _VECTOR_TYPES else kind(), nullable=True
            )
        )
    return StructType(fields)
