# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Weights of rows by the class in their label."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.spark.common.data.batch_source import BatchSource
from farandole.torch.loss_sums import divides_by_labels, ignored_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.common.data.training_data import TrainingDataSpec

BALANCED = "balanced"
_COUNTED_ROWS = 65_536
"""Rows of a batch whose classes are counted."""
_MAX_CLASSES = 100_000
"""Classes of a label; with more of them, the label has no classes."""


@dataclass(frozen=True)
class ClassWeights:
    """The weight of each class; other classes have the weight 1.

    Attributes:
        classes: values of the label, sorted.
        weights: one per class.
    """

    classes: tuple[float, ...]
    weights: tuple[float, ...]

    def row_weights(self, label: torch.Tensor) -> torch.Tensor:
        """Returns the weight of each row, as float32.

        Args:
            label: one class per row.
        """
        flat = label.reshape(-1).double()
        classes = torch.tensor(self.classes, dtype=torch.float64, device=label.device)
        weights = torch.tensor(self.weights, dtype=torch.float32, device=label.device)
        index = torch.searchsorted(classes, flat).clamp(max=len(classes) - 1)
        return torch.where(classes[index] == flat, weights[index], torch.ones_like(weights[index]))

    def weigh_rows(self, label: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Returns the weight of each row, multiplied by the row's own weight if there is one.

        Args:
            label: one class per row.
            weights: one per row, or `None`.
        """
        made = self.row_weights(label)
        return made if weights is None else made * weights


def check_class_weight(name: str, value: Any) -> str | dict[Any, float]:
    """Returns `"balanced"`, or a dict of weights by class."""
    if isinstance(value, str):
        if value != BALANCED:
            raise ValueError(f'{name} must be "{BALANCED}" or a dict by class: {value!r}')
        return value
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f'{name} must be "{BALANCED}" or a dict of weights by class: {value!r}')
    for label_class, weight in value.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, Real)
            or not 0 <= float(weight) < np.inf
        ):
            raise ValueError(
                f"{name} of class {label_class!r} must be a number, 0 or more: {weight!r}"
            )
    return {label_class: float(weight) for label_class, weight in value.items()}


def given_class_weights(
    value: Mapping[Any, float], name: str, categories: Sequence[Any] | None
) -> ClassWeights:
    """Returns the weights that the user set.

    Args:
        value: weight by class.
        name: name of the label column.
        categories: categories of the label, which are its classes from 0 on, if it has any.

    Raises:
        ValueError: a class is none of the categories, or no number.
    """
    known = {} if categories is None else {one: index for index, one in enumerate(categories)}
    made: dict[float, float] = {}
    for label_class, weight in value.items():
        if categories is not None and label_class not in known:
            raise ValueError(
                f"class_weight has a class that is no category of column {name!r}: "
                f"{label_class!r}. Its categories are {', '.join(map(repr, categories))}"
            )
        if categories is None and not isinstance(label_class, Real):
            raise ValueError(
                f"class_weight needs the values of column {name!r}, which are numbers: "
                f"{label_class!r}"
            )
        made[float(known.get(label_class, label_class))] = weight
    if not any(made.values()):
        raise ValueError("class_weight is 0 for all of its classes: nothing would be learned")
    return ClassWeights(tuple(sorted(made)), tuple(made[one] for one in sorted(made)))


def balanced_class_weights(data: TrainingDataSpec, name: str, loss: Any) -> ClassWeights:
    """Returns weights with which all classes of the training rows count alike, and which have the
    mean 1 over rows.

    Args:
        data: the rows; all of them are read once, the label column alone.
        name: name of the label column.
        loss: loss of the label. Labels that it ignores do not count.

    Raises:
        ValueError: the label has no classes.
    """
    counts: dict[float, int] = {}
    source = BatchSource(
        data.train_url,
        {name: None},
        batch_size=_COUNTED_ROWS,
        threads=data.train_threads,
        missing=data.missing,
    )
    with closing(source.iterate_epoch_batches(0, source.steps)) as batches:
        for batch in batches:
            values, found = np.unique(batch.columns[name][: batch.valid], return_counts=True)
            for value, count in zip(values.tolist(), found.tolist(), strict=True):
                counts[float(value)] = counts.get(float(value), 0) + count
            if len(counts) > _MAX_CLASSES:
                raise ValueError(
                    f'class_weight="{BALANCED}" needs classes, and column {name!r} has more than '
                    f"{_MAX_CLASSES:,} different values"
                )
    if divides_by_labels(loss):
        counts.pop(float(ignored_label(loss)), None)
    rows = sum(counts.values())
    classes = sorted(counts)
    return ClassWeights(
        tuple(classes), tuple(rows / (len(classes) * counts[one]) for one in classes)
    )
