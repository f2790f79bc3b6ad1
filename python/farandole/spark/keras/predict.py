# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Keras model that predicts in Spark's Python workers."""

# ruff: noqa: PLC0415 - loaded in tasks, when there are rows

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.spark.common.model.predictor import BatchPredictor
from farandole.spark.job.connect_artifacts import load_prestaged

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from farandole.spark.keras.job import KerasModelShape


@dataclass(frozen=True, kw_only=True)
class KerasPredictor(BatchPredictor):
    """A Keras model in tasks. A worker that has not loaded Keras yet loads it with the driver's
    backend, on CPUs.
    """

    custom_objects: bytes
    backend: str

    pads_to_fixed_length = True

    def load_model(self) -> Any:
        """Like `BatchPredictor.load_model`."""
        _configure_backend(self.backend)
        import cloudpickle

        from farandole.spark.keras.saving import model_bytes

        # The driver's own model, with the driver's own classes.
        known = cloudpickle.loads(self.custom_objects)
        return model_bytes.unpack_model(
            load_prestaged(self.model), known, safe_mode=False, compiled=False
        )

    def create_inputs(
        self, columns: dict[str, npt.NDArray[Any]], rows: int, model: Any
    ) -> list[Any]:
        """Like `BatchPredictor.create_inputs`; the inputs are arrays."""
        from farandole.spark.keras.keras_inputs import input_arrays

        return input_arrays(self._input_shape_of_columns(columns, model), columns, rows)

    def _input_shape_of_columns(
        self, values: dict[str, npt.NDArray[Any]], model: Any
    ) -> KerasModelShape:
        """Returns the model's inputs, made of these columns."""
        from farandole.spark.common.data.training_data import columns_from_sample_arrays
        from farandole.spark.keras.job import KerasModelShape
        from farandole.spark.keras.keras_inputs import create_keras_inputs

        columns = columns_from_sample_arrays(values)
        return KerasModelShape(*create_keras_inputs(model, self.groups, columns), None)

    def call_model(
        self, model: Any, columns: dict[str, npt.NDArray[Any]], rows: int
    ) -> list[npt.NDArray[Any]]:
        """Like `BatchPredictor.call_model`."""
        from farandole.spark.keras.keras_inputs import build_model_argument, describe_input_misfit

        shape = self._input_shape_of_columns(columns, model)
        try:
            with _no_gradients(self.backend):
                value = model(build_model_argument(shape, columns, rows), training=False)
        except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
            raise ValueError(describe_input_misfit(shape, error)) from None
        return _outputs_as_numpy(value, self.labels)


def call_model(
    model: Any, argument: Any, labels: Sequence[str], backend: str
) -> list[npt.NDArray[Any]]:
    """Returns a model's outputs, one per label, rows first.

    Args:
        model: of Keras.
        argument: as the model takes it.
        labels: the label columns.
        backend: on which Keras runs.
    """
    with _no_gradients(backend):
        value = model(argument, training=False)
    return _outputs_as_numpy(value, labels)


def _outputs_as_numpy(value: Any, labels: Sequence[str]) -> list[npt.NDArray[Any]]:
    from farandole.spark.keras.keras_inputs import flat_outputs, output_keys

    found = flat_outputs(value, output_keys(value, labels), len(labels))
    return [_output_to_numpy(one) for one in found]


def _output_to_numpy(output: Any) -> npt.NDArray[Any]:
    """Returns an output as NumPy's array: as exact as the model computed it, halves as what
    NumPy knows.
    """
    import keras

    is_half = keras.backend.standardize_dtype(output.dtype) in ("float16", "bfloat16")
    return np.asarray(
        keras.ops.convert_to_numpy(keras.ops.cast(output, "float32") if is_half else output)
    )


def _configure_backend(backend: str) -> None:
    """Chooses the backend for Keras's environment, if Keras is not loaded yet."""
    if "keras" in sys.modules:
        return
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if backend == "tensorflow" and "tensorflow" not in sys.modules:
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(1)  # there is one task per core
    elif backend == "torch":
        os.environ.setdefault("KERAS_TORCH_DEVICE", "cpu")
        from farandole.spark.torch.training import deferred_compiler

        deferred_compiler.defer_compiler()
    elif backend == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _no_gradients(backend: str) -> contextlib.AbstractContextManager[Any]:
    if backend != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
