# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Real rows, whole and in unequal parts, on which losses and gradients are tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole.spark.common.data.training_data import PROBE_PART_ROWS
from farandole.spark.keras.keras_inputs import build_model_argument, model_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from farandole.spark.keras.job import KerasTrainingJob

LOSS_OPTIONS = (
    'Set loss_reduction: "mean" averages the losses of batches by their rows, "sum" adds them, '
    '"per_batch" averages them by batches'
)
"""A sentence that ends the errors of losses."""
_RELATIVE_TOLERANCE = 1e-4
_HALF_RELATIVE_TOLERANCE = 2e-2
"""Tolerance of models that compute with 16-bit floats."""


@dataclass(frozen=True)
class ProbeBatch:
    """Rows as a model takes them."""

    x: Any
    y: Any
    weights: Any
    """Sample weights, or `None`."""


def read_probe_batches(job: KerasTrainingJob, transformation: Any) -> list[ProbeBatch]:
    """Returns rows from all parts of the data, and then the parts of these rows.

    Args:
        job: the run.
        transformation: the user's transformation of rows, or `None`.
    """
    found = []
    for columns, rows in job.data.read_probe_parts(transformation):
        given = (
            build_model_argument(job.shape, columns, rows),
            model_labels(job.shape, job.labels, columns, rows),
        )
        x, y = (keras.tree.map_structure(keras.ops.convert_to_tensor, one) for one in given)
        weights = None
        if job.weight is not None:
            flat = columns[job.weight].reshape(-1).astype(np.float32)
            weights = keras.ops.convert_to_tensor(flat)
        found.append(ProbeBatch(x, y, weights))
    return found


@dataclass(frozen=True)
class ProbePartValues:
    """Values of the batches of `read_probe_batches`; each value is a number or an array.

    Attributes:
        whole: values of all rows.
        parts: the same values of each part.
        tolerance: largest relative difference of two equal values.
    """

    whole: Sequence[Any]
    parts: Sequence[Sequence[Any]]
    tolerance: float

    row_count = sum(PROBE_PART_ROWS)
    """Number of all rows."""

    @classmethod
    def from_batches(cls, values: Sequence[Sequence[Any]], policy: str) -> ProbePartValues:
        """Returns the values of all batches.

        Args:
            values: values of each batch.
            policy: Keras's dtype policy.
        """
        is_half = "float16" in policy
        tolerance = _HALF_RELATIVE_TOLERANCE if is_half else _RELATIVE_TOLERANCE
        return cls(values[0], values[1:], tolerance)

    def reduce_parts(self, index: int, word: str) -> Any:
        """Returns the mean over rows, or the sum, of a value of the parts.

        Args:
            index: index of the value.
            word: `"mean"` or `"sum"`.
        """
        values = [part[index] for part in self.parts]
        if word == "sum":
            return sum(values)
        weighed = zip(values, PROBE_PART_ROWS, strict=True)
        return sum(value * (count / self.row_count) for value, count in weighed)

    def matches_reduced_parts(self, index: int, word: str) -> bool:
        """Returns whether a value of all rows is the mean, or the sum, of the values of parts."""
        return are_close(self.whole[index], self.reduce_parts(index, word), self.tolerance)

    def detect_part_reduction(self, index: int) -> str | None:
        """Returns `"mean"` or `"sum"` if a value is one over rows."""
        return next(
            (word for word in ("mean", "sum") if self.matches_reduced_parts(index, word)), None
        )


def are_close(first: npt.ArrayLike, second: npt.ArrayLike, tolerance: float) -> bool:
    """Returns whether two numbers, or two arrays by their lengths as vectors, are equal.

    Args:
        first: a number or an array.
        second: a number or an array of the same shape.
        tolerance: largest relative difference.
    """
    first, second = np.ravel(first).astype(np.float64), np.ravel(second).astype(np.float64)
    length = max(np.linalg.norm(first), np.linalg.norm(second), 1e-12)
    return bool(np.linalg.norm(first - second) <= tolerance * length)
