# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches for Keras's `fit`, from a generator, which is the only form that all Keras backends take.

All rows of a step have the same weight, whichever process holds them. If processes have different
numbers of rows in a step, the batch contains its share. The loss is multiplied by that share just
before the backward pass, so neither metrics nor the shown loss are affected.
"""

from __future__ import annotations

import inspect
import itertools
from contextlib import closing
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole.spark.common.data.source import EpochPosition
from farandole.spark.keras.arrays import model_inputs, model_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.spark.common.data.source import BatchSource, SourceBatch
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
        ends = trains and steps >= source.steps_until_end()
        self.shares = trains and (moves or (ends and not source.has_equal_rows_on_ranks))
        self.leaves_out = ends and source.has_idle_ranks
        """Whether some processes have no row in some steps."""
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
            with closing(self.source.epoch(epoch, self.steps)) as batches:
                for rows in batches:
                    yield self.create_batch(rows)

    def create_batch(self, rows: SourceBatch) -> tuple[Any, ...]:
        """Returns a batch as Keras takes it: inputs, labels and, if there are any, weights.

        Args:
            rows: of the source.
        """
        job = self._job
        x = model_inputs(job.shape, rows.columns, rows.count)
        y = model_labels(job.shape, job.labels, rows.columns, rows.count)
        weights = None
        if job.weight is not None:
            weights = rows.columns[job.weight].reshape(rows.count).astype(np.float32, copy=False)
        if self.shares:
            share = np.full(rows.count, self.source.loss_factor(rows), np.float32)
            return x, y, {"share": share} | ({} if weights is None else {"weights": weights})
        return (x, y) if weights is None else (x, y, weights)


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


def scale_loss_by_share(model: Any) -> None:
    """Lets a model scale the loss by the share of each batch. The default `train_step` calls the
    optimizer's `scale_loss`, which is replaced.

    Args:
        model: the model, compiled. Only this object changes; its saved form does not.
    """
    current: list[Any] = [None]
    optimizer = model.optimizer
    plain_step, plain_scale = model.train_step, optimizer.scale_loss

    def train_step(*arguments: Any) -> Any:
        *state, (x, y, extra) = arguments  # on JAX the model's state comes first
        current[0] = extra["share"][0]
        weights = extra.get("weights")
        return plain_step(*state, (x, y) if weights is None else (x, y, weights))

    def scale_loss(loss: Any) -> Any:
        return plain_scale(loss * keras.ops.cast(current[0], loss.dtype))

    # Past __setattr__, which tracks what belongs to a model.
    model.__dict__["train_step"] = train_step
    optimizer.__dict__["scale_loss"] = scale_loss
