# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches for Keras's `fit`, from a generator, which is the only form that all Keras backends take.

All rows of a step have the same weight, whichever process holds them. If processes have different
numbers of rows in a step, the batch contains its share. Gradients are multiplied by that share when
the optimizer gets them, so neither metrics nor the shown loss are affected.
"""

from __future__ import annotations

import inspect
import itertools
from contextlib import closing
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole.common import basics
from farandole.spark.common.data.batch_source import EpochPosition
from farandole.spark.keras.keras_inputs import build_model_argument, model_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.spark.common.data.batch_source import BatchSource, PaddedRankBatch
    from farandole.spark.keras.job import KerasTrainingJob


class BatchFeed:
    """The batches of one data set.

    Args:
        source: of rows.
        job: the run.
        steps: batches of an epoch; more than a pass has continue with the next pass.
        trains: whether they are for training, where each brings its share if these differ.
        moves: whether the world may change: then each batch for training brings its share.
    """

    def __init__(
        self,
        source: BatchSource,
        job: KerasTrainingJob,
        steps: int,
        *,
        trains: bool,
        moves: bool = False,
    ) -> None:
        self.source = source
        self.steps = steps
        self.rows = source.position_after_steps(0, steps).rows
        """Rows of all processes in an epoch."""
        self.validates = source.own > 0
        """Whether this process has rows; `False` if it only takes part in the collectives."""
        counts = trains or job.counts_losses
        ends = counts and steps >= source.steps_until_end()
        is_mean = job.loss_reduction == "mean"
        uneven = counts and not (source.has_equal_rows_on_ranks if ends else source.deals_equally)
        self.shares = (trains and (moves or not is_mean or uneven)) or (
            not trains and job.counts_losses and (moves or not source.has_equal_rows_on_ranks)
        )
        self.leaves_out = ends and source.has_idle_ranks
        """Whether some processes have no row in some steps."""
        if job.takes_local_steps:
            self.shares = trains and self.leaves_out
        self.uncounted = source.idle_steps(steps) if self.leaves_out else []
        """The steps in which this process has none."""
        self._job = job

    keeps_place = True
    """Whether another process can continue an epoch in the middle."""

    def position_after_steps(self, epoch: int, steps: int) -> EpochPosition:
        """Returns the position of all processes.

        Args:
            epoch: its number.
            steps: that are done.
        """
        return self.source.position_after_steps(epoch, steps)

    def validation_batches(self) -> ValidationDataset:
        """Returns the batches of an epoch, again and again."""
        return ValidationDataset(self)

    def batches_of_epochs(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        """Batches of one epoch after the other.

        Args:
            first: number of the epoch to begin with.
            last: the one to end before.
        """
        for epoch in range(first, last):
            with closing(self.source.iterate_epoch_batches(epoch, self.steps)) as batches:
                for rows in batches:
                    yield self.create_batch(rows)

    def create_batch(self, rows: PaddedRankBatch) -> tuple[Any, ...]:
        """Returns a batch as Keras takes it: inputs, labels and, if there are any, weights.

        Args:
            rows: of the source.
        """
        job = self._job
        x = build_model_argument(job.shape, rows.columns, rows.count)
        y = model_labels(job.shape, job.labels, rows.columns, rows.count)
        weights = None
        if job.weight is not None:
            weights = rows.columns[job.weight].reshape(rows.count).astype(np.float32, copy=False)
        if self.shares:
            share = np.full(rows.count, self._gradient_share(rows), np.float32)
            return x, y, {"share": share} | ({} if weights is None else {"weights": weights})
        return (x, y) if weights is None else (x, y, weights)

    def _gradient_share(self, rows: PaddedRankBatch) -> float:
        """Returns the factor of a batch's gradients, before they are averaged over processes and
        passes.
        """
        size = basics.size()
        if self._job.takes_local_steps:
            return 1.0 if rows.valid else 0.0
        if self._job.loss_reduction == "sum":
            return float(size * self._job.passes if rows.valid else 0)
        if self._job.loss_reduction == "per_batch":
            filled = min(size, self.source.row_count_in_steps(rows.step, rows.step + 1))
            return size / filled if rows.valid else 0.0
        return self.source.loss_factor(rows)


class ValidationDataset(keras.utils.PyDataset):
    """The batches of one epoch, for any number of passes. From a generator, Keras would repeat the
    first batches.

    Args:
        feed: feed of the data set.
    """

    def __init__(self, feed: BatchFeed) -> None:
        super().__init__()
        self._feed = feed
        self._batches: Iterator[tuple[Any, ...]] = iter(())
        self._next_index = 0

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self._feed.steps

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Returns a batch. Keras requests batches in order and then restarts at the first one."""
        if index < self._next_index or index == 0:
            self.close()
            self._batches = self._feed.batches_of_epochs(0, 1)
        while self._next_index < index:
            next(self._batches)
            self._next_index += 1
        self._next_index += 1
        return next(self._batches)

    def close(self) -> None:
        """Ends the pass."""
        self._next_index = 0
        if inspect.isgenerator(self._batches):
            self._batches.close()


