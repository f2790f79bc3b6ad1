# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchModel`: a fitted PyTorch model that transforms DataFrames."""

# ruff: noqa: ARG002, N803, N815, PLC0415 - keyword_only reads the arguments; Spark ML's names; cycle with persistence

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pyspark import keyword_only
from pyspark.ml.util import MLReadable, MLWritable

from farandole.spark.ahead import sent
from farandole.spark.common import check
from farandole.spark.common.explained import Layer, torch_layers
from farandole.spark.common.model import FarandoleModel
from farandole.spark.common.outputs import Output
from farandole.spark.common.outputs import outputs as outputs_param
from farandole.spark.common.params import accessors, declare
from farandole.spark.torch import payload
from farandole.spark.torch.predict import Predictor

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from pyspark.sql import DataFrame

    from farandole.data.statistics import Statistics
    from farandole.spark.torch.persistence import TorchModelReader, TorchModelWriter


class TorchModel(FarandoleModel, MLReadable["TorchModel"], MLWritable):
    """Adds predictions to DataFrames, by Arrow batches on the executors.

    Every column of the DataFrame is kept; each label gets a column `<label>__output`. A prediction of several elements,
    or for a vector label, is a dense vector; one element takes the label's type. Columns become tensors as they did
    in `fit`.

    Saved by `model.write().overwrite().save(path)` and loaded by `TorchModel.load(path)`, on any file system Spark
    reaches. The weights are plain tensors; the module's class and code are a pickle, and loading that runs code: load
    only what you trust, or pass a module of your own to `TorchModel.read().model(module).load(path)`, which runs none.

    Args:
        history: Losses and metrics of each epoch.
        model: The trained module.
        feature_columns: Columns for the model, as in the estimator.
        input_shapes: Shape of each input's tensor, as in the estimator.
        input_dtypes: Type of each input's tensor, as in the estimator.
        label_columns: Columns the outputs are named after.
        optimizer: The optimizer after the last step, with the learning rate of one process.
        run_id: Name of the run.
        loss: As it was trained with.
        loss_constructors: As it was trained with.
        paths: Paths of the data, checkpoint and logs of the run.
        output_cols: Names of the added columns, instead of `<label>__output`.
        batch_size: Largest number of rows that are predicted at once; default 4096.
        outputs: Description of the outputs; determined if omitted.
        use_gpu: Whether to predict on a GPU; default: if Spark assigned one to the task.
        fill: Replacement of nulls and NaN, as in the estimator.
        categories: The categories of each column that has some.
        verbose: 0 shows no messages about predictions; default 1.
        learned: The values of `fill` that were learned, and their kind, such as `{"age": "mean"}`.
        ragged: What becomes of columns of lists of different lengths, as in the estimator.
        predictionCol: Column that `transform` adds for the class of a row, or its value, as Spark ML's models do.
        rawPredictionCol: Column for one number of each class, which is larger if the class is more likely.
        probabilityCol: Column for the probability of each class.
        predictedLabelCol: Column for the name of the class.
        labelIndexCol: Column for the index of the label's class, where labels are strings.
        thresholds: One number of each class; the class of the largest probability by threshold is predicted.
        class_names: Names of the classes, if the label has none.
        signature: What goes into each input: its `columns`, `shape` (-1 for the rows) and `dtype`.
        statistics: Statistics of the rows that the model was trained with, for `drift`.
        output_form: Form of the model's outputs: `"values"`, or for classes `"logits"`, `"probabilities"` or
            `"log_probabilities"`; default: the form that its loss takes, if it is known.
        _metadata: Horovod's description of columns; not needed.
    """

    input_shapes = declare("input_shapes", "shape of each feature's tensor", check.shapes("input_shapes"))
    optimizer = declare("optimizer", "the optimizer after the last step", check.anything)
    input_dtypes = declare("input_dtypes", "type of each input's tensor", check.listed("input_dtypes"))
    loss = declare("loss", "that with which the model was trained", check.anything)
    loss_constructors = declare("loss_constructors", "that with which the model was trained", check.anything)
    use_gpu = declare("use_gpu", "whether to predict on a GPU", check.flag("use_gpu"))
    outputs = declare("outputs", "size and label type of each output", outputs_param)

    setInputShapes, getInputShapes = accessors("input_shapes")
    setOptimizer, getOptimizer = accessors("optimizer")
    setInputDtypes, getInputDtypes = accessors("input_dtypes")
    setLoss, getLoss = accessors("loss")
    setLossConstructors, getLossConstructors = accessors("loss_constructors")
    setUseGpu, getUseGpu = accessors("use_gpu")

    _framework = "torch"

    @keyword_only
    def __init__(
        self,
        *,
        history: list[dict[str, Any]] | None = None,
        model: torch.nn.Module | None = None,
        feature_columns: Sequence[str | Sequence[str]] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        input_dtypes: Sequence[str] | None = None,
        label_columns: Sequence[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_id: str | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
        paths: dict[str, str] | None = None,
        output_cols: Sequence[str] | None = None,
        batch_size: int | None = None,
        outputs: Sequence[Output] | None = None,
        use_gpu: bool | None = None,
        fill: Any = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        ragged: Mapping[str, Any] | None = None,
        learned: Mapping[str, str] | None = None,
        verbose: int | None = None,
        predictionCol: str | None = None,
        rawPredictionCol: str | None = None,
        probabilityCol: str | None = None,
        predictedLabelCol: str | None = None,
        labelIndexCol: str | None = None,
        thresholds: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        output_form: str | None = None,
        signature: Sequence[Mapping[str, Any]] | None = None,
        statistics: Statistics | Mapping[str, Any] | None = None,
        _metadata: Any = None,
    ) -> None:
        super().__init__()
        names = ("input_shapes", "input_dtypes", "optimizer", "loss", "loss_constructors", "outputs", "use_gpu")
        self._setDefault(**dict.fromkeys(names))
        given = cast("dict[str, Any]", self._input_kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.setParams(**{name: value for name, value in given.items() if name != "_metadata"})

    def write(self) -> TorchModelWriter:
        """The writer; `write().overwrite().save(path)` replaces what is there."""
        from farandole.spark.torch.persistence import TorchModelWriter

        return TorchModelWriter(self)

    @classmethod
    def read(cls) -> TorchModelReader:
        """The reader; `read().model(module).load(path)` takes the weights alone and runs no code."""
        from farandole.spark.torch.persistence import TorchModelReader

        return TorchModelReader(cls)

    def to_onnx(
        self,
        path: str | os.PathLike[str],
        rows: DataFrame | None = None,
        *,
        opset: int | None = None,
        tolerance: float = 1e-4,
    ) -> None:
        """Writes the model as an ONNX file, which runs without torch and without Farandole.

        torch's exporter traces the module in evaluation mode. The number of rows stays open. Inputs are named after
        their columns (`a_b` for columns that are one tensor), outputs after those of `transform`. ONNX Runtime then
        predicts some rows, and the file is kept only if it predicts what the model predicts.

        Args:
            path: of the file, on this host; a model above 1 GiB has its weights in a second file beside it.
            rows: rows to check with; default: made-up ones.
            opset: version of ONNX's operators; default: the exporter's.
            tolerance: most absolute and most relative difference of an output.

        Raises:
            ImportError: a package is missing; `farandole[onnx]` brings them.
            ValueError: the model cannot be exported, or the exported one predicts something else.
        """
        from farandole.spark.common.onnx import exportable, some_rows
        from farandole.spark.torch.onnx import export

        known = exportable(self, self.getOutputCols())
        tensors = None if rows is None else self._predictor(rows).inputs(some_rows(self, rows))
        export(
            self.getModel(),
            known,
            self.getOutputCols(),
            path,
            tensors,
            function=self._prediction_fn(),
            opset=opset,
            tolerance=tolerance,
        )

    def _layers(self) -> list[Layer]:
        return torch_layers(self.getModel())

    def _prediction_fn(self) -> Callable[..., Any] | None:
        return None

    def _predictor(self, dataset: DataFrame) -> Predictor:
        return Predictor(
            model=sent(dataset.sparkSession, payload.pack(self.getModel())),
            columns=tuple(dataset.columns),
            features=tuple(tuple(group) for group in self._inputs()),
            shapes=self.getInputShapes(),
            dtypes=self.getInputDtypes(),
            labels=len(self.getLabelColumns()),
            kinds=(),
            batch_size=self.getBatchSize(),
            use_gpu=self.getUseGpu(),
            encoding=self._encoding(),
            function=self._prediction_fn(),
        )
