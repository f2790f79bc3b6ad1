# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Code shared by the fitted models of all frameworks: predictions, their columns, and metrics
over rows.
"""

# ruff: noqa: PLC0415 - what needs a session is loaded when there is one

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import cloudpickle
from pyspark.ml import Model

from farandole.common import argument_checks, pickling
from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.data.encoding import ColumnEncoding
from farandole.spark.common.data.schema import check_types
from farandole.spark.common.model.class_columns import AddedClassColumns, ClassificationParams
from farandole.spark.common.model.output_columns import (
    ModelOutput,
    add_predictions,
    detect_model_outputs,
    parse_outputs,
    rename_columns_to_numbers,
)
from farandole.spark.common.param_checks import feature_groups
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.params import ModelParams
from farandole.spark.common.show.progress import ProgressLines
from farandole.spark.common.transform import UserTransformation

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from farandole.data.statistics import ColumnDrift
    from farandole.runner.show.history import Entry
    from farandole.spark.common.model.evaluation import (
        ClassificationSums,
        ModelEvaluation,
        RegressionSums,
    )
    from farandole.spark.common.model.model_summary import LayerSummary
    from farandole.spark.common.model.onnx import Signature
    from farandole.spark.common.model.predictor import BatchPredictor
    from farandole.spark.common.show.chart import MetricsChart
    from farandole.ui import Viewer


_SHOWN_MESSAGES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Messages that each session has printed."""