class DataModuleFeed:
    """The data of a user's data module, in the form that `fit` takes; all its rows count.

    Args:
        data: makes it.
        steps: batches of an epoch.
        rows: of all processes in an epoch.
    """

    keeps_place = False

    def __init__(self, data: Callable[[], Any], steps: int, rows: int) -> None:
        self.steps = steps
        self.rows = rows
        self.validates = True
        self.shares = self.leaves_out = False
        self.uncounted: list[int] = []
        self._data = data

    def position_after_steps(self, _epoch: int, steps: int) -> EpochPosition:
        """Returns the number of steps that are done. No other position is known.

        Args:
            steps: that are done.
        """
        return EpochPosition(steps)

    def batches_of_epochs(self, first: int, last: int) -> Any:
        """Returns the batches of all epochs; the module keeps their order."""
        del first, last
        return self._data()

    def validation_batches(self) -> Any:
        """Returns the same, for validation."""
        return self._data()


def prefetch_batches(batches: Any, count: int) -> Any:
    """Batches that `tf.data` prepares ahead, where Keras runs on TensorFlow and a number was given.

    Args:
        batches: a generator of batches of one structure; anything else goes as it is.
        count: how many; 0 leaves the matter to Keras.
    """
    if count == 0 or keras.backend.backend() != "tensorflow" or not hasattr(batches, "send"):
        return batches
    import tensorflow as tf  # noqa: PLC0415 - the backend

    first = next(batches)
    signature = keras.tree.map_structure(
        lambda one: tf.TensorSpec((None, *one.shape[1:]), one.dtype), first
    )
    rest = itertools.chain([first], batches)
    return tf.data.Dataset.from_generator(lambda: rest, output_signature=signature).prefetch(count)


