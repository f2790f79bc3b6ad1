# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Metrics of a model's predictions on a DataFrame, computed from sums of the tasks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.spark.common.model.class_columns import predict_classes, raw_scores_and_probabilities

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_MIN_PROBABILITY = 1e-15
"""A probability that a loss takes for 0, as Spark ML does."""
MAX_DISTINCT_SCORES = 1 << 16
"""Different scores that are counted apart for the area under a curve. If there are more,
neighbours share a count.
"""
_BINARY_CLASS_COUNT = 2


@dataclass(frozen=True)
class ModelEvaluation:
    """Metrics over rows.

    Of classes: `accuracy`, `precision`, `recall` and `f1` (means over classes, weighted by their
    rows), `log_loss`, and of two classes `area_under_roc`. Of values: `mse`, `rmse`, `mae` and
    `r2`.
    """

    rows: int
    metrics: dict[str, float]
    classes: list[Any] = field(default_factory=list)
    """Names of the classes."""
    confusion: list[list[int]] = field(default_factory=list)
    """Rows by class of the label, and by predicted class in that."""

    def __getitem__(self, name: str) -> float:
        """One metric."""
        return self.metrics[name]

    def __str__(self) -> str:
        """Returns the metrics, one a line."""
        told = [f"{'rows':<16}{self.rows:>12,}"]
        told += [f"{name:<16}{value:>12.4f}" for name, value in self.metrics.items()]
        return "\n".join(told)


@dataclass
class BinaryScoreHistogram:
    """Rows of two classes by score, for the area under the ROC curve.

    As in Spark's `BinaryClassificationEvaluator` with `numBins=0`, only equal scores are ties.
    If there are more than `MAX_DISTINCT_SCORES` different scores, as few low bits as possible are
    left out to make them fewer. (Spark has `numBins=1000` by default, and then groups neighbours
    from 2,000 different scores on.) The result does not depend on the order in which tasks are
    merged.
    """

    shift: int = 0
    """Low bits that are left out."""
    keys: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Scores in order, as integers of the same order."""
    counts: Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Rows of the first and of the second class, (scores, 2)."""

    def add(self, score: Array, index: Array) -> None:
        """Counts some rows.

        Args:
            score: of the second class.
            index: of each row's class, 0 or 1.
        """
        bits = (score.astype(np.float64) + 0.0).view(np.int64)  # -0.0 + 0.0 is 0.0
        ordered = np.where(bits < 0, np.iinfo(np.int64).min - bits, bits)
        counts = np.stack([index == 0, index == 1], axis=1).astype(np.int64)
        self._add_counts(ordered >> self.shift, counts)

    def merge(self, other: BinaryScoreHistogram) -> None:
        """Adds the counts of another task.

        Args:
            other: of other rows.
        """
        shift = max(self.shift, other.shift)
        self.keys, self.shift = self.keys >> (shift - self.shift), shift
        self._add_counts(other.keys >> (shift - other.shift), other.counts)

    def _add_counts(self, keys: Array, counts: Array) -> None:
        keys, counts = np.concatenate([self.keys, keys]), np.concatenate([self.counts, counts])
        while True:
            found, owners = np.unique(keys, return_inverse=True)
            if len(found) <= MAX_DISTINCT_SCORES:
                break
            keys, self.shift = keys >> 1, self.shift + 1
        self.keys, self.counts = found, np.zeros((len(found), 2), np.int64)
        np.add.at(self.counts, owners.reshape(-1), counts)

    def area_under_roc(self) -> float:
        """Returns the share of pairs of a row of each class whose scores are in order; equal
        ones count half.
        """
        before = area = total = 0
        for first, second in self.counts.tolist():
            area += second * (2 * before + first)
            before, total = before + first, total + second
        return area / (2 * before * total) if before and total else float("nan")


