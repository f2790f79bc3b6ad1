# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as a function of columns, for expressions and SQL.

Spark 4.1 and newer pass Arrow's arrays to the function. Older versions pass pandas' series, which
are converted.
"""

# ruff: noqa: PLC0415, SLF001 - a task loads the parts that it uses; private names of this package

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions, types

from farandole.common.counted_noun import format_counted_noun
from farandole.data.encoding import MISSING_FLAG_SUFFIX, columns_of_features
from farandole.data.lazy_pyarrow import pa
from farandole.data.statistics_passes import quote_column
from farandole.spark.common.model.output_columns import unknown_outputs_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from farandole.spark.common.model.base import FarandoleModel
    from farandole.spark.common.model.output_columns import ModelOutput
    from farandole.spark.common.model.predictor import BatchPredictor


@dataclass(frozen=True)
class FunctionColumns:
    """The arguments of a function, in the place of a DataFrame with these columns.

    Attributes:
        columns: their names.
        sparkSession: the session.
    """

    columns: list[str]
    sparkSession: SparkSession  # noqa: N815 - DataFrame's name

    @property
    def schema(self) -> types.StructType:
        """The types of a DataFrame's columns, which only a prediction from whole rows needs.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "get_prediction_fn of this model takes whole rows, so the model is no function of "
            "columns: use transform, or mark the function with "
            "farandole.spark.common.transform.batched"
        )


@dataclass(frozen=True)
class ColumnPrediction:
    """Predicts the rows of some columns, in a task.

    Attributes:
        predictor: knows the names of the columns and the types of its outputs.
        names: of the columns that the predictor adds.
        wanted: the one of them that is returned; `None` returns all, as a struct if there are
            several.
    """

    predictor: BatchPredictor
    names: tuple[str, ...]
    wanted: str | None

    def predict_arrays(self, *columns: pa.Array) -> pa.Array:
        """Returns the predictions.

        Args:
            *columns: of equal length, in the order of `predictor.columns`.

        Raises:
            ValueError: there are more or fewer columns, or the model does not take them.
        """
        check_argument_count(self.predictor.columns, len(columns))
        numbers = [f"column{index}" for index in range(len(columns))]
        batch = pa.RecordBatch.from_arrays(list(columns), names=numbers)
        (result,) = self.predictor.predict_batches(iter([batch]))
        added = [_vectors_as_lists(column) for column in result.columns[len(columns) :]]
        if self.wanted is not None:
            return added[self.names.index(self.wanted)]
        return added[0] if len(added) == 1 else pa.StructArray.from_arrays(added, list(self.names))


def create_column_function(
    model: FarandoleModel, session: SparkSession, output: str | None
) -> tuple[list[str], Callable[..., Any]]:
    """Returns the names of the columns that a model takes, and Spark's function of them.

    Args:
        model: the fitted model.
        session: in which the function will be used.
        output: the column of `transform` that the function returns; `None` returns all.

    Raises:
        ValueError: there is no such column, or the outputs of the model are not known.
    """
    labels, names = model.getLabelColumns(), model.getOutputCols()
    features = [name for group in model._input_columns() for name in group]
    if model.getModel() is None or not features or not labels:
        raise ValueError("model, feature_columns and label_columns are required")
    outputs: list[ModelOutput] | None = model.getOrDefault("outputs")
    if not outputs:
        raise unknown_outputs_error("a function of columns has no row", labels)
    # `age__missing` is computed from `age`, if that is a feature, too.
    sources = [name for name in features if not name.endswith(MISSING_FLAG_SUFFIX)]
    columns = columns_of_features(features, sources)
    given: Any = FunctionColumns(columns, session)
    added = model._added_class_columns(given, has_label=False)
    new = [*names, *([] if added is None else added.column_names)]
    if len(names) != len(labels) or len(set(new)) != len(new):
        raise ValueError(
            f"the columns of the labels {', '.join(labels)} need one name each, and different "
            f"ones: {', '.join(new)}"
        )
    if output is not None and output not in new:
        raise ValueError(f"the model has no output column {output!r}: {', '.join(new)}")
    predictor = model._create_predictor(given)
    prediction = ColumnPrediction(
        predictor.with_output_kinds([one.kind for one in outputs], added), tuple(new), output
    )
    kinds = [one.spark_type for one in outputs] + ([] if added is None else added.column_types)
    return columns, make_column_function(prediction, kinds)