def scale_steps_by_share(
    model: Any, *, shares: bool, is_sum: bool, validation_shares: bool = False, passes: int = 1
) -> list[Any]:
    """Lets a model scale gradients by the share of each batch, and weigh losses of the history by
    rows.

    Gradients are scaled when the optimizer gets them, so a `train_step` of the user's is covered.
    On TensorFlow, Keras does not weigh the losses of single outputs by rows.

    Args:
        model: the model, compiled and built. Only this object changes; its saved form does not.
        shares: whether batches bring shares.
        is_sum: whether losses are sums over rows. The history has them divided by the rows.
        validation_shares: whether batches for validation bring shares.
        passes: batches for training whose gradients Keras averages.

    Returns:
        The share of the batch in progress, and the batches with which its gradients are averaged.
    """
    rows: list[Any] = [None]
    share: list[Any] = [1.0, passes]

    loss_scale = _scale_losses_by_part(model.optimizer)

    def wrap_step(plain_step: Any, *, takes_shares: bool, passes: int = 1) -> Any:
        def step(*arguments: Any) -> Any:
            *state, batch = arguments  # on JAX the model's state comes first
            share[:] = [1.0, passes]
            if loss_scale is not None:
                loss_scale.begin_step()
            if takes_shares:
                x, y, extra = batch
                share[0] = extra["share"][0]
                weights = extra.get("weights")
                batch = (x, y) if weights is None else (x, y, weights)
            first = next(one for one in keras.tree.flatten(batch) if one is not None)
            rows[0] = keras.ops.shape(first)[0]  # pyright: ignore[reportOptionalSubscript]
            return plain_step(*state, batch)

        return step

    # Past __setattr__, which tracks what belongs to a model.
    model.__dict__["train_step"] = wrap_step(model.train_step, takes_shares=shares, passes=passes)
    model.__dict__["test_step"] = wrap_step(model.test_step, takes_shares=validation_shares)
    if shares or loss_scale is not None:
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        plain_apply = optimizer.apply

        def apply_scaled_gradients(grads: Any, *others: Any, **named: Any) -> Any:
            factor = share[0] * (1.0 if loss_scale is None else loss_scale.gradient_factor())
            return plain_apply([_scale_gradient(one, factor) for one in grads], *others, **named)

        optimizer.__dict__["apply"] = apply_scaled_gradients
    for tracker in loss_trackers(model):
        _weigh_loss_tracker_by_rows(tracker, rows, is_sum=is_sum)
    return share


class _PartLossScale:
    """The loss scale of 16-bit floats, for losses that are parts of the loss of all processes.

    One process would scale the loss of all rows. The loss of the rows of a process is as many times
    as much as its part in that loss as there are processes, and would overflow in steps in which
    one process does not. So it is divided before it is scaled, and gradients are multiplied.

    Args:
        optimizer: Keras's `LossScaleOptimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._is_divided = False
        self._plain_scale_loss = optimizer.scale_loss
        optimizer.__dict__["scale_loss"] = self._scale_loss

    def begin_step(self) -> None:
        """Begins a step, whose loss is not scaled yet."""
        self._is_divided = False

    def gradient_factor(self) -> float:
        """Returns the factor of gradients; 1 if a `train_step` has not scaled its loss."""
        return float(basics.size()) if self._is_divided else 1.0

    def _scale_loss(self, loss: Any) -> Any:
        self._is_divided = True
        return self._plain_scale_loss(loss / basics.size())


def _scale_losses_by_part(optimizer: Any) -> _PartLossScale | None:
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return _PartLossScale(optimizer) if is_scaled else None


def loss_trackers(model: Any) -> list[Any]:
    """Returns the means that a compiled model keeps of its loss and of the losses of outputs."""
    compiled = getattr(model, "_compile_loss", None)
    outputs = [] if compiled is None else [one for one in compiled.metrics if one is not None]
    total = getattr(model, "_loss_tracker", None)
    return [*([] if total is None else [total]), *outputs]


def _weigh_loss_tracker_by_rows(tracker: Any, rows: list[Any], *, is_sum: bool) -> None:
    plain_update = tracker.update_state

    def update_state(value: Any, sample_weight: Any = None) -> Any:
        if rows[0] is None:
            return plain_update(value, sample_weight=sample_weight)
        count = keras.ops.cast(rows[0], tracker.dtype)
        value = keras.ops.cast(value, tracker.dtype)
        return plain_update(value / count if is_sum else value, sample_weight=count)

    tracker.__dict__["update_state"] = update_state


def _scale_gradient(grad: Any, share: Any) -> Any:
    if grad is None:
        return None
    if type(grad).__name__ == "IndexedSlices":  # TensorFlow's sparse gradient of a table
        values = grad.values * keras.ops.cast(share, grad.values.dtype)
        return type(grad)(values, grad.indices, grad.dense_shape)
    return grad * keras.ops.cast(share, grad.dtype)
