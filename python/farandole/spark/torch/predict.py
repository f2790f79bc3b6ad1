# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predictions in Spark's Python workers, one Arrow batch at a time.

The model is sent with the function of the tasks. If it is large, classic Spark broadcasts it once
per executor, and a Connect client sends it before the plan. A worker keeps it by its content, so
that its later tasks use it again.
"""

# ruff: noqa: PLC0415 - loaded in tasks, when there are rows

from __future__ import annotations

import hashlib
import os
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
    import torch

    from farandole.spark.common.model.classes import Added
    from farandole.spark.common.transform import Transformation

_KEPT = 2
_MODELS: dict[str, Any] = {}


@dataclass(frozen=True)
class Predictor:
    """A model and how columns go in and out of it."""

    model: bytes | Ahead
    columns: tuple[str, ...]
    features: tuple[tuple[str, ...], ...]
    """The columns of each input."""
    shapes: list[list[int]] | None
    dtypes: list[str] | None
    labels: int
    kinds: tuple[str, ...]
    batch_size: int
    use_gpu: bool | None
    encoding: Encoding = field(default_factory=Encoding)
    """Categories, and the replacements of nulls."""
    added: Added | None = None
    """Columns in Spark ML's manner."""
    function: Any = None
    """Makes outputs of the model and its inputs; `None` calls the model."""
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

        for batch in batches:
            if batch.num_rows:
                sizes = [values[0].size for values in self.outputs(batch.slice(0, 1))]
                yield pa.RecordBatch.from_arrays([pa.array(sizes, pa.int32())], names=["size"])
                return

    @cached_property
    def _content(self) -> str:
        """The identity of the model, computed once in a task."""
        return (
            self.model.name
            if isinstance(self.model, Ahead)
            else hashlib.sha256(self.model).hexdigest()
        )

    def _load(self) -> torch.nn.Module:
        device = self._device()
        key = f"{self._content} {device}"
        if key not in _MODELS:
            from farandole.spark.torch.saving import payload

            while len(_MODELS) >= _KEPT:
                _MODELS.pop(next(iter(_MODELS)))
            _MODELS[key] = payload.unpack(arrived(self.model)).eval().to(device)
        return _MODELS[key]

    def _device(self) -> str:
        """Returns the device of this task: the GPU that Spark assigned, or with `use_gpu` a
        visible one.
        """
        import torch

        from farandole.spark.task import choose_device, resources

        assigned = resources().get("gpu", [])
        if self.use_gpu is False or not torch.cuda.is_available() or not (assigned or self.use_gpu):
            return "cpu"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        choice = choose_device(torch.cuda.device_count(), 0, 1, assigned, visible)
        return "cpu" if choice is None else f"cuda:{choice.index}"

    def inputs(self, batch: pa.RecordBatch) -> list[torch.Tensor]:
        """Returns the model's inputs, on the CPU, rows first.

        Args:
            batch: whose columns go by number.
        """
        columns = self._tensors(self._columns(batch))
        return [self._input(columns, index) for index in range(len(self.features))]

    @cached_property
    def _names(self) -> list[str]:
        return [name for group in self.features for name in group]

    @cached_property
    def _transformation(self) -> Transformation | None:
        import cloudpickle

        return None if self.transformation is None else cloudpickle.loads(self.transformation)

    def _columns(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        from farandole.spark.common.model.arrow import features

        return features(
            batch, self.columns, self._names, self.encoding, texts=self.transformation is not None
        )

    def _tensors(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Returns the tensors of some rows, one at least, after the transformation."""
        import torch

        if self._transformation is not None:
            columns = self._transformation.predicted(columns, self._names)
            columns = {name: columns[name] for name in self._names}
        # Torch must not write to Arrow's memory: tensors that are not copied yet are copied here.
        return {
            name: torch.from_numpy(np.require(values, requirements=("C", "W")))
            for name, values in columns.items()
        }

    def outputs(self, batch: pa.RecordBatch) -> list[npt.NDArray[Any]]:
        """Returns the model's outputs for some rows, (rows, elements) per output.

        Args:
            batch: whose columns go by number.
        """
        import torch

        from farandole.spark.torch.columns.tensors import outputs_of, told_misfit

        if batch.num_rows == 0:
            return [np.empty((0, 1), dtype=np.float32) for _ in range(self.labels)]
        model, columns = self._load(), self._columns(batch)
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        parts: list[list[torch.Tensor]] = []
        for start in range(0, batch.num_rows, self.batch_size):
            part = self._tensors(
                {name: values[start : start + self.batch_size] for name, values in columns.items()}
            )
            some = [self._input(part, index).to(device) for index in range(len(self.features))]
            with torch.inference_mode():
                try:
                    value = model(*some) if self.function is None else self.function(model, *some)
                except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
                    names = [", ".join(group) for group in self.features]
                    raise ValueError(told_misfit(names, some, error)) from None
                parts.append([output.float().cpu() for output in outputs_of(value, self.labels)])
        whole = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        return [output.reshape(batch.num_rows, -1).numpy() for output in whole]

    def _input(self, columns: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        import torch

        from farandole.data.columns import row_shape
        from farandole.spark.torch.columns.tensors import input_tensor
        from farandole.spark.torch.job import Input

        names = self.features[index]
        count = len(columns[names[0]])
        size = sum(columns[name][0].numel() for name in names)
        shape = (size,) if self.shapes is None else row_shape(self.shapes[index], size)
        nested = names[0] in self.encoding.ragged and self.encoding.ragged[names[0]].nested
        one = Input(
            names,
            (-1, *shape),
            "float32" if self.dtypes is None else self.dtypes[index],
            nested=nested,
        )
        return input_tensor(columns, one, count, torch.device("cpu"))
