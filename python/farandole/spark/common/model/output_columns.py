# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts a model's outputs to columns of a DataFrame, for all frameworks."""

# ruff: noqa: PLC0415 - tasks load only the modules that they use

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    from pyspark.sql import DataFrame

    Batches = Iterator[pa.RecordBatch]

_INTEGER_TYPES = {"int8": types.ByteType, "int16": types.ShortType, "int32": types.IntegerType}


@dataclass(frozen=True)
class ModelOutput:
    """One output of a model, and the label it was compared with."""

    label_dtype: str
    """NumPy's name of the label's element."""
    label_is_vector: bool
    size: int
    """Elements of one row of the output."""

    @property
    def kind(self) -> str:
        """The type of a prediction: `vector`, or NumPy's name of a number.

        As in Horovod a number for an integer label is rounded to an integer, halves to even; one
        for a boolean label stays a float.
        """
        if self.label_is_vector or self.size != 1:
            return "vector"
        if self.label_dtype.startswith(("int", "uint")):
            return self.label_dtype if self.label_dtype in _INTEGER_TYPES else "int64"
        return "float32" if self.label_dtype == "float32" else "float64"

    @property
    def spark_type(self) -> types.DataType:
        """The type of the column that `transform` adds."""
        if self.kind == "vector":
            return VectorUDT()
        if self.kind.startswith("int"):
            return _INTEGER_TYPES.get(self.kind, types.LongType)()
        return types.FloatType() if self.kind == "float32" else types.DoubleType()


def parse_outputs(value: Any) -> list[ModelOutput]:
    """Returns the outputs that a file or a caller describes.

    Args:
        value: `ModelOutput` objects, or dicts of their fields.
    """
    return [one if isinstance(one, ModelOutput) else ModelOutput(**one) for one in value]


def outputs_as_dicts(found: list[ModelOutput] | None) -> list[dict[str, Any]] | None:
    """Outputs as plain values, for files.

    Args:
        found: as the model holds them.
    """
    return None if found is None else [asdict(one) for one in found]


def detect_model_outputs(
    dataset: DataFrame, labels: Sequence[str], probe: Callable[[Batches], Batches]
) -> list[ModelOutput]:
    """Predicts one row to find the outputs of a model.

    Args:
        dataset: to be transformed.
        labels: columns the outputs are named after; their types count where the DataFrame has them.
        probe: yields one row of (size) per output, of the first batch with rows.

    Raises:
        ValueError: there is no row, or the rows are a stream.
    """
    if dataset.isStreaming:
        raise unknown_outputs_error("a stream has no row", labels)
    sizes = (
        rename_columns_to_numbers(dataset.limit(1))
        .mapInArrow(_as_plain_function(probe), "size int")
        .collect()
    )
    if not sizes:
        raise unknown_outputs_error("the DataFrame has no row", labels)
    schema = {field.name: field.dataType for field in dataset.schema.fields}
    return [
        ModelOutput(
            numpy_type_name(schema.get(label)), isinstance(schema.get(label), VectorUDT), row.size
        )
        for label, row in zip(labels, sizes, strict=True)
    ]


def unknown_outputs_error(reason: str, labels: Sequence[str]) -> ValueError:
    """Returns the error for a model whose outputs are not known and cannot be found.

    Args:
        reason: why they cannot be found, as a clause that ends with a row.
        labels: of the model.
    """
    each = asdict(ModelOutput(label_dtype="float32", label_is_vector=False, size=1))
    return ValueError(
        f"the outputs of the model are unknown, and {reason} to determine them: fit sets them; "
        f"for a model made by hand, set its parameter outputs to one entry for each of the labels "
        f"{', '.join(labels)}, such as model.setOutputs([{each}])"
    )


def add_predictions(
    dataset: DataFrame,
    names: Sequence[str],
    added: Sequence[types.DataType],
    predict: Callable[[Batches], Batches],
) -> DataFrame:
    """Returns the DataFrame with more columns.

    Args:
        dataset: any.
        names: of the new columns.
        added: their types.
        predict: appends the columns to batches whose columns go by number.
    """
    inner = rename_columns_to_numbers(dataset)
    fields = [types.StructField(f"output{index}", one) for index, one in enumerate(added)]
    predicted = inner.mapInArrow(
        _as_plain_function(predict), types.StructType([*inner.schema.fields, *fields])
    )
    return predicted.toDF(*dataset.columns, *names)


def rename_columns_to_numbers(dataset: DataFrame) -> DataFrame:
    """Returns the same with numbers for names: mapInArrow takes no names with dots or backticks,
    and none twice.
    """
    return dataset.toDF(*(f"column{index}" for index in range(len(dataset.columns))))


def numpy_type_name(kind: types.DataType | None) -> str:
    """Returns NumPy's name of an output column's element type: an integer type, `float32`, or
    `float64` for every other type.

    Args:
        kind: the column's type, if there is one.
    """
    names = {
        types.ByteType: "int8",
        types.ShortType: "int16",
        types.IntegerType: "int32",
        types.LongType: "int64",
    }
    return names.get(type(kind), "float32" if isinstance(kind, types.FloatType) else "float64")


def prediction_column(values: npt.NDArray[Any], kind: str) -> pa.Array:
    """Predictions as the column that `transform` adds.

    Args:
        values: shape (rows, elements).
        kind: `vector`, or NumPy's name of a number; integers are rounded, halves to even.
    """
    from farandole.spark.common.model.arrow_arrays import to_spark_vectors

    if kind == "vector":
        return to_spark_vectors(values)
    single = values.reshape(-1)
    if kind.startswith("int") and single.dtype.kind == "f":
        single = np.rint(single)
    return pa.array(single.astype(kind))


def _as_plain_function(function: Callable[[Batches], Batches]) -> Callable[[Batches], Batches]:
    """Returns a plain function: Spark looks at its argument's code."""

    def map_batches(batches: Batches) -> Batches:
        return function(batches)

    return map_batches
