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

from farandole.data.encoding import Encoding
from farandole.spark.job.ahead import Ahead, arrived

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from farandole.spark.common.model.classes import Added
    from farandole.spark.common.transform import Transformation
    from farandole.spark.keras.job import Shape

_KEPT = 2
_MODELS: dict[str, Any] = {}


@dataclass(frozen=True)
class Predictor:
    """A model and how columns go in and out of it."""

    model: bytes | Ahead
    custom_objects: bytes
    backend: str
    columns: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    batch_size: int
    encoding: Encoding = field(default_factory=Encoding)
    """Categories, and the replacements of nulls."""
    added: Added | None = None
    """Columns in Spark ML's manner."""
    transformation: bytes | None = None
    """A pickled `Transformation`, if predictions take one."""

    def completed(self, kinds: Sequence[str], added: Added | None) -> Predictor:
        """Returns the same predictor, with the types of its output columns.

        Args:
            kinds: one per output: `vector`, or NumPy's name of a number.
            added: columns in Spark ML's manner, if there are any.
        """
        return replace(self, kinds=tuple(kinds), added=added)

    def predict(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Every batch with its predictions appended.

        Args:
            batches: with the feature columns and any others.
        """
        import pyarrow as pa

        from farandole.spark.common.model.outputs import column_of

        for batch in batches:
            found = self.outputs(batch)
            columns = [
                column_of(values, kind) for values, kind in zip(found, self.kinds, strict=True)
            ]
            if self.added is not None:
                columns += self.added.made(batch, found[0])
            added = [f"output{index}" for index in range(len(columns))]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], names=[*batch.schema.names, *added]
            )

    def probe(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
                sizes = [values[0].size for values in self.outputs(batch.slice(0, 1))]
                yield pa.RecordBatch.from_arrays([pa.array(sizes, pa.int32())], names=["size"])

    @cached_property
    def _content(self) -> str:
        """The identity of the model, computed once in a task."""
        return (
            self.model.name
            if isinstance(self.model, Ahead)
            else hashlib.sha256(self.model).hexdigest()
        )

    def _load(self) -> Any:
        key = self._content
        if key not in _MODELS:
            _prepare(self.backend)
            import cloudpickle

            from farandole.spark.keras.saving import payload

            while len(_MODELS) >= _KEPT:
                _MODELS.pop(next(iter(_MODELS)))
            # The driver's own model, with the driver's own classes.
            known = cloudpickle.loads(self.custom_objects)
            _MODELS[key] = payload.unpack(
                arrived(self.model), known, safe_mode=False, compiled=False
            )
        return _MODELS[key]

    def inputs(self, batch: pa.RecordBatch, model: Any) -> list[npt.NDArray[Any]]:
        """Returns the array of each of the model's inputs, rows first.

        Args:
            batch: whose columns go by number.
            model: of Keras.
        """
        from farandole.spark.keras.arrays import input_arrays

        values = self._transformed(self._columns(batch))
        return input_arrays(self._shape(values, model), values, batch.num_rows)

    @cached_property
    def _names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @cached_property
    def _transformation(self) -> Transformation | None:
        import cloudpickle

        return None if self.transformation is None else cloudpickle.loads(self.transformation)

    def _columns(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of the model's inputs, before the transformation."""
        from farandole.spark.common.model.arrow import features

        texts = self.transformation is not None
        return features(batch, self.columns, self._names, self.encoding, fixed=True, texts=texts)

    def _transformed(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns after the transformation, of one row at least."""
        if self._transformation is None:
            return columns
        made = self._transformation.predicted(columns, self._names)
        return {name: made[name] for name in self._names}

    def _shape(self, values: dict[str, npt.NDArray[Any]], model: Any) -> Shape:
        """Returns the model's inputs, made of these columns."""
        from farandole.data.columns import Column
        from farandole.spark.keras.arrays import inputs_of
        from farandole.spark.keras.job import Shape

        columns = {
            name: Column(name, str(one.dtype), tuple(one.shape[1:])) for name, one in values.items()
        }
        return Shape(*inputs_of(model, self.groups, columns), None)

    def outputs(self, batch: pa.RecordBatch) -> list[npt.NDArray[Any]]:
        """Returns the model's outputs for some rows, (rows, elements) per output.

        Args:
            batch: whose columns go by number.
        """
        count = batch.num_rows
        if count == 0:
            return [np.empty((0, 1), dtype=np.float32) for _ in self.labels]
        model = self._load()

        from farandole.spark.keras.arrays import (
            flat_outputs,
            model_inputs,
            output_keys,
            told_misfit,
        )

        columns = self._columns(batch)
        parts: list[list[npt.NDArray[Any]]] = []
        for start in range(0, count, self.batch_size):
            some = self._transformed(
                {name: one[start : start + self.batch_size] for name, one in columns.items()}
            )
            shape = self._shape(some, model)
            size = min(self.batch_size, count - start)
            try:
                with _no_gradients(self.backend):
                    value = model(model_inputs(shape, some, size), training=False)
            except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
                raise ValueError(told_misfit(shape, error)) from None
            found = flat_outputs(value, output_keys(value, self.labels), len(self.labels))
            parts.append([_numbers(one) for one in found])
        return [np.concatenate(pieces).reshape(count, -1) for pieces in zip(*parts, strict=True)]


def call(model: Any, argument: Any, labels: Sequence[str], backend: str) -> list[npt.NDArray[Any]]:
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
    return [_numbers(one) for one in flat_outputs(value, output_keys(value, labels), len(labels))]


def _numbers(output: Any) -> npt.NDArray[Any]:
    """Returns an output as NumPy's array: as exact as the model computed it, halves as what
    NumPy knows.
    """
    import keras

    is_half = keras.backend.standardize_dtype(output.dtype) in ("float16", "bfloat16")
    return np.asarray(
        keras.ops.convert_to_numpy(keras.ops.cast(output, "float32") if is_half else output)
    )


def _prepare(backend: str) -> None:
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

        compiler.defer()
    elif backend == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _no_gradients(backend: str) -> contextlib.AbstractContextManager[Any]:
    if backend != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
