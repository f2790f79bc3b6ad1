# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predictions in Spark's Python workers, one Arrow batch at a time.

The model is sent with the function of the tasks, or before it if a Connect client has a large
model. A worker keeps it by its content, so that its later tasks use it again. A worker that has not
loaded Keras yet loads it with the driver's backend, on CPUs.
"""

# ruff: noqa: PLC0415 - loaded in tasks, when there are rows

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.encoding import ColumnEncoding
from farandole.spark.job.connect_artifacts import PrestagedFile, load_prestaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from farandole.spark.common.model.classes import AddedClassColumns
    from farandole.spark.common.transform import UserTransformation
    from farandole.spark.keras.job import KerasModelShape

_MAX_KEPT_MODELS = 2
_MODEL_CACHE: dict[str, Any] = {}


@dataclass(frozen=True)
class KerasPredictor:
    """A model and how columns go in and out of it."""

    model: bytes | PrestagedFile
    custom_objects: bytes
    backend: str
    columns: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    batch_size: int
    encoding: ColumnEncoding = field(default_factory=ColumnEncoding)
    """Categories, and the replacements of nulls."""
    added: AddedClassColumns | None = None
    """Columns in Spark ML's manner."""
    transformation: bytes | None = None
    """A pickled `UserTransformation`, if predictions take one."""

    def with_output_kinds(
        self, kinds: Sequence[str], added: AddedClassColumns | None
    ) -> KerasPredictor:
        """Returns the same predictor, with the types of its output columns.

        Args:
            kinds: one per output: `vector`, or NumPy's name of a number.
            added: columns in Spark ML's manner, if there are any.
        """
        return replace(self, kinds=tuple(kinds), added=added)

    def predict_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields every batch with its predictions appended.

        Args:
            batches: with the feature columns and any others.
        """
        import pyarrow as pa

        from farandole.spark.common.model.outputs import prediction_column

        for batch in batches:
            found = self.predict_outputs(batch)
            columns = [
                prediction_column(values, kind)
                for values, kind in zip(found, self.kinds, strict=True)
            ]
            if self.added is not None:
                columns += self.added.build_columns(batch, found[0])
            added = [f"output{index}" for index in range(len(columns))]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], names=[*batch.schema.names, *added]
            )

    def probe_output_sizes(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the number of elements of each output, one row per output, if there is a row to
        try.

        Args:
            batches: with the feature columns.
        """
        import pyarrow as pa

        found = False
        for batch in batches:  # to their end, or Spark would not use this worker again
            if batch.num_rows and not found:
                found = True
                sizes = [values[0].size for values in self.predict_outputs(batch.slice(0, 1))]
                yield pa.RecordBatch.from_arrays([pa.array(sizes, pa.int32())], names=["size"])

    @cached_property
    def _model_key(self) -> str:
        """The identity of the model, computed once in a task."""
        return (
            self.model.name
            if isinstance(self.model, PrestagedFile)
            else hashlib.sha256(self.model).hexdigest()
        )

    def _load_model(self) -> Any:
        key = self._model_key
        if key not in _MODEL_CACHE:
            _configure_backend(self.backend)
            import cloudpickle

            from farandole.spark.keras.saving import payload

            while len(_MODEL_CACHE) >= _MAX_KEPT_MODELS:
                _MODEL_CACHE.pop(next(iter(_MODEL_CACHE)))
            # The driver's own model, with the driver's own classes.
            known = cloudpickle.loads(self.custom_objects)
            _MODEL_CACHE[key] = payload.unpack_model(
                load_prestaged(self.model), known, safe_mode=False, compiled=False
            )
        return _MODEL_CACHE[key]

    def batch_inputs(self, batch: pa.RecordBatch, model: Any) -> list[npt.NDArray[Any]]:
        """Returns the array of each of the model's inputs, rows first.

        Args:
            batch: whose columns go by number.
            model: of Keras.
        """
        from farandole.spark.keras.arrays import input_arrays

        values = self._transform_features(self._feature_arrays(batch))
        return input_arrays(self._model_shape(values, model), values, batch.num_rows)

    @cached_property
    def _feature_names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @cached_property
    def _user_transformation(self) -> UserTransformation | None:
        import cloudpickle

        return None if self.transformation is None else cloudpickle.loads(self.transformation)

    def _feature_arrays(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of the model's inputs, before the transformation."""
        from farandole.spark.common.model.arrow import feature_arrays

        texts = self.transformation is not None
        return feature_arrays(
            batch, self.columns, self._feature_names, self.encoding, fixed=True, texts=texts
        )

    def _transform_features(
        self, columns: dict[str, npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns after the transformation, of one row at least."""
        if self._user_transformation is None:
            return columns
        made = self._user_transformation.transform_features(columns, self._feature_names)
        return {name: made[name] for name in self._feature_names}

    def _model_shape(self, values: dict[str, npt.NDArray[Any]], model: Any) -> KerasModelShape:
        """Returns the model's inputs, made of these columns."""
        from farandole.data.columns import PreparedColumn
        from farandole.spark.keras.arrays import create_keras_inputs
        from farandole.spark.keras.job import KerasModelShape

        columns = {
            name: PreparedColumn(name, str(one.dtype), tuple(one.shape[1:]))
            for name, one in values.items()
        }
        return KerasModelShape(*create_keras_inputs(model, self.groups, columns), None)

    def predict_outputs(self, batch: pa.RecordBatch) -> list[npt.NDArray[Any]]:
        """Returns the model's outputs for some rows, (rows, elements) per output.

        Args:
            batch: whose columns go by number.
        """
        count = batch.num_rows
        if count == 0:
            return [np.empty((0, 1), dtype=np.float32) for _ in self.labels]
        model = self._load_model()

        from farandole.spark.keras.arrays import (
            describe_misfit,
            flat_outputs,
            model_inputs,
            output_keys,
        )

        columns = self._feature_arrays(batch)
        parts: list[list[npt.NDArray[Any]]] = []
        for start in range(0, count, self.batch_size):
            some = self._transform_features(
                {name: one[start : start + self.batch_size] for name, one in columns.items()}
            )
            shape = self._model_shape(some, model)
            size = min(self.batch_size, count - start)
            try:
                with _no_gradients(self.backend):
                    value = model(model_inputs(shape, some, size), training=False)
            except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
                raise ValueError(describe_misfit(shape, error)) from None
            found = flat_outputs(value, output_keys(value, self.labels), len(self.labels))
            parts.append([_output_to_numpy(one) for one in found])
        return [np.concatenate(pieces).reshape(count, -1) for pieces in zip(*parts, strict=True)]


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
    from farandole.spark.keras.arrays import flat_outputs, output_keys

    with _no_gradients(backend):
        value = model(argument, training=False)
    return [
        _output_to_numpy(one)
        for one in flat_outputs(value, output_keys(value, labels), len(labels))
    ]


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
        from farandole.spark.torch.training import compiler

        compiler.defer_compiler()
    elif backend == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _no_gradients(backend: str) -> contextlib.AbstractContextManager[Any]:
    if backend != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
