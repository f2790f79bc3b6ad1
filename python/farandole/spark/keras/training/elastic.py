# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a Keras run, which `ProgressAcrossWorlds` commits.

In another world, the rest of an epoch is a separate `fit`, which callbacks do not notice.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from farandole.spark.common.data.batch_source import EpochPosition
from farandole.spark.common.runs.elastic_run import COMMIT_INTERVAL_STEPS, ProgressAcrossWorlds
from farandole.spark.keras.training.scores import assign_summed_metrics, sum_metrics_over_processes
from farandole.stores import durable_writes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole.spark.keras.training.batch_feed import BatchFeed, DataModuleFeed
    from farandole.spark.keras.training.run_publisher import RunPublisher


@dataclass(frozen=True)
class KerasRunProgress:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh state, or the state of a checkpoint.
        epoch: epoch in progress.
        place: position in the data of this epoch.
        metrics: sums of this epoch's training metrics, if it has begun.
        note: note of a checkpoint about the epochs before.
        best: file of the model that the user's callback has kept.
        size: size of the world for which the optimizer's learning rate is set.
        stopped: whether a callback has ended the training.
    """

    begun: bool = False
    epoch: int = 0
    place: EpochPosition = field(default_factory=EpochPosition)
    metrics: Any = None
    note: dict[str, Any] = field(default_factory=dict)
    best: bytes | None = None
    size: int = 1
    stopped: bool = False


class CommitCallback(keras.callbacks.Callback):
    """A callback that commits at an interval of steps and at the end of an epoch; the last callback
    on all ranks.

    Args:
        elastic_run: the run that it commits.
        feed: of its training.
        publisher: of its history.
    """

    def __init__(
        self,
        elastic_run: ProgressAcrossWorlds[KerasRunProgress],
        feed: BatchFeed | DataModuleFeed,
        publisher: RunPublisher,
    ) -> None:
        super().__init__()
        self._elastic_run = elastic_run
        self._feed = feed
        self._publisher = publisher
        self._epoch = self._committed = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets the metrics of a continued epoch continue, too."""
        del logs
        reached = self._elastic_run.reached
        self._epoch, self._committed = epoch, reached.place.steps
        if reached.metrics is not None and epoch == reached.epoch:
            assign_summed_metrics(self.model, reached.metrics, once=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits where it is time; not after the last step, whose epoch is not over before its
        validation is.
        """
        del logs
        steps = batch + 1
        if (
            not self._feed.keeps_place
            or steps - self._committed < COMMIT_INTERVAL_STEPS
            or steps >= self._feed.steps
        ):
            return
        self._committed = steps
        metrics = sum_metrics_over_processes(self.model, "commit", counts=True)
        self._elastic_run.commit_progress(
            epoch=self._epoch,
            place=self._feed.position_after_steps(self._epoch, steps),
            metrics=metrics,
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        del logs
        kept = self._publisher.kept
        best = (
            kept.path.read_bytes()
            if kept is not None and durable_writes.is_path_present(kept.path)
            else None
        )
        note = copy.deepcopy(self._publisher.create_history_note())
        model: Any = self.model
        stopped = bool(model.stop_training)
        self._elastic_run.commit_progress(
            epoch=epoch + 1,
            place=EpochPosition(),
            metrics=None,
            note=note,
            best=best,
            stopped=stopped,
        )


class PartialFitCallbackList(keras.callbacks.CallbackList):
    """Keras's list of callbacks for one of several parts of a training. The user's callbacks see
    one training.

    Args:
        callbacks: all callbacks, in order.
        users: the callbacks that are called once for each moment.
        offset: steps of the part's epoch that are done; 0 for a part of several epochs.
        last: number of the training's last epoch plus one.
        **more: arguments of Keras's own list.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        users: OncePerMomentCallbacks,
        offset: int,
        last: int,
        **more: Any,
    ) -> None:
        self._user_callbacks = users
        self._offset = offset
        self._last_epoch = last
        self._epoch = 0
        super().__init__(list(callbacks), add_history=True, **more)

    @contextlib.contextmanager
    def _call_only(self, callbacks: list[Any]) -> Iterator[None]:
        """Calls only these callbacks inside the context."""
        every, self.callbacks = self.callbacks, callbacks
        yield
        self.callbacks = every

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Calls the callbacks that have not been called for the begin of the training."""
        with self._call_only(self._user_callbacks.uncalled_callbacks(self.callbacks, "begin")):
            super().on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Calls all callbacks, if the whole training ends with this part."""
        model: Any = self.model
        ends = self._epoch + 1 >= self._last_epoch or model.stop_training
        with self._call_only(self.callbacks if ends else []):
            super().on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Calls the callbacks that have not been called for the begin of this epoch."""
        self._epoch = epoch
        with self._call_only(
            self._user_callbacks.uncalled_callbacks(self.callbacks, f"epoch {epoch}")
        ):
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Calls all callbacks with the number of the step in its epoch."""
        super().on_train_batch_begin(batch + self._offset, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Like `on_train_batch_begin`."""
        super().on_train_batch_end(batch + self._offset, logs)


class OncePerMomentCallbacks:
    """The user's callbacks, each of which is called once for each moment of a training.

    Args:
        callbacks: the user's.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._called_moments: set[tuple[int, str]] = set()

    def uncalled_callbacks(self, callbacks: Sequence[Any], moment: str) -> list[Any]:
        """Returns the callbacks of a list that a moment calls now: the user's callbacks once,
        others always.

        Args:
            callbacks: the list.
            moment: name of the moment.
        """
        users = {id(one) for one in self._callbacks}
        left = [
            one
            for one in callbacks
            if id(one) not in users or (id(one), moment) not in self._called_moments
        ]
        self._called_moments |= {(id(one), moment) for one in left if id(one) in users}
        return left
