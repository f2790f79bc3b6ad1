# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a Keras run, and how it continues in another world of an elastic job.

After a world fails, the remaining processes go back to the last commit: weights, optimizer, metrics
and position in the data belong to one step. The rest of that epoch is a separate `fit`, which
callbacks do not notice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import keras

from farandole.keras import elastic
from farandole.spark.common.data.source import Place
from farandole.spark.keras.training.scores import put_metrics, summed_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.spark.keras.training.feed import Feed, ModuleFeed
    from farandole.spark.keras.training.publish import Publisher

EVERY = 10
"""Steps from one commit to the next; commits are also made at the ends of epochs."""


@dataclass(frozen=True)
class Reached:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh one, or that of a checkpoint.
        epoch: that is in progress.
        place: in its data.
        metrics: sums of its training, if it is in progress.
        note: what a checkpoint says of the epochs before.
        best: the model that the user's callback has kept, a file.
        size: of the world whose learning rate the optimizer has.
        stopped: whether a callback has ended the training.
    """

    begun: bool = False
    epoch: int = 0
    place: Place = field(default_factory=Place)
    metrics: Any = None
    note: dict[str, Any] = field(default_factory=dict)
    best: bytes | None = None
    size: int = 1
    stopped: bool = False


class Course:
    """Takes a run through the worlds of an elastic job.

    Args:
        model: compiled and built, with a distributed optimizer.
    """

    def __init__(self, model: Any) -> None:
        self.reached = Reached()
        self._state: Any = elastic.KerasState(model, reached=self.reached)

    def through(self, train: Callable[[], None]) -> None:
        """Calls a function that trains from the last commit to the end, in each world until one has
        finished.

        Args:
            train: the function; it begins with a collective look at the progress so far.
        """

        def go_on(state: Any) -> None:
            self.reached = state.reached
            train()

        elastic.run(go_on)(self._state)

    def reaches(self, **changes: Any) -> None:
        """Notes how far the run has come, and commits to it; a collective call.

        Args:
            **changes: of `Reached`.
        """
        self.reached = self._state.reached = replace(self.reached, **changes)
        self._state.commit()


class Commits(keras.callbacks.Callback):
    """Commits every so many steps, and when an epoch is over; the last callback on all ranks.

    Args:
        course: of the run.
        feed: of its training.
        publisher: of its history.
    """

    def __init__(self, course: Course, feed: Feed | ModuleFeed, publisher: Publisher) -> None:
        super().__init__()
        self._course = course
        self._feed = feed
        self._publisher = publisher
        self._epoch = self._committed = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Lets the metrics of a continued epoch continue, too."""
        del logs
        reached = self._course.reached
        self._epoch, self._committed = epoch, reached.place.steps
        if reached.metrics is not None and epoch == reached.epoch:
            put_metrics(self.model, reached.metrics, once=True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits where it is time; not after the last step, whose epoch is not over before its
        validation is.
        """
        del logs
        steps = batch + 1
        if (
            not self._feed.keeps_place
            or steps - self._committed < EVERY
            or steps >= self._feed.steps
        ):
            return
        self._committed = steps
        metrics = summed_metrics(self.model, "commit", counts=True)
        self._course.reaches(
            epoch=self._epoch, place=self._feed.place_after(self._epoch, steps), metrics=metrics
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        del logs
        kept = self._publisher.kept
        best = kept.path.read_bytes() if kept is not None and kept.path.exists() else None
        note = copy.deepcopy(self._publisher.note())
        model: Any = self.model
        stopped = bool(model.stop_training)
        self._course.reaches(
            epoch=epoch + 1, place=Place(), metrics=None, note=note, best=best, stopped=stopped
        )


class Moments(keras.callbacks.CallbackList):
    """Keras's list of callbacks for one of several parts of a training, which look like one to the
    user's.

    Args:
        callbacks: all of them, in order.
        users: callbacks that are called once for each moment; the moments are kept in it.
        offset: steps of the part's epoch that are done; of a part of several epochs 0.
        last: the epoch that training ends before.
        **more: as for Keras's own.
    """

    def __init__(
        self, callbacks: Sequence[Any], users: Told, offset: int, last: int, **more: Any
    ) -> None:
        self._users = users
        self._offset = offset
        self._last = last
        self._epoch = 0
        super().__init__(list(callbacks), add_history=True, **more)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Tells those that were not told."""
        every, self.callbacks = self.callbacks, self._users.untold(self.callbacks, "begin")
        super().on_train_begin(logs)
        self.callbacks = every

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Tells all, when training ends, too."""
        every = self.callbacks
        model: Any = self.model
        self.callbacks = every if self._epoch + 1 >= self._last or model.stop_training else []
        super().on_train_end(logs)
        self.callbacks = every

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tells those that were not told."""
        self._epoch = epoch
        every, self.callbacks = self.callbacks, self._users.untold(self.callbacks, f"epoch {epoch}")
        super().on_epoch_begin(epoch, logs)
        self.callbacks = every

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Tells the number of the step in its epoch."""
        super().on_train_batch_begin(batch + self._offset, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Like `on_train_batch_begin`."""
        super().on_train_batch_end(batch + self._offset, logs)


class Told:
    """Remembers which of the user's callbacks have been called for events that occur only once.

    Args:
        callbacks: the user's.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._moments: set[tuple[int, str]] = set()

    def untold(self, callbacks: Sequence[Any], moment: str) -> list[Any]:
        """Returns the callbacks of a list that a moment calls now: the user's callbacks once,
        others always.

        Args:
            callbacks: the list.
            moment: its name.
        """
        users = {id(one) for one in self._callbacks}
        left = [
            one
            for one in callbacks
            if id(one) not in users or (id(one), moment) not in self._moments
        ]
        self._moments |= {(id(one), moment) for one in left if id(one) in users}
        return left