def default_to_columns(names: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, which takes the columns of some names if it is called without
    arguments.

    Args:
        names: of the columns.
        function: Spark's function of them.
    """

    def predict(*columns: Any) -> Any:
        if not columns:
            return function(*(functions.col(quote_column(name)) for name in names))
        check_argument_count(names, len(columns))
        return function(*columns)

    return predict


def check_argument_count(expected: Sequence[str], given: int) -> None:
    """Refuses a call with more or fewer columns.

    Args:
        expected: names of the columns.
        given: number of the columns in the call.

    Raises:
        TypeError: the numbers differ; the message names the columns.
    """
    if given != len(expected):
        raise TypeError(
            f"the model takes {format_counted_noun(len(expected), 'column')} "
            f"({', '.join(expected)}), and was called with {given}"
        )


def make_column_function(
    prediction: ColumnPrediction, added: Sequence[types.DataType]
) -> Callable[..., Any]:
    """Returns Spark's user-defined function of a prediction.

    Args:
        prediction: what runs in tasks.
        added: types of the columns that `transform` would add, one for each of `prediction.names`.
    """
    kinds = dict(zip(prediction.names, map(_plain_type, added), strict=True))
    if prediction.wanted is not None:
        result = kinds[prediction.wanted]
    elif len(kinds) == 1:
        (result,) = kinds.values()
    else:
        result = types.StructType([types.StructField(*field) for field in kinds.items()])

    arrow_udf: Any = getattr(functions, "arrow_udf", None)
    if arrow_udf is None:
        return make_pandas_function(prediction, result)

    def predict_arrays(*columns: Any) -> Any:
        return prediction.predict_arrays(*columns)

    # Spark evaluates the annotations.
    predict_arrays.__annotations__ = {"columns": pa.Array, "return": pa.Array}
    return arrow_udf(predict_arrays, result)


def make_pandas_function(
    prediction: ColumnPrediction, result: types.DataType
) -> Callable[..., Any]:
    """Returns the function for versions of Spark without functions of Arrow's arrays.

    Args:
        prediction: what runs in tasks.
        result: type of the function's result.
    """
    import pandas as pd

    def predict_series(*columns: Any) -> Any:
        found = prediction.predict_arrays(*map(_series_as_array, columns))
        if isinstance(found, pa.StructArray):
            return pd.DataFrame(
                {field.name: found.field(field.name).to_pandas() for field in found.type}
            )
        return found.to_pandas()

    is_struct = isinstance(result, types.StructType)
    predict_series.__annotations__ = {
        "columns": pd.Series,
        "return": pd.DataFrame if is_struct else pd.Series,
    }
    pandas_udf: Any = functions.pandas_udf
    return pandas_udf(predict_series, result)


def _series_as_array(series: Any) -> pa.Array:
    """Returns a column of pandas as Arrow's array.

    Spark's vectors are a frame with a column for each field of their struct, or a series of
    objects, which become lists of their elements. Other structs, such as images, are such frames.
    """
    if hasattr(series, "columns"):
        from farandole.spark.common.model.arrow_arrays import VECTOR_TYPE

        names = [str(name) for name in series.columns]
        if set(names) != {field.name for field in VECTOR_TYPE}:
            columns = [pa.Array.from_pandas(series[name]) for name in names]
            return pa.StructArray.from_arrays(columns, names)
        fields = [
            pa.array(series[field.name], type=field.type, from_pandas=True) for field in VECTOR_TYPE
        ]
        is_null = pa.array(series["type"].isna())
        return pa.StructArray.from_arrays(
            fields, names=[field.name for field in VECTOR_TYPE], mask=is_null
        )
    if any(hasattr(one, "toArray") for one in series.dropna().head(1)):
        return pa.array([None if one is None else one.toArray() for one in series])
    return pa.Array.from_pandas(series)


def _plain_type(kind: types.DataType) -> types.DataType:
    """Returns the type of a result: SQL has no functions of vectors, so they are arrays."""
    is_vector = isinstance(kind, types.UserDefinedType)
    return types.ArrayType(types.DoubleType()) if is_vector else kind


def _vectors_as_lists(column: pa.Array) -> pa.Array:
    """Returns dense vectors as lists of their elements, and any other column unchanged."""
    return column.field("values") if pa.types.is_struct(column.type) else column
