# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predictions in Spark ML's manner: raw predictions, probabilities, a predicted class, thresholds
and names of classes.

They are for models with one label. The output of a model has a form: `logits`, `probabilities` or
`log_probabilities` of classes, or `values`, which are not classes. A model with two classes may
return one number, which belongs to the second class.
"""

# ruff: noqa: N802, N815, PLC0415 - names are Spark ML's; tasks load only the modules that they use

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types

from farandole.common import argument_checks
from farandole.data.lazy_pyarrow import pa, pc
from farandole.spark.common.parameter import DeclaredParams, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

OUTPUT_FORMS = ("values", "logits", "probabilities", "log_probabilities")
CLASS_COLUMN_PARAMS = (
    "rawPredictionCol",
    "probabilityCol",
    "predictionCol",
    "predictedLabelCol",
    "labelIndexCol",
)
"""The parameters that name columns, in the order of the columns."""
_SPARK_TYPE_BY_PARAM = {
    "rawPredictionCol": VectorUDT,
    "probabilityCol": VectorUDT,
    "predictedLabelCol": types.StringType,
}
_BINARY_CLASS_COUNT = 2


def _check_thresholds(name: str, value: Any) -> list[float]:
    numbers = argument_checks.check_number_list(name, value)
    if (
        any(not 0 <= one < float("inf") for one in numbers)
        or numbers.count(0.0) > 1
        or len(numbers) < _BINARY_CLASS_COUNT
    ):
        raise ValueError(
            f"{name} must be one number for each class, 0 or more, and at most one of them 0: "
            f"{value}"
        )
    return numbers


class ClassificationParams(DeclaredParams):
    """The parameters of estimators and models for predictions as in Spark ML."""

    predictionCol: Parameter[str] = Parameter(
        "Column that `transform` adds for the class of a row, or its value, as Spark ML's models "
        "do.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    rawPredictionCol: Parameter[str] = Parameter(
        "Column for one number of each class, which is larger if the class is more likely.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    probabilityCol: Parameter[str] = Parameter(
        "Column for the probability of each class.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    predictedLabelCol: Parameter[str] = Parameter(
        "Column for the name of the class.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    labelIndexCol: Parameter[str] = Parameter(
        "Column for the index of the label's class, where labels are strings.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    thresholds: Parameter[Sequence[float]] = Parameter(
        "One number of each class; the class of the largest probability by threshold is predicted.",
        argument_checks.make_optional_check(_check_thresholds),
        default=None,
    )
    class_names: Parameter[Sequence[str]] = Parameter(
        "Names of the classes, if the label has none.",
        argument_checks.make_optional_check(argument_checks.check_column_names),
        default=None,
    )
    output_form: Parameter[str] = Parameter(
        'Form of the model\'s outputs: `"values"`, or for classes `"logits"`, `"probabilities"` or '
        '`"log_probabilities"`; without it, the form that its loss takes, if it is known.',
        argument_checks.make_optional_check(argument_checks.make_choice_check(*OUTPUT_FORMS)),
        default=None,
    )

    def __init_subclass__(cls, **more: Any) -> None:
        """Prefers accessors that a subclass mixes in to those of this class.

        Horovod's classes have no parameters in Spark ML's manner, so a subclass of theirs may get
        `getPredictionCol` from a class that comes after Horovod's in its bases.
        """
        super().__init_subclass__(**more)
        own = {
            name: method
            for name, method in vars(ClassificationParams).items()
            if name.startswith(("get", "set"))
        }
        mixed_in = [base for base in cls.__mro__ if not issubclass(base, DeclaredParams)]
        for base in mixed_in:
            for name in own.keys() & vars(base).keys():
                if getattr(cls, name) is own[name]:
                    setattr(cls, name, vars(base)[name])

    def setThreshold(self, value: float) -> Self:
        """Predicts the second of two classes from this probability on.

        Args:
            value: Between 0 and 1.
        """
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
            raise ValueError(f"the threshold of two classes must be between 0 and 1: {value!r}")
        return self._set(thresholds=[1.0 - float(value), float(value)])

    def _set_class_params(self) -> dict[str, Any]:
        """Returns the parameters that are set, by name."""
        names = (*CLASS_COLUMN_PARAMS, "thresholds", "class_names", "output_form")
        return {name: value for name in names if (value := self.getOrDefault(name)) is not None}

    def _requested_class_columns(self) -> dict[str, str]:
        """Returns the columns that are asked for."""
        return {
            name: value
            for name in CLASS_COLUMN_PARAMS
            if (value := self.getOrDefault(name)) is not None
        }


@dataclass(frozen=True)
class AddedClassColumns:
    """Columns that are added to a model's only output."""

    columns: tuple[tuple[str, str], ...]
    """Parameter and name of each."""
    form: str
    thresholds: tuple[float, ...] | None
    classes: tuple[Any, ...] | None
    """The label's own values, or names for them; `None` where they are numbers."""
    label: int | None
    """Place of the label among the DataFrame's columns."""
    indexed: bool = False
    """Whether labels are values of `classes`; otherwise they are indices."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return [name for _, name in self.columns]

    @property
    def column_types(self) -> list[types.DataType]:
        """Types of the columns."""
        return [_SPARK_TYPE_BY_PARAM.get(what, types.DoubleType)() for what, _ in self.columns]

    def build_columns(self, batch: pa.RecordBatch, output: Array) -> list[pa.Array]:
        """Returns the columns of some rows.

        Args:
            batch: the rows.
            output: of the model, (rows, elements).
        """
        from farandole.spark.common.model.arrow_arrays import to_spark_vectors

        found: list[pa.Array] = []
        raw, probability = (
            (output, output)
            if self.form == "values"
            else raw_scores_and_probabilities(output, self.form)
        )
        for what, _ in self.columns:
            if what == "rawPredictionCol":
                found.append(to_spark_vectors(raw))
            elif what == "probabilityCol":
                found.append(to_spark_vectors(probability))
            elif what == "labelIndexCol":
                found.append(self._label_index(batch))
            elif self.form == "values":
                found.append(pa.array(output.reshape(len(output), -1)[:, 0].astype(np.float64)))
            else:
                index = predict_classes(probability, self.thresholds)
                if what == "predictionCol":
                    found.append(pa.array(index.astype(np.float64)))
                else:
                    names = pa.array(
                        [str(one) for one in self.classes or range(probability.shape[1])]
                    )
                    found.append(names.take(pa.array(index)))
        return found

    def _label_index(self, batch: pa.RecordBatch) -> Any:
        """Returns the label as the index of its class; null where it is missing or no class."""
        from farandole.data.encoding import normalize_categories

        if self.label is None:
            return pa.nulls(batch.num_rows, pa.float64())
        column = batch.column(self.label)
        if self.indexed:
            column = normalize_categories(column, "label")
            column = pc.index_in(column, value_set=pa.array(self.classes, column.type))
        return column.cast(pa.float64())


def raw_scores_and_probabilities(output: Array, form: str) -> tuple[Array, Array]:
    """Returns raw predictions and probabilities, (rows, classes).

    Args:
        output: of a model, (rows, elements); one element is of the second of two classes.
        form: of the output, but for `values`.
    """
    values = output.astype(np.float64)
    if values.shape[1] == 1:
        if form == "logits":
            second = np.exp(-np.logaddexp(0.0, -values))
            first = np.exp(-np.logaddexp(0.0, values))
            return np.concatenate([-values, values], axis=1), np.concatenate(
                [first, second], axis=1
            )
        second = np.exp(values) if form == "log_probabilities" else values
        both = np.concatenate([1.0 - second, second], axis=1)
        return both, both
    if form == "logits":
        shifted = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
        # Evaluators of two classes rank rows by the second number alone: it has to be the margin,
        # as in Spark ML.
        margin = values[:, 1:] - values[:, :1] if values.shape[1] == _BINARY_CLASS_COUNT else values
        raw = (
            np.concatenate([-margin, margin], axis=1)
            if values.shape[1] == _BINARY_CLASS_COUNT
            else values
        )
        return raw, shifted / shifted.sum(axis=1, keepdims=True)
    return values, np.exp(values) if form == "log_probabilities" else values


def predict_classes(probability: Array, thresholds: Sequence[float] | None) -> Array:
    """Returns the class of each row, as Spark ML predicts it.

    Args:
        probability: (rows, classes).
        thresholds: one of each class.

    Raises:
        ValueError: there are more or fewer thresholds than classes.
    """
    if thresholds is None or not len(probability):
        return probability.argmax(axis=1)
    if len(thresholds) != probability.shape[1]:
        raise ValueError(
            f"thresholds need one number for each of {probability.shape[1]} classes: "
            f"{list(thresholds)}"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = probability / np.asarray(thresholds)
    return np.nan_to_num(scaled, nan=0.0, posinf=np.inf).argmax(axis=1)