class FarandoleModel(ClassificationParams, ModelParams, Model):
    """The base of the models of all frameworks."""

    outputs: Parameter[Sequence[ModelOutput]] = Parameter(
        "Description of the outputs; determined if omitted.",
        argument_checks.make_conversion_check(parse_outputs),
        default=None,
    )

    _framework = "the framework"
    _onnx_extras: ClassVar[str] = "onnx"
    """Extras of Farandole that install the packages for an export."""
    _onnx_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that an export needs in addition to ONNX's own."""

    def transform(self, df: Any, params: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adds the model's predictions to a DataFrame.

        Args:
            df: the rows.
            params: values of parameters that hold for this call.

        Returns:
            The DataFrame with the columns of `getOutputCols`, then those in Spark ML's manner that
            were asked for: `rawPredictionCol`, `probabilityCol`, `predictionCol`,
            `predictedLabelCol`, `labelIndexCol`.

        Raises:
            ValueError: a column is missing or does not fit; the message names it.
        """
        return super().transform(df, params)

    def set_unset_params(self, values: Mapping[str, Any]) -> None:
        """Sets the parameters that the model's constructor has left unset. Fits call this, because
        a subclass's `_get_model_kwargs` may return Horovod's parameters alone.

        Args:
            values: by name; names that the model does not have are left out.
        """
        self.setParams(
            **{
                name: value
                for name, value in values.items()
                if value is not None and self.hasParam(name) and not self.isSet(name)
            }
        )

    def evaluate(self, df: DataFrame) -> ModelEvaluation:
        """Predicts the rows of a DataFrame and compares them with their label, in one pass on the
        executors.

        Args:
            df: the rows, with the label.

        Returns:
            Metrics over all rows: of classes or of values, as the model's `output_form` says.

        Raises:
            ValueError: a column is missing, or the model has several labels, or an output of
                unknown form.
        """
        from farandole.spark.common.model.evaluation import empty_sums, sum_evaluated_rows

        self._check_feature_columns(df)
        form, name = self._known_single_output_form("evaluate"), self.getLabelColumns()[0]
        start = empty_sums(form, self.getOrDefault("thresholds"))
        for part in self._collect_task_sums(
            df, name, start, sum_evaluated_rows, "farandole: evaluating a model"
        ):
            start.merge(part)
        return start.to_evaluation(self.getClasses())

    def _collect_task_sums(
        self,
        df: DataFrame,
        label: str,
        start: ClassificationSums | RegressionSums,
        task: Callable[..., Any],
        title: str,
    ) -> list[Any]:
        """Runs the task on all rows and returns the sums, one object for each task.

        Args:
            df: the rows.
            label: the label column.
            start: with nothing counted.
            task: takes the batches of a task, the predictor, what gives labels, and `start`;
                returns the sums.
            title: of Spark's job.
        """
        from farandole.spark.job.session_adapter import SparkSessionAdapter

        roles = ColumnRoles(features=(), labels=(label,))
        check_columns_present(roles, df.columns, "DataFrame")
        check_types(roles, df.schema, categories=self.getCategories())
        predictor = self._create_predictor(df)
        read_labels = _label_reader(label, df.columns, self._label_encoding())

        def pack_sums(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pickle  # as pyarrow, loaded in tasks

            import pyarrow as pa

            packed = pickle.dumps(task(batches, predictor, read_labels, start))
            yield pa.RecordBatch.from_arrays([pa.array([packed], pa.binary())], names=["part"])

        rows = SparkSessionAdapter.from_active_session().collect_rows(
            rename_columns_to_numbers(df).mapInArrow(pack_sums, "part binary"), title
        )
        return [cloudpickle.loads(row.part) for row in rows]

    def importance(
        self, df: DataFrame, metric: str | None = None, *, repeats: int = 1, seed: int = 0
    ) -> dict[str, float]:
        """Measures how much worse the model predicts when the values of one column are exchanged
        between rows.

        Values are exchanged between the rows of a task (65,536 or 64 MiB at a time), so rows should
        be in no order: a DataFrame that is sorted by a column understates its importance. The rows
        are read once and predicted once for each column and repeat.

        Args:
            df: the rows, with the label.
            metric: which metric of `evaluate`; default: `log_loss` of classes, `mse` of values.
            repeats: orders of each column, whose results are averaged.
            seed: of the orders.

        Returns:
            By feature column, how much worse the metric gets; the largest first. Features that are
            made of a column, such as `age__missing`, change with it.

        Raises:
            ValueError: as `evaluate`; there is no such metric, or `repeats` is below 1.
        """
        from farandole.data.encoding import columns_of_features
        from farandole.spark.common.model.evaluation import empty_sums
        from farandole.spark.common.model.importance import (
            column_importances,
            sum_permuted_evaluations,
        )

        repeats = argument_checks.check_whole_number("repeats", repeats)
        self._check_feature_columns(df)
        form, label = self._known_single_output_form("importance"), self.getLabelColumns()[0]
        start = empty_sums(
            form, self.getOrDefault("thresholds"), by_score=metric == "area_under_roc"
        )
        features = columns_of_features(
            [name for group in self._input_columns() for name in group], df.columns
        )
        names = {df.columns.index(name): name for name in features}
        found: dict[Any, Any] = {}
        task = partial(
            sum_permuted_evaluations,
            columns=list(names),
            seeds=[seed + turn for turn in range(repeats)],
        )
        for part in self._collect_task_sums(
            df, label, start, task, "farandole: importance of columns"
        ):
            for key, counted in part.items():
                found.setdefault(key, deepcopy(start)).merge(counted)
        return column_importances(found or {None: start}, names, metric)

    def drift(self, df: Any, **reading: Any) -> dict[str, ColumnDrift]:
        """Compares the columns of other rows with the columns of the training rows.

        Args:
            df: a DataFrame, whose rows the executors count, or another source of
                `farandole.data.prepare_data`.
            reading: `format`, `types` and `options`, as for `prepare_data`.

        Returns:
            By column, the largest drift first: features, and labels that `df` has.

        Raises:
            ValueError: the model carries no statistics, or a feature is missing or has another kind
                of values.
        """
        from farandole.data.encoding import columns_of_features
        from farandole.data.statistics import Statistics

        known = self.getStatistics()
        if known is None:
            raise ValueError(
                "drift needs the statistics of the training data: fit with statistics=True, or "
                "pass it to prepare_data"
            )
        labels = self.getLabelColumns() or []
        columns = columns_of_features(
            [*(name for group in self._input_columns() for name in group), *labels], known.columns
        )
        own = Statistics({name: known[name] for name in columns if name in known.columns})
        return own.drift(df, optional=labels, **reading)

    def explain(self) -> str:
        """Describes the model: its inputs and outputs, the treatment of missing values, its layers
        and parameters.

        Returns:
            Lines of text, which `print` shows.

        Raises:
            ValueError: there is no model.
        """
        if self.getModel() is None:
            raise ValueError("model is required")
        from farandole.spark.common.model import model_summary

        known = self.getSignature() or [{"columns": one} for one in self._input_columns()]
        outputs, run = self.getOrDefault("outputs"), self.getRunId()
        parts = {
            "inputs": model_summary.describe_inputs(known, self.getCategories()),
            "missing values": model_summary.describe_fills(
                self._feature_encoding().fill, self.getLearned()
            ),
            "outputs": model_summary.describe_outputs(
                self.getOutputCols(), outputs, self.getOrDefault("output_form"), self.getClasses()
            ),
            "layers": model_summary.describe_layers(self._layer_summaries()),
        }
        title = type(self).__name__ + (f" of run {run}" if run else "")
        return "\n".join(
            [title, *(f"{name}\n  " + "\n  ".join(lines) for name, lines in parts.items() if lines)]
        )

    def to_onnx(
        self,
        path: str | os.PathLike[str],
        rows: DataFrame | None = None,
        *,
        opset: int | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        """Writes the model as an ONNX file, which runs without its framework and without Farandole.

        torch's exporter traces the model in evaluation mode; a Keras model on Keras's torch
        backend, in another process. The number of rows stays open. Inputs are named after their
        columns (`a_b` for columns that are one input), outputs after the columns that `transform`
        adds. ONNX Runtime then predicts some rows, and the file is kept only if it makes the same
        predictions as the model.

        Args:
            path: of the file, on this host; a model above 1 GiB has its weights in a second file
                beside it.
            rows: rows to check with; default: made-up ones.
            opset: version of ONNX's operators; default: the exporter's.
            tolerance: most absolute and most relative difference of an output.

        Raises:
            ImportError: a package is missing; the message names the extra that brings it.
            ValueError: the model cannot be exported, or the exported one predicts something else.
            TimeoutError: the export of a Keras model takes more than an hour.
        """
        from farandole.spark.common.model import onnx

        signature = onnx.require_exportable_signature(
            self, self.getOutputCols(), extras=self._onnx_extras, more=self._onnx_packages
        )
        arrays = None if rows is None else onnx.collect_check_arrays(self, rows)
        with onnx.write_atomically(path) as made:
            predict = self._write_onnx(made, signature, opset)
            onnx.check_onnx_predictions(made, signature, arrays, predict, tolerance)

    def export(
        self,
        path: str | os.PathLike[str],
        rows: DataFrame | None = None,
        *,
        opset: int | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        """Writes the model in the format of the file's ending: `.onnx`, as `to_onnx`, or for
        models of torch `.pt2`, as `torch.export.save`. Both are checked in the same way.

        Args:
            path: of the file, on this host.
            rows: rows to check with; default: made-up ones.
            opset: as for `to_onnx`.
            tolerance: as for `to_onnx`.

        Raises:
            ImportError: as `to_onnx`.
            ValueError: an unknown ending, or as `to_onnx`.
        """
        from farandole.spark.common.model import onnx

        if str(path).endswith(".onnx"):
            self.to_onnx(path, rows, opset=opset, tolerance=tolerance)
            return
        if not str(path).endswith(".pt2") or opset is not None:
            raise ValueError(
                f"export writes files that end in .onnx or .pt2, and opset is for .onnx: {path}"
            )
        signature = onnx.require_signature(self, self.getOutputCols())
        arrays = None if rows is None else onnx.collect_check_arrays(self, rows)
        with onnx.write_atomically(path) as made:
            self._write_exported_program(made, signature, arrays, tolerance)

    def _write_exported_program(
        self,
        path: Path,
        signature: Signature,
        rows: Sequence[npt.NDArray[Any]] | None,
        tolerance: float,
    ) -> None:
        """Writes the model as a file of `torch.export`, and checks it.

        Args:
            path: of the file.
            signature: the model's inputs.
            rows: arrays of the inputs; made up when omitted.
            tolerance: as in `export`.

        Raises:
            ValueError: the model cannot be exported.
        """
        raise NotImplementedError

    def _write_onnx(
        self, path: Path, signature: Signature, opset: int | None
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Writes the model as an ONNX file, and returns the function that predicts arrays of its
        inputs.

        Args:
            path: of the file.
            signature: the model's inputs.
            opset: version of ONNX's operators; `None` is the exporter's.

        Raises:
            ValueError: the model cannot be exported.
        """
        raise NotImplementedError

    def _layer_summaries(self) -> list[LayerSummary]:
        """Returns summaries of the model's layers, with and without parameters."""
        raise NotImplementedError

    def getClasses(self) -> list[Any] | None:  # noqa: N802 - Spark ML's manner
        """Returns the names of the classes: `class_names`, else the label's categories; `None`
        for numbers.
        """
        labels = self.getLabelColumns() or [""]
        return self.getOrDefault("class_names") or self.getCategories().get(labels[0])

    def _label_encoding(self) -> ColumnEncoding:
        """Returns the encoding of labels that are categories."""
        labels = self.getLabelColumns() or []
        known = {name: values for name, values in self.getCategories().items() if name in labels}
        return ColumnEncoding(known, labels=frozenset(labels))

    def _explain_slow_first_prediction(self, session: SparkSession) -> None:
        """Says why the first prediction of a session takes longer."""
        if not self.getVerbose() or self._framework in _SHOWN_MESSAGES.setdefault(session, set()):
            return
        _SHOWN_MESSAGES[session].add(self._framework)
        ProgressLines().show_message(
            f"the first prediction in each of Spark's Python workers imports {self._framework}, "
            "which takes some "
            "seconds; later ones find it there"
        )

    def _feature_encoding(self) -> ColumnEncoding:
        """Returns the encoding of the features."""
        return ColumnEncoding.from_model(
            self.getCategories(), self.getFill(), self.getLearned(), self.getRagged()
        )

    def _known_single_output_form(self, what: str) -> str:
        """Returns the form of the model's only output.

        Args:
            what: asks for it.

        Raises:
            ValueError: the model has several, or its form is not known.
        """
        return require_output_form(what, self.getOrDefault("output_form"), self.getLabelColumns())

    def _create_predictor(self, dataset: DataFrame) -> BatchPredictor:
        """Returns the object that predicts in tasks.

        Args:
            dataset: that will be transformed.
        """
        raise NotImplementedError

    def _predictor_arguments(self, dataset: DataFrame, model: bytes) -> dict[str, Any]:
        """Returns the arguments that the predictors of all frameworks take.

        Args:
            dataset: that will be transformed.
            model: the packed model.
        """
        from farandole.spark.job.connect_artifacts import prestage_if_large

        change = self._feature_transformation()
        return {
            "model": prestage_if_large(dataset.sparkSession, model),
            "columns": tuple(dataset.columns),
            "groups": tuple(tuple(group) for group in self._input_columns()),
            "labels": tuple(self.getLabelColumns()),
            "batch_size": self.getBatchSize(),
            "encoding": self._feature_encoding(),
            "transformation": None if change is None else pickling.pickle_by_value(change),
        }

    def _check_feature_columns(self, dataset: DataFrame, *, raw: bool = False) -> None:
        """Refuses a DataFrame that the model cannot take.

        Args:
            dataset: that will be transformed.
            raw: whether features may be of any type, because a user's function gets them.
        """
        features = self._input_columns()
        if self.getModel() is None or not features or not self.getLabelColumns():
            raise ValueError("model, feature_columns and label_columns are required")
        roles = ColumnRoles(features=tuple(name for group in features for name in group), labels=())
        check_columns_present(roles, dataset.columns, "DataFrame")
        if raw:
            return
        texts = self._feature_transformation() is not None
        check_types(roles, dataset.schema, texts=texts, categories=self.getCategories())

    def _feature_transformation(self) -> UserTransformation | None:
        """Returns the transformation of features before a prediction.

        Raises:
            ValueError: it is asked for, and the model has no function.
        """
        if not self.getApplyTransformation():
            return None
        function = self.getTransformationFn()
        if function is None:
            raise ValueError(
                "apply_transformation needs a transformation_fn: the estimator had none, or the "
                "model was loaded without saved code; setTransformationFn sets one"
            )
        edits, removed = (
            self.getTransformationEditFields() or (),
            self.getTransformationRemovedFields() or (),
        )
        names = [name for group in self._input_columns() for name in group]
        return UserTransformation(function, edits, removed).without_label_columns(
            names, self.getLabelColumns() or ()
        )

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self._check_feature_columns(dataset)
        labels, names = self.getLabelColumns(), self.getOutputCols()
        added = self._added_class_columns(dataset)
        new = [*names, *([] if added is None else added.column_names)]
        taken = [name for name in new if name in dataset.columns or new.count(name) > 1]
        if taken:
            raise ValueError(f"the DataFrame already has an output column: {', '.join(taken)}")
        if len(names) != len(labels):
            raise ValueError(f"outputCols needs one name per label column {len(labels)}: {names}")
        predictor = self._create_predictor(dataset)
        self._explain_slow_first_prediction(dataset.sparkSession)
        outputs = self.getOrDefault("outputs") or detect_model_outputs(
            dataset, labels, predictor.probe_output_sizes
        )
        kinds = [one.spark_type for one in outputs] + ([] if added is None else added.column_types)
        predict = predictor.with_output_kinds([one.kind for one in outputs], added).predict_batches
        return add_predictions(dataset, new, kinds, predict)

    def udf(self, output: str | None = None) -> Callable[..., Any]:
        """Returns the model as a function of columns, for `select`, `withColumn` and `filter`.

        The function takes the columns of the features, in the order of the estimator's
        `feature_cols`; called without a column, it takes the columns with these names. It returns
        the one column that `transform` would add, or a struct of all that it would add. An
        array of doubles stands for a vector. There is no `labelIndexCol`, which needs the label.

        Args:
            output: the column of `transform` that the function returns, such as `y__output`;
                without it, all of them.

        Raises:
            ValueError: no such column, unknown outputs, or a prediction from whole rows.
        """
        from farandole.spark.common.model import column_function
        from farandole.spark.job.session_adapter import SparkSessionAdapter

        session = SparkSessionAdapter.from_active_session().session
        names, function = column_function.create_column_function(self, session, output)
        return column_function.default_to_columns(names, function)

    def register(self, spark: SparkSession, name: str, output: str | None = None) -> None:
        """Makes the model a function of SQL in a session: `SELECT name(a, b) FROM rows`.

        Args:
            spark: the session, classic or Connect.
            name: of the function.
            output: as for `udf`.

        Raises:
            ValueError: as `udf`.
        """
        from farandole.spark.common.model import column_function

        argument_checks.check_nonempty_text("name", name)
        spark.udf.register(name, column_function.create_column_function(self, spark, output)[1])

    def _added_class_columns(
        self, dataset: DataFrame, *, has_label: bool = True
    ) -> AddedClassColumns | None:
        """Returns the columns in Spark ML's manner, if any were asked for.

        Args:
            dataset: that will be transformed.
            has_label: whether it may have the label; without it, there is no `labelIndexCol`.
        """
        columns = self._requested_class_columns()
        if not has_label:
            columns.pop("labelIndexCol", None)
        if not columns:
            return None
        form, label = self._known_single_output_form(next(iter(columns))), self.getLabelColumns()[0]
        categories = self.getCategories().get(label)
        refuse_class_columns_for_values(columns, form, self.getOrDefault("thresholds"))
        classes = categories if "labelIndexCol" in columns and categories else self.getClasses()
        if "labelIndexCol" in columns:
            check_columns_present(ColumnRoles((), (label,)), dataset.columns, "DataFrame")
        return AddedClassColumns(
            columns=tuple(columns.items()),
            form=form,
            thresholds=None
            if self.getOrDefault("thresholds") is None
            else tuple(self.getOrDefault("thresholds")),
            classes=None if classes is None else tuple(classes),
            label=dataset.columns.index(label) if label in dataset.columns else None,
            indexed=categories is not None,
        )

    def _input_columns(self) -> list[list[str]]:
        """Returns the columns of each of the model's inputs, as in the estimator."""
        return feature_groups(self.getFeatureColumns())

    def history_frame(self) -> pd.DataFrame:
        """Returns the history as a pandas frame: a row per epoch, `loss`, each metric, and the
        same with `val_`.
        """
        from farandole.runner.show.history import history_frame

        return history_frame(self.getHistory() or [])

    def plot_history(self, *names: str) -> MetricsChart:
        """Returns the history as a chart: notebooks show it, `plot_history().save("history.svg")`
        writes it.

        Args:
            *names: which numbers, such as `"loss"`; default: all.
        """
        from farandole.spark.common.show.chart import MetricsChart

        return MetricsChart(self._history_entries(), names or None)

    def show(self) -> Viewer:
        """Opens the run viewer on the run that trained the model; notebooks show its link.

        Returns:
            The viewer, which ends with this process, or by `close()`.

        Raises:
            ValueError: the run was not saved.
        """
        from farandole.ui import show

        run, logs = self.getRunId(), (self.getPaths() or {}).get("logs")
        if run is None or logs is None or f"/{run}/" not in logs:
            raise ValueError("the run of this model was not saved, so there is nothing to show")
        return show(logs.rpartition(f"/{run}/")[0], run=run)

    def _history_entries(self) -> list[Entry]:
        """Returns the history as entries, whatever form its framework gives it."""
        return self.getHistory() or []


def require_output_form(what: str, form: str | None, labels: list[str] | None) -> str:
    """Returns the form of the only output of a model.

    Args:
        what: asks for it.
        form: of the output, if it is known.
        labels: of the model.

    Raises:
        ValueError: the model has several outputs, or the form is not known.
    """
    if len(labels or []) != 1:
        raise ValueError(f"{what} is for models of one label: {', '.join(labels or [])}")
    if form is None:
        raise ValueError(
            f"{what} needs to know what the model returns, which its loss does not show: set "
            "output_form to values, "
            "logits, probabilities or log_probabilities"
        )
    return form


def refuse_class_columns_for_values(
    columns: dict[str, str], form: str, thresholds: list[float] | None
) -> None:
    """Refuses columns of classes for a model of values.

    Args:
        columns: by parameter.
        form: of the model's output.
        thresholds: of classes.

    Raises:
        ValueError: naming the parameter.
    """
    of_classes = [name for name in columns if name != "predictionCol"] + (
        ["thresholds"] if thresholds else []
    )
    if form == "values" and of_classes:
        raise ValueError(
            f"{of_classes[0]} needs a model with classes, but the output_form of this model is "
            "values"
        )


def _label_reader(
    name: str, columns: list[str], encoding: ColumnEncoding
) -> Callable[[pa.RecordBatch], npt.NDArray[Any]]:
    """Returns a function that takes the labels out of a batch whose columns go by number."""

    def read_labels(batch: pa.RecordBatch) -> npt.NDArray[Any]:
        from farandole.spark.common.model.arrow_arrays import feature_arrays

        return feature_arrays(batch, columns, [name], encoding)[name]

    return read_labels
