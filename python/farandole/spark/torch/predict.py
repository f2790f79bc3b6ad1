# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A torch model that predicts in Spark's Python workers."""

# ruff: noqa: PLC0415 - loaded in tasks, when there are rows

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.spark.common.model.predictor import BatchPredictor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    import pyarrow as pa
    import torch
    from pyspark.sql.types import StructType

    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.torch.saving.host_weights import HostWeights


@dataclass(frozen=True, kw_only=True)
class TorchPredictor(BatchPredictor):
    """A torch model in tasks."""

    shapes: list[list[int]] | None
    dtypes: list[str] | None
    call: ModelCall
    use_gpu: bool | None
    function: Any = None
    """Makes outputs of the model and its inputs; `None` calls the model."""
    row_function: Any = None
    """Makes outputs of the model and one row; `None` if predictions go by batch."""
    weights: HostWeights | None = None
    """The weights, if they are sent apart from the model."""
    precision: str = "fp32"
    """`fp32`, or `bf16` for autocast."""
    schema: StructType | None = None
    """The columns of the rows that `row_function` gets."""

    @cached_property
    def model_key(self) -> str:
        """Like `BatchPredictor.model_key`, with the weights and the device of the task."""
        weights = "" if self.weights is None else self.weights.digest
        return f"{super().model_key} {weights} {self._task_device()}"

    def load_model(self) -> torch.nn.Module:
        """Like `BatchPredictor.load_model`; the model is on the task's device."""
        from farandole.spark.torch.saving import host_weights

        loaded = host_weights.load_module(self.model, self.weights).eval().to(self._task_device())
        if self.precision == "bf16":
            host_weights.take_float32_inputs(loaded)
        return loaded

    def _task_device(self) -> str:
        """Returns the device of this task: the GPU that Spark assigned, or with `use_gpu` a
        visible one.
        """
        import torch

        from farandole.spark.task import choose_gpu, task_resources

        if self.row_function is not None:
            return "cpu"  # where the function makes its tensors
        assigned = task_resources().get("gpu", [])
        if self.use_gpu is False or not torch.cuda.is_available() or not (assigned or self.use_gpu):
            return "cpu"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        choice = choose_gpu(torch.cuda.device_count(), 0, 1, assigned, visible)
        return "cpu" if choice is None else f"cuda:{choice.index}"

    @contextlib.contextmanager
    def _inference_mode(self, model: torch.nn.Module) -> Iterator[None]:
        """Predicts without gradients, and in the precision of the model."""
        import torch

        kind, half = self._model_device(model).type, self.precision == "bf16"
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=half):
            yield

    @staticmethod
    def _model_device(model: torch.nn.Module) -> torch.device:
        import torch

        return next((one.device for one in model.parameters()), torch.device("cpu"))

    def predict_outputs(self, batch: pa.RecordBatch) -> list[npt.NDArray[Any]]:
        """Like `BatchPredictor.predict_outputs`; row by row, if there is a function of rows."""
        if self.row_function is None or self.schema is None or batch.num_rows == 0:
            return super().predict_outputs(batch)
        from farandole.spark.common.model.spark_rows import spark_rows

        model = self._find_model()
        with self._inference_mode(model):
            rows = [
                [
                    output.detach().float().cpu().numpy().reshape(-1)
                    for output in self.call.output_tensors(self.row_function(model, row))
                ]
                for row in spark_rows(batch, self.schema)
            ]
        for label, outputs in zip(self.labels, zip(*rows, strict=True), strict=True):
            sizes = sorted({output.size for output in outputs})
            if len(sizes) > 1:
                raise ValueError(
                    f"the function of get_prediction_fn returned outputs of different sizes for "
                    f"label {label!r}: {', '.join(map(str, sizes))}"
                )
        return [np.stack(outputs) for outputs in zip(*rows, strict=True)]

    def create_inputs(
        self, columns: dict[str, npt.NDArray[Any]], rows: int, model: Any
    ) -> list[torch.Tensor]:
        """Like `BatchPredictor.create_inputs`; the inputs are tensors on the CPU."""
        import torch

        from farandole.spark.common.data.training_data import columns_from_sample_arrays
        from farandole.spark.torch.columns.tensors import create_torch_inputs, input_tensor

        del model
        # Torch must not write to Arrow's memory: tensors that are not copied yet are copied here.
        tensors = {
            name: torch.from_numpy(np.require(values, requirements=("C", "W")))
            for name, values in columns.items()
        }
        inputs = create_torch_inputs(
            self.groups,
            columns_from_sample_arrays(columns),
            self.shapes,
            self.dtypes or ["float32"] * len(self.groups),
            self.encoding,
            self.call.arguments,
        )
        return [input_tensor(tensors, one, rows, torch.device("cpu")) for one in inputs]

    def call_model(
        self, model: Any, columns: dict[str, npt.NDArray[Any]], rows: int
    ) -> list[npt.NDArray[Any]]:
        """Like `BatchPredictor.call_model`."""
        from farandole.spark.torch.model_trial import misfit_message

        device = self._model_device(model)
        inputs = [one.to(device) for one in self.create_inputs(columns, rows, model)]
        with self._inference_mode(model):
            try:
                own = model if self.function is None else partial(self.function, model)
                value = self.call.call_model(own, inputs)
            except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
                names = [", ".join(group) for group in self.groups]
                raise ValueError(misfit_message(self.call, model, names, inputs, error)) from None
            found = self.call.output_tensors(value)
            return [output.float().cpu().numpy() for output in found]
