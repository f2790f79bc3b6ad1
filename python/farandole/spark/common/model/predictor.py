# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predictions in Spark's Python workers, one Arrow batch at a time, for the models of all
frameworks.

The model is sent with the function of the tasks. If it is large, classic Spark broadcasts it once
per executor, and a Connect client sends it before the plan. A worker keeps it by its content, so
that its later tasks use it again.
"""

# ruff: noqa: PLC0415 - loaded in tasks, when there are rows

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from farandole.data.encoding import ColumnEncoding
from farandole.data.lazy_pyarrow import pa
from farandole.spark.job.connect_artifacts import PrestagedFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from farandole.spark.common.model.class_columns import AddedClassColumns
    from farandole.spark.common.transform import UserTransformation

    Array = npt.NDArray[Any]

_MAX_KEPT_MODELS = 2
_MODEL_CACHE: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class BatchPredictor(ABC):
    """A model and how columns go in and out of it. A framework says how it loads the model, which
    inputs it makes of columns, and how it calls the model.
    """

    model: bytes | PrestagedFile
    columns: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    """The columns of each input."""
    labels: tuple[str, ...]
    batch_size: int
    kinds: tuple[str, ...] = ()
    """Types of the outputs: `vector`, or NumPy's name of a number."""
    encoding: ColumnEncoding = field(default_factory=ColumnEncoding)
    """Categories, and the replacements of nulls."""
    added: AddedClassColumns | None = None
    """Columns in Spark ML's manner."""
    transformation: bytes | None = None
    """A pickled `UserTransformation`, if predictions take one."""

    pads_to_fixed_length: ClassVar[bool] = False
    """Whether lists of different lengths are padded to the largest length of all batches."""

    @abstractmethod
    def load_model(self) -> Any:
        """Returns the model that was sent."""

    @abstractmethod
    def create_inputs(self, columns: dict[str, Array], rows: int, model: Any) -> list[Any]:
        """Returns the model's inputs, rows first.

        Args:
            columns: the feature columns after the transformation.
            rows: how many; at least one.
            model: result of `load_model`.
        """

    @abstractmethod
    def call_model(self, model: Any, columns: dict[str, Array], rows: int) -> list[Array]:
        """Returns the model's outputs, one per label, rows first.

        Args:
            model: result of `load_model`.
            columns: as for `create_inputs`.
            rows: how many.

        Raises:
            ValueError: the model does not take the columns.
        """

    def with_output_kinds(self, kinds: Sequence[str], added: AddedClassColumns | None) -> Self:
        """Returns the same predictor, with the types of its output columns.

        Args:
            kinds: one per output, see `kinds`.
            added: columns in Spark ML's manner, if there are any.
        """
        return replace(self, kinds=tuple(kinds), added=added)

    def predict_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields every batch with its predictions appended.

        Args:
            batches: with the feature columns and any others.
        """
        from farandole.spark.common.model.output_columns import prediction_column

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
        found = False
        for batch in batches:  # to their end, or Spark would not use this worker again
            if batch.num_rows and not found:
                found = True
                sizes = [values[0].size for values in self.predict_outputs(batch.slice(0, 1))]
                yield pa.RecordBatch.from_arrays([pa.array(sizes, pa.int32())], names=["size"])

    def predict_outputs(self, batch: pa.RecordBatch) -> list[Array]:
        """Returns the model's outputs for some rows, (rows, elements) per output.

        Args:
            batch: whose columns go by number.
        """
        count = batch.num_rows
        if count == 0:
            return [np.empty((0, 1), dtype=np.float32) for _ in self.labels]
        model, columns = self._find_model(), self._feature_arrays(batch)
        parts: list[list[Array]] = []
        for start in range(0, count, self.batch_size):
            end = min(start + self.batch_size, count)
            some = self._transform_features({name: one[start:end] for name, one in columns.items()})
            parts.append(self.call_model(model, some, end - start))
        return [np.concatenate(pieces).reshape(count, -1) for pieces in zip(*parts, strict=True)]

    def batch_inputs(self, batch: pa.RecordBatch, model: Any) -> list[Array]:
        """Returns the model's inputs as arrays, rows first.

        Args:
            batch: whose columns go by number.
            model: the model.
        """
        columns = self._transform_features(self._feature_arrays(batch))
        return [np.asarray(one) for one in self.create_inputs(columns, batch.num_rows, model)]

    @cached_property
    def model_key(self) -> str:
        """The identity of the model in this worker, computed once in a task."""
        return (
            self.model.name
            if isinstance(self.model, PrestagedFile)
            else hashlib.sha256(self.model).hexdigest()
        )

    def _find_model(self) -> Any:
        """Returns the model from this worker's cache, or loads it."""
        key = self.model_key
        if key not in _MODEL_CACHE:
            while len(_MODEL_CACHE) >= _MAX_KEPT_MODELS:
                _MODEL_CACHE.pop(next(iter(_MODEL_CACHE)))
            _MODEL_CACHE[key] = self.load_model()
        return _MODEL_CACHE[key]

    @cached_property
    def _feature_names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @cached_property
    def _unpickle_transformation(self) -> UserTransformation | None:
        import cloudpickle

        return None if self.transformation is None else cloudpickle.loads(self.transformation)

    def _feature_arrays(self, batch: pa.RecordBatch) -> dict[str, Array]:
        """Returns the columns of the model's inputs, before the transformation."""
        from farandole.spark.common.model.arrow_arrays import feature_arrays

        return feature_arrays(
            batch,
            self.columns,
            self._feature_names,
            self.encoding,
            fixed=self.pads_to_fixed_length,
            texts=self.transformation is not None,
        )

    def _transform_features(self, columns: dict[str, Array]) -> dict[str, Array]:
        """Returns the columns after the transformation, of one row at least."""
        if self._unpickle_transformation is None:
            return columns
        made = self._unpickle_transformation.transform_features(columns, self._feature_names)
        return {name: made[name] for name in self._feature_names}
