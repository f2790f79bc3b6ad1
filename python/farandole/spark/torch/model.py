# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchModel`: a fitted PyTorch model that transforms DataFrames."""

# ruff: noqa: N815, PLC0415 - Spark ML's names; cycle with persistence

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.util import MLReadable, MLWritable

from farandole.common import check
from farandole.spark.common.model.base import FarandoleModel
from farandole.spark.common.model.model_summary import LayerSummary, torch_layers
from farandole.spark.common.model.outputs import ModelOutput
from farandole.spark.common.model.outputs import parse_outputs as outputs_param
from farandole.spark.common.parameter import Parameter, accessors
from farandole.spark.job.connect_artifacts import prestage_if_large
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.saving import payload

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import torch
    from pyspark.sql import DataFrame

    from farandole.spark.torch.saving.persistence import TorchModelReader, TorchModelWriter


class TorchModel(FarandoleModel, MLReadable["TorchModel"], MLWritable):
    """A model that adds predictions to DataFrames, by Arrow batches on the executors.

    Every column of the DataFrame is kept; each label gets a column `<label>__output`. A prediction
    of several elements, or for a vector label, is a dense vector; one element takes the label's
    type. Columns become tensors as they did in `fit`.

    Saved by `model.write().overwrite().save(path)` and loaded by `TorchModel.load(path)`, on any
    file system Spark reaches. The weights are plain tensors; the module's class and code are a
    pickle, and loading that runs code: load only what you trust, or pass a module of your own to
    `TorchModel.read().model(module).load(path)`, which runs none.
    """

    _UNUSED = ("_metadata",)  # Horovod's description of columns

    model: Parameter[torch.nn.Module] = Parameter(
        "The trained module.", check.any_value, default=None
    )
    input_shapes: Parameter[Sequence[Sequence[int]]] = Parameter(
        "Shape of each input's tensor, as in the estimator.", check.shape_list, default=None
    )
    input_dtypes: Parameter[Sequence[str]] = Parameter(
        "Type of each input's tensor, as in the estimator.", check.value_list, default=None
    )
    optimizer: Parameter[torch.optim.Optimizer] = Parameter(
        "The optimizer after the last step, with the learning rate of one process.",
        check.any_value,
        default=None,
    )
    loss: Parameter[Any] = Parameter("The loss of the training.", check.any_value, default=None)
    loss_constructors: Parameter[Any] = Parameter(
        "The loss constructors of the training.", check.any_value, default=None
    )
    use_gpu: Parameter[bool] = Parameter(
        "Whether to predict on a GPU; without it, if Spark assigned one to the task.",
        check.boolean_flag,
        default=None,
    )
    outputs: Parameter[Sequence[ModelOutput]] = Parameter(
        "Description of the outputs; determined if omitted.",
        check.converted_by(outputs_param),
        default=None,
    )

    setInputShapes, getInputShapes = accessors("input_shapes")
    setOptimizer, getOptimizer = accessors("optimizer")
    setInputDtypes, getInputDtypes = accessors("input_dtypes")
    setLoss, getLoss = accessors("loss")
    setLossConstructors, getLossConstructors = accessors("loss_constructors")
    setUseGpu, getUseGpu = accessors("use_gpu")

    _framework = "torch"

    def write(self) -> TorchModelWriter:
        """Returns the writer; `write().overwrite().save(path)` replaces the old directory."""
        from farandole.spark.torch.saving.persistence import TorchModelWriter

        return TorchModelWriter(self)

    @classmethod
    def read(cls) -> TorchModelReader:
        """Returns the reader; `read().model(module).load(path)` takes the weights alone and runs
        no code.
        """
        from farandole.spark.torch.saving.persistence import TorchModelReader

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

        torch's exporter traces the module in evaluation mode. The number of rows stays open. Inputs
        are named after their columns (`a_b` for columns that are one tensor), outputs after the
        columns that `transform` adds. ONNX Runtime then predicts some rows, and the file is kept
        only if it makes the same predictions as the model.

        Args:
            path: of the file, on this host; a model above 1 GiB has its weights in a second file
                beside it.
            rows: rows to check with; default: made-up ones.
            opset: version of ONNX's operators; default: the exporter's.
            tolerance: most absolute and most relative difference of an output.

        Raises:
            ImportError: a package is missing; `farandole[onnx]` brings them.
            ValueError: the model cannot be exported, or the exported one predicts something else.
        """
        from farandole.spark.common.model.onnx import collect_check_rows, require_exportable
        from farandole.spark.torch.saving.onnx import export_onnx

        known = require_exportable(self, self.getOutputCols())
        tensors = (
            None
            if rows is None
            else self._create_predictor(rows).batch_inputs(collect_check_rows(self, rows))
        )
        export_onnx(
            self.getModel(),
            known,
            self.getOutputCols(),
            path,
            tensors,
            function=self._prediction_fn(),
            opset=opset,
            tolerance=tolerance,
        )

    def _layer_summaries(self) -> list[LayerSummary]:
        return torch_layers(self.getModel())

    def _prediction_fn(self) -> Callable[..., Any] | None:
        return None

    def _create_predictor(self, dataset: DataFrame) -> TorchPredictor:
        return TorchPredictor(
            model=prestage_if_large(dataset.sparkSession, payload.pack_pickle(self.getModel())),
            columns=tuple(dataset.columns),
            features=tuple(tuple(group) for group in self._input_columns()),
            shapes=self.getInputShapes(),
            dtypes=self.getInputDtypes(),
            labels=len(self.getLabelColumns()),
            kinds=(),
            batch_size=self.getBatchSize(),
            use_gpu=self.getUseGpu(),
            encoding=self._feature_encoding(),
            function=self._prediction_fn(),
            transformation=self._pickled_transformation(),
        )
