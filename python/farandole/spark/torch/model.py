# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchModel`: a fitted PyTorch model that transforms DataFrames."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

from pyspark.ml.util import MLReadable

from farandole.common import argument_checks
from farandole.spark.common import param_checks
from farandole.spark.common.model.base import FarandoleModel
from farandole.spark.common.model.model_summary import LayerSummary, torch_layers
from farandole.spark.common.param_checks import feature_arguments
from farandole.spark.common.parameter import Parameter
from farandole.spark.common.saving.logged_models import load_from_mlflow
from farandole.spark.common.saving.persistence import ParamsWritable
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.saving.exported_program import export_program
from farandole.spark.torch.saving.host_weights import pack_module, send_weights
from farandole.spark.torch.saving.onnx import TracedTorchModel, export_onnx
from farandole.spark.torch.saving.persistence import TorchModelReader, TorchModelWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import torch
    from pyspark.sql import DataFrame

    from farandole.spark.common.model.onnx import Signature


class TorchModel(ParamsWritable, FarandoleModel, MLReadable["TorchModel"]):
    """A model that adds predictions to DataFrames, by Arrow batches on the executors.

    Every column of the DataFrame is kept; each label gets a column `<label>__output`. A prediction
    of several elements, or for a vector label, is a dense vector; one element takes the label's
    type. Columns become tensors as they did in `fit`.

    Saved by `model.write().overwrite().save(path)` and loaded by `TorchModel.load(path)`, on any
    file system Spark reaches. The weights are plain tensors; the module's class and code are a
    pickle, and loading that runs code: load only what you trust, or pass a module of your own to
    `TorchModel.read().model(module).load(path)`, which runs none.
    """

    model: Parameter[torch.nn.Module] = Parameter(
        "The trained module.", argument_checks.accept_any_value, default=None
    )
    input_shapes: Parameter[Sequence[Sequence[int]]] = Parameter(
        "Shape of each input's tensor, as in the estimator.",
        argument_checks.check_shape_list,
        default=None,
    )
    input_dtypes: Parameter[Sequence[str]] = Parameter(
        "Type of each input's tensor, as in the estimator.",
        argument_checks.check_value_list,
        default=None,
    )
    output: Parameter[str | Sequence[str]] = Parameter(
        "Field of the module's result for each label, as in the estimator.",
        param_checks.check_output_names,
        default=None,
    )
    optimizer: Parameter[torch.optim.Optimizer] = Parameter(
        "The optimizer after the last step, with the learning rate of one process.",
        argument_checks.accept_any_value,
        default=None,
    )
    loss: Parameter[Any] = Parameter(
        "The loss of the training.", argument_checks.accept_any_value, default=None
    )
    loss_constructors: Parameter[Any] = Parameter(
        "The loss constructors of the training.", argument_checks.accept_any_value, default=None
    )
    use_gpu: Parameter[bool] = Parameter(
        "Whether to predict on a GPU; without it, if Spark assigned one to the task.",
        argument_checks.check_boolean_flag,
        default=None,
    )

    precision: Parameter[str] = Parameter(
        'Precision of predictions: `"fp32"`, or `"bf16"` for autocast.',
        argument_checks.make_choice_check("fp32", "bf16"),
        default="fp32",
    )

    _writer_class = TorchModelWriter
    _framework = "torch"

    @classmethod
    def read(cls) -> TorchModelReader:
        """Returns the reader; `read().model(module).load(path)` takes the weights alone and runs
        no code.
        """
        return TorchModelReader(cls)

    def _write_onnx(
        self, path: Path, signature: Signature, opset: int | None
    ) -> Callable[[Sequence[Any]], Sequence[Any]]:
        function = self._exported_function()
        return export_onnx(
            self.getModel(),
            signature,
            self.getOutputCols(),
            path,
            function,
            opset,
            self._model_call(),
        )

    def _write_exported_program(
        self,
        path: Path,
        signature: Signature,
        rows: Sequence[npt.NDArray[Any]] | None,
        tolerance: float,
    ) -> None:
        export_program(
            TracedTorchModel(
                deepcopy(self.getModel()).cpu(), self._exported_function(), self._model_call()
            ).eval(),
            signature,
            self.getOutputCols(),
            path,
            rows,
            tolerance=tolerance,
        )

    def _exported_function(self) -> Callable[..., Any] | None:
        """Returns the function of the model and its inputs that an exported model computes."""
        if self._row_prediction_fn() is not None:
            raise ValueError(
                "a function of single rows cannot be exported: write get_prediction_fn of "
                f"{type(self).__name__} by batch, marked with farandole.spark.common.transform."
                "batched"
            )
        return self._custom_prediction_fn()

    @classmethod
    def from_mlflow(cls, uri: str, *, allow_pickle: bool | None = None) -> Self:
        """Returns a model that `mlflow=True` of an estimator has logged, with its columns,
        categories, thresholds and everything else that predictions need.

        MLflow's file of the module is a pickle: loading it runs code, so load only what you trust.
        A `transformation_fn` is not in the file, and optimizer, loss, history and statistics are
        not either.

        Args:
            uri: address of the model in MLflow, such as `models:/stars/3` or `runs:/<run>/model`.
            allow_pickle: whether the pickle may be loaded; without it, `FARANDOLE_ALLOW_PICKLE`
                decides.

        Raises:
            ImportError: MLflow is not installed.
            PickleNotAllowedError: pickles are not allowed.
            ValueError: the model was logged by something else.
        """
        return load_from_mlflow(cls, uri, allowed=allow_pickle)

    def _model_call(self) -> ModelCall:
        """Returns the call of the module."""
        return ModelCall(
            arguments=tuple(feature_arguments(self.getFeatureColumns())),
            labels=tuple(self.getLabelColumns()),
            fields=tuple(self.getOutput() or ()),
        )

    def _layer_summaries(self) -> list[LayerSummary]:
        return torch_layers(self.getModel())

    def _get_optimizer(self) -> torch.optim.Optimizer | None:
        """Returns the optimizer after the last step."""
        return self.getOrDefault("optimizer")

    def getOptimizer(self) -> torch.optim.Optimizer | None:  # noqa: N802 - Spark ML's manner
        """Returns the result of `_get_optimizer`."""
        return self._get_optimizer()

    def _custom_prediction_fn(self) -> Callable[..., Any] | None:
        """Returns the user's function of the model and its inputs, rows first."""
        return None

    def _row_prediction_fn(self) -> Callable[..., Any] | None:
        """Returns the user's function of the model and one row."""
        return None

    def set_unset_params(self, values: Mapping[str, Any]) -> None:
        """Like `FarandoleModel.set_unset_params`. The outputs of a user's function are unknown."""
        own = self._custom_prediction_fn() or self._row_prediction_fn()
        known = {name: value for name, value in values.items() if not own or name != "outputs"}
        super().set_unset_params(known)

    def _check_feature_columns(self, dataset: DataFrame, *, raw: bool = False) -> None:
        super()._check_feature_columns(dataset, raw=raw or self._row_prediction_fn() is not None)

    def _create_predictor(self, dataset: DataFrame) -> TorchPredictor:
        packed = pack_module(self.getModel(), in_bfloat16=self.getPrecision() == "bf16")
        return TorchPredictor(
            **self._predictor_arguments(dataset, packed.module),
            weights=send_weights(dataset.sparkSession, packed.weights),
            precision=self.getPrecision(),
            shapes=self.getInputShapes(),
            dtypes=self.getInputDtypes(),
            call=self._model_call(),
            use_gpu=self.getUseGpu(),
            function=self._custom_prediction_fn(),
            row_function=(row_function := self._row_prediction_fn()),
            schema=None if row_function is None else dataset.schema,
        )
