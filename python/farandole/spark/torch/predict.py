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

from farandole.data.encoding import ColumnEncoding
from farandole.spark.job.connect_artifacts import PrestagedFile, load_prestaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    import torch

    from farandole.spark.common.model.classes import AddedClassColumns
    from farandole.spark.common.transform import UserTransformation

_MAX_KEPT_MODELS = 2
_MODEL_CACHE: dict[str, Any] = {}


@dataclass(frozen=True)
class TorchPredictor:
    """A model and how columns go in and out of it."""

    model: bytes | PrestagedFile
    columns: tuple[str, ...]
    features: tuple[tuple[str, ...], ...]
    """The columns of each input."""
    shapes: list[list[int]] | None
    dtypes: list[str] | None
    labels: int
    kinds: tuple[str, ...]
    batch_size: int
    use_gpu: bool | None
    encoding: ColumnEncoding = field(default_factory=ColumnEncoding)
    """Categories, and the replacements of nulls."""
    added: AddedClassColumns | None = None
    """Columns in Spark ML's manner."""
    function: Any = None
    """Makes outputs of the model and its inputs; `None` calls the model."""
    transformation: bytes | None = None
    """A pickled `UserTransformation`, if predictions take one."""

    def with_output_kinds(
        self, kinds: Sequence[str], added: AddedClassColumns | None
    ) -> TorchPredictor:
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

        for batch in batches:
            if batch.num_rows:
                sizes = [values[0].size for values in self.predict_outputs(batch.slice(0, 1))]
                yield pa.RecordBatch.from_arrays([pa.array(sizes, pa.int32())], names=["size"])
                return

    @cached_property
    def _model_key(self) -> str:
        """The identity of the model, computed once in a task."""
        return (
            self.model.name
            if isinstance(self.model, PrestagedFile)
            else hashlib.sha256(self.model).hexdigest()
        )

    def _load_model(self) -> torch.nn.Module:
        device = self._task_device()
        key = f"{self._model_key} {device}"
        if key not in _MODEL_CACHE:
            from farandole.spark.torch.saving import payload

            while len(_MODEL_CACHE) >= _MAX_KEPT_MODELS:
                _MODEL_CACHE.pop(next(iter(_MODEL_CACHE)))
            _MODEL_CACHE[key] = payload.unpack_pickle(load_prestaged(self.model)).eval().to(device)
        return _MODEL_CACHE[key]

    def _task_device(self) -> str:
        """Returns the device of this task: the GPU that Spark assigned, or with `use_gpu` a
        visible one.
        """
        import torch

        from farandole.spark.task import choose_gpu, task_resources

        assigned = task_resources().get("gpu", [])
        if self.use_gpu is False or not torch.cuda.is_available() or not (assigned or self.use_gpu):
            return "cpu"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        choice = choose_gpu(torch.cuda.device_count(), 0, 1, assigned, visible)
        return "cpu" if choice is None else f"cuda:{choice.index}"

    def batch_inputs(self, batch: pa.RecordBatch) -> list[torch.Tensor]:
        """Returns the model's inputs, on the CPU, rows first.

        Args:
            batch: whose columns go by number.
        """
        columns = self._feature_tensors(self._feature_arrays(batch))
        return [self._input_tensor(columns, index) for index in range(len(self.features))]

    @cached_property
    def _feature_names(self) -> list[str]:
        return [name for group in self.features for name in group]

    @cached_property
    def _user_transformation(self) -> UserTransformation | None:
        import cloudpickle

        return None if self.transformation is None else cloudpickle.loads(self.transformation)

    def _feature_arrays(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        from farandole.spark.common.model.arrow import feature_arrays

        return feature_arrays(
            batch,
            self.columns,
            self._feature_names,
            self.encoding,
            texts=self.transformation is not None,
        )

    def _feature_tensors(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Returns the tensors of some rows, one at least, after the transformation."""
        import torch

        if self._user_transformation is not None:
            columns = self._user_transformation.transform_features(columns, self._feature_names)
            columns = {name: columns[name] for name in self._feature_names}
        # Torch must not write to Arrow's memory: tensors that are not copied yet are copied here.
        return {
            name: torch.from_numpy(np.require(values, requirements=("C", "W")))
            for name, values in columns.items()
        }

    def predict_outputs(self, batch: pa.RecordBatch) -> list[npt.NDArray[Any]]:
        """Returns the model's outputs for some rows, (rows, elements) per output.

        Args:
            batch: whose columns go by number.
        """
        import torch

        from farandole.spark.torch.columns.tensors import describe_misfit, flat_outputs

        if batch.num_rows == 0:
            return [np.empty((0, 1), dtype=np.float32) for _ in range(self.labels)]
        model, columns = self._load_model(), self._feature_arrays(batch)
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        parts: list[list[torch.Tensor]] = []
        for start in range(0, batch.num_rows, self.batch_size):
            part = self._feature_tensors(
                {name: values[start : start + self.batch_size] for name, values in columns.items()}
            )
            some = [
                self._input_tensor(part, index).to(device) for index in range(len(self.features))
            ]
            with torch.inference_mode():
                try:
                    value = model(*some) if self.function is None else self.function(model, *some)
                except Exception as error:  # noqa: BLE001 - told in a sentence, Spark adds the rest
                    names = [", ".join(group) for group in self.features]
                    raise ValueError(describe_misfit(names, some, error)) from None
                parts.append([output.float().cpu() for output in flat_outputs(value, self.labels)])
        whole = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        return [output.reshape(batch.num_rows, -1).numpy() for output in whole]

    def _input_tensor(self, columns: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        import torch

        from farandole.data.columns import row_shape
        from farandole.spark.torch.columns.tensors import input_tensor
        from farandole.spark.torch.job import TorchInput

        names = self.features[index]
        count = len(columns[names[0]])
        size = sum(columns[name][0].numel() for name in names)
        shape = (size,) if self.shapes is None else row_shape(self.shapes[index], size)
        nested = names[0] in self.encoding.ragged and self.encoding.ragged[names[0]].nested
        one = TorchInput(
            names,
            (-1, *shape),
            "float32" if self.dtypes is None else self.dtypes[index],
            nested=nested,
        )
        return input_tensor(columns, one, count, torch.device("cpu"))
