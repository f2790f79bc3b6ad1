# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Callbacks by which all processes see the metrics, the statistics and the end of one run.

A Keras metric is a function of sums over rows. The sums are added over all processes before the
metric is computed, so metrics that are not means, such as AUC or F1, have the value of a single
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import farandole.numpy as arrays
from farandole._keras.callbacks import write_jax_state_to_model
from farandole._keras.value_collectives import to_numpy_array
from farandole.common import basics
from farandole.spark.common.runs.finite_loss import check_finite_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.spark.common.runs.stop_request import StopCheck


class GlobalScoresCallback(keras.callbacks.Callback):
    """A callback that replaces this process's scores by the scores of all processes; the first
    callback of all.

    Args:
        validates: whether this process has rows to validate on, and not one that only fills its
            place.
    """

    def __init__(self, *, validates: bool) -> None:
        super().__init__()
        self._validates = validates
        self._training_scores: dict[str, Any] | None = None
        self._validation_scores: dict[str, Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the last epoch's."""
        del epoch, logs
        self._training_scores = self._validation_scores = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Adds up training's sums, before validation begins its own."""
        del logs
        self._collect_training_scores()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Adds up validation's sums."""
        del logs
        self._validation_scores = self._global_scores("validation", counts=self._validates)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the scores of all processes to the logs, for the callbacks that follow."""
        del epoch
        if self._training_scores is None:
            self._collect_training_scores()
        logs = {} if logs is None else logs
        known = {
            **(self._training_scores or {}),
            **{f"val_{name}": value for name, value in (self._validation_scores or {}).items()},
        }
        others = sorted(
            name for name, value in logs.items() if name not in known and np.ndim(value) == 0
        )
        logs.update({name: value for name, value in known.items() if name in logs})
        if others:  # what a train_step of the user's returned
            mine = np.array([float(logs[name]) for name in others], np.float64)
            logs.update(
                zip(
                    others,
                    arrays.allreduce(mine, name="farandole.keras.logs").tolist(),
                    strict=True,
                )
            )

    def _collect_training_scores(self) -> None:
        model: Any = self.model
        write_jax_state_to_model(model)
        average_moving_statistics(model)
        self._training_scores = self._global_scores("train", counts=True)

    def _global_scores(self, stage: str, *, counts: bool) -> dict[str, Any]:
        model: Any = self.model
        assign_summed_metrics(model, sum_metrics_over_processes(model, stage, counts=counts))
        return {name: _to_plain(value) for name, value in model.get_metrics_result().items()}


def sum_metrics_over_processes(model: Any, stage: str, *, counts: bool) -> Any:
    """Returns the metrics' variables over all processes as one array; a collective call.

    Args:
        model: the model, compiled.
        stage: name of the collective call.
        counts: whether the rows of this process count. Rows that only fill a step do not.
    """
    write_jax_state_to_model(model)
    vectors = [
        _metric_contribution(to_numpy_array(variable), variable, counts)
        for variable in model.metrics_variables
    ]
    if not vectors:
        return np.zeros(0)
    return arrays.allreduce(np.concatenate(vectors), op=arrays.Sum, name=f"farandole.keras.{stage}")


def assign_summed_metrics(model: Any, total: Any, *, once: bool = False) -> None:
    """Gives metrics the values that `sum_metrics_over_processes` returned.

    Args:
        model: compiled.
        total: the values.
        once: whether only rank 0 takes sums, so that they count once when they are summed again.
    """
    start = 0
    for variable in model.metrics_variables:
        part = to_numpy_array(variable)
        values = total[start : start + part.size].reshape(part.shape)
        start += part.size
        is_sum = getattr(variable, "aggregation", "sum") not in ("mean", "only_first_replica")
        if not (once and is_sum and basics.rank() != 0):
            _assign_variable(variable, values, part.dtype)


def _metric_contribution(part: Any, variable: Any, counts: bool) -> Any:
    """Returns this process's part of a metric's variable, according to the variable's
    aggregation.
    """
    vector = part.reshape(-1).astype(np.float64)
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation in ("mean", "only_first_replica"):
        return vector / basics.size() if aggregation == "mean" else vector * (basics.rank() == 0)
    return vector * counts


def _assign_variable(variable: Any, values: Any, dtype: Any) -> None:
    if getattr(variable, "aggregation", "sum") != "none":
        variable.assign(
            (np.rint(values) if np.issubdtype(dtype, np.integer) else values).astype(dtype)
        )


def _to_plain(value: Any) -> Any:
    array = to_numpy_array(value)
    return float(array) if array.ndim == 0 else array


def batch_norm_statistics(model: Any) -> list[Any]:
    """Returns the moving statistics of a model's batch normalisation, which training moves and no
    gradient.

    Args:
        model: built.
    """
    found: list[Any] = []
    for layer in model._flatten_layers():  # noqa: SLF001 - layers of layers have no public door
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            found += [layer.moving_mean, layer.moving_variance]
    return found


def average_moving_statistics(model: Any) -> None:
    """Gives all processes the mean of their moving statistics, so that they hold one model.

    Args:
        model: built.
    """
    moving = batch_norm_statistics(model)
    if not moving:
        return
    parts = [to_numpy_array(variable) for variable in moving]
    mine = np.concatenate([part.reshape(-1).astype(np.float64) for part in parts])
    mean = arrays.allreduce(mine, name="farandole.keras.statistics")
    start = 0
    for part, variable in zip(parts, moving, strict=True):
        variable.assign(mean[start : start + part.size].reshape(part.shape).astype(part.dtype))
        start += part.size


class UndoEmptyStepsCallback(keras.callbacks.Callback):
    """A callback that undoes the changes that steps without a row of this process make to metrics
    and moving statistics.

    Args:
        steps: numbers of these steps in an epoch.
        validation_steps: numbers of these steps in a validation.
    """

    def __init__(self, steps: Sequence[int], validation_steps: Sequence[int] = ()) -> None:
        super().__init__()
        self._steps = frozenset(steps)
        self._validation_steps = frozenset(validation_steps)
        self._saved_values: list[tuple[Any, Any]] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers."""
        del logs
        if batch in self._steps:
            self._save_step_values()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores."""
        del logs
        if batch in self._steps:
            self._restore_values()

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers."""
        del logs
        if batch in self._validation_steps:
            self._save_step_values()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores."""
        del logs
        if batch in self._validation_steps:
            self._restore_values()

    def _save_step_values(self) -> None:
        model: Any = self.model
        write_jax_state_to_model(model)
        touched = [*model.metrics_variables, *batch_norm_statistics(model)]
        self._saved_values = [
            (variable, np.array(to_numpy_array(variable))) for variable in touched
        ]

    def _restore_values(self) -> None:
        write_jax_state_to_model(self.model)
        for variable, value in self._saved_values:
            variable.assign(value)
        self._saved_values = []


class FiniteLossCallback(keras.callbacks.Callback):
    """A callback that ends the training at a NaN or infinite loss.

    Keras reads the loss for its callbacks anyway, where a backend runs ahead in a thread of its
    own.

    Args:
        rank: of this process.
    """

    async_safe = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        del logs
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the mean loss of the epoch so far, which one bad step spoils.

        Raises:
            NotFiniteError: it is not finite.
        """
        loss = (logs or {}).get("loss")
        if loss is not None and np.ndim(loss) == 0:
            check_finite_loss(float(loss), self._epoch, batch, self._rank)


class AgreedStopCallback(keras.callbacks.Callback):
    """A callback that ends the run on all ranks after the epoch in which a callback has ended it on
    one rank, or in which the fit was stopped; the last callback on all ranks.

    It does not end the run within an epoch, because some backends call the callbacks of a step from
    another thread and after the step.

    Args:
        halt: check whether the fit was stopped.
        rank: rank of this process.
    """

    def __init__(self, halt: StopCheck, rank: int) -> None:
        super().__init__()
        self._stop_check = halt
        self._rank = rank

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks all processes."""
        del epoch, logs
        model: Any = self.model
        ends = self._stop_check.should_stop_after_epoch(self._rank) or model.stop_training
        mine = np.array([int(bool(ends))], np.int32)
        model.stop_training = bool(
            arrays.allreduce(mine, op=arrays.Max, name="farandole.keras.stop")[0]
        )