@dataclass
class ClassificationSums:
    """The sums over rows with classes."""

    form: str
    thresholds: Sequence[float] | None
    count: int = 0
    loss: float = 0.0
    confusion: dict[tuple[int, int], int] = field(default_factory=dict)
    classes: int = 0
    by_score: BinaryScoreHistogram | None = field(default_factory=BinaryScoreHistogram)
    """Rows by score, of two classes; `None` if the area under the curve is not requested."""

    def add(self, output: Array, label: Array) -> None:
        """Counts some rows.

        Args:
            output: of the model, (rows, elements).
            label: the index of each row's class.

        Raises:
            ValueError: a label that is no class of the model.
        """
        raw, probability = raw_scores_and_probabilities(output, self.form)
        self.classes = probability.shape[1]
        index = label.reshape(-1).astype(np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < self.classes:
            raise ValueError(
                f"labels are indices of {self.classes} classes: {index.min()} to {index.max()}"
            )
        self.count += len(index)
        own = probability[np.arange(len(index)), index]
        self.loss += float(-np.log(np.clip(own, _MIN_PROBABILITY, 1.0)).sum())
        pairs, counts = np.unique(
            index * self.classes + predict_classes(probability, self.thresholds), return_counts=True
        )
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            key = divmod(pair, self.classes)
            self.confusion[key] = self.confusion.get(key, 0) + count
        if self.classes == _BINARY_CLASS_COUNT and self.by_score is not None:
            self.by_score.add(raw[:, 1], index)

    def merge(self, other: ClassificationSums) -> None:
        """Adds the counts of another task."""
        self.count, self.loss = self.count + other.count, self.loss + other.loss
        self.classes = max(self.classes, other.classes)
        for key, count in other.confusion.items():
            self.confusion[key] = self.confusion.get(key, 0) + count
        if self.by_score is not None and other.by_score is not None:
            self.by_score.merge(other.by_score)

    def to_evaluation(self, names: Sequence[Any] | None) -> ModelEvaluation:
        """The metrics.

        Args:
            names: of the classes; numbers stand for them where there are none.
        """
        table = np.zeros((self.classes, self.classes), dtype=np.int64)
        for key, count in self.confusion.items():
            table[key] = count
        hits, labels, guesses = np.diag(table), table.sum(axis=1), table.sum(axis=0)
        precision = hits / np.maximum(guesses, 1)
        recall = hits / np.maximum(labels, 1)
        both = precision + recall
        f1 = np.divide(2 * precision * recall, both, out=np.zeros(self.classes), where=both > 0)
        share = labels / max(self.count, 1)
        metrics = {
            "accuracy": float(hits.sum() / max(self.count, 1)),
            "precision": float(precision @ share),
            "recall": float(recall @ share),
            "f1": float(f1 @ share),
            "log_loss": self.loss / max(self.count, 1),
        }
        if self.classes == _BINARY_CLASS_COUNT:
            metrics["area_under_roc"] = (
                float("nan") if self.by_score is None else self.by_score.area_under_roc()
            )
        return ModelEvaluation(
            self.count, metrics, list(names or range(self.classes)), table.tolist()
        )


@dataclass
class RegressionSums:
    """The sums over rows with values."""

    count: int = 0
    square: float = 0.0
    absolute: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Squared distances of labels from their mean."""

    def add(self, output: Array, label: Array) -> None:
        """Counts some rows.

        Args:
            output: of the model, (rows, elements).
            label: as many elements.

        Raises:
            ValueError: another number of elements.
        """
        values, wanted = output.astype(np.float64).reshape(-1), label.astype(np.float64).reshape(-1)
        if values.shape != wanted.shape:
            raise ValueError(f"labels have {wanted.size} values, the model returned {values.size}")
        wrong = values - wanted
        mean = float(wanted.mean()) if len(wanted) else 0.0
        spread = float(((wanted - mean) ** 2).sum())
        self.merge(
            RegressionSums(
                len(wanted), float((wrong**2).sum()), float(np.abs(wrong).sum()), mean, spread
            )
        )

    def merge(self, other: RegressionSums) -> None:
        """Adds the counts of another task."""
        count = self.count + other.count
        if not count:
            return
        apart = other.mean - self.mean
        self.spread += other.spread + apart**2 * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count, self.square = count, self.square + other.square
        self.absolute += other.absolute

    def to_evaluation(self, names: Sequence[Any] | None) -> ModelEvaluation:
        """The metrics.

        Args:
            names: there are none.
        """
        del names
        mse = self.square / max(self.count, 1)
        r2 = 1.0 - self.square / self.spread if self.spread else float("nan")
        metrics = {
            "mse": mse,
            "rmse": mse**0.5,
            "mae": self.absolute / max(self.count, 1),
            "r2": r2,
        }
        return ModelEvaluation(self.count, metrics)


def empty_sums(
    form: str, thresholds: Sequence[float] | None, *, by_score: bool = True
) -> ClassificationSums | RegressionSums:
    """Returns sums over no rows.

    Args:
        form: of the model's output.
        thresholds: of classes.
        by_score: whether to count rows by score, which `area_under_roc` needs; up to 1.5 MB.
    """
    if form == "values":
        return RegressionSums()
    return ClassificationSums(
        form, thresholds, by_score=BinaryScoreHistogram() if by_score else None
    )


def sum_evaluated_rows(
    batches: Iterator[Any], predictor: Any, label: Any, start: ClassificationSums | RegressionSums
) -> ClassificationSums | RegressionSums:
    """Predicts the rows of a task, and returns their sums.

    Args:
        batches: the rows.
        predictor: of the framework.
        label: takes a batch and returns its labels.
        start: with nothing counted.
    """
    found = deepcopy(start)
    for batch in batches:
        if batch.num_rows:
            found.add(predictor.predict_outputs(batch)[0], label(batch))
    return found
