# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Callbacks of users during the training of a model.

A callback is a `Callback`, any object with some of its methods, or a function, which is called at
the end of epochs. All are called on every rank, with the same `TrainingState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_CALLBACK_METHODS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_batch_end",
    "on_epoch_end",
    "on_train_end",
)


@dataclass
class TrainingState:
    """The state of a run that callbacks can read and change.

    Attributes:
        model: the module, on its device.
        optimizer: the distributed optimizer; its learning rates are multiplied by `size`.
        rank: rank of this process.
        size: processes.
        epoch: the running epoch, from 0.
        epochs: number of epochs of the training.
        step: batches of the epoch so far.
        loss: mean loss of this process in the epoch so far, at the end of batches.
        history: entries of complete epochs; at the end of an epoch the last is its own.
        stopping: whether the run ends after this epoch; true anywhere means true everywhere.
    """

    model: torch.nn.Module
    optimizer: Any
    rank: int
    size: int
    epochs: int
    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False

    def stop(self) -> None:
        """Ends the run after this epoch."""
        self.stopping = True


class Callback:
    """Base class for objects that are called while a model trains; each method does nothing
    unless overridden.
    """

    def on_train_begin(self, state: TrainingState) -> None:
        """Runs before the first epoch, also in a resumed run."""

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Runs before an epoch's first batch."""

    def on_batch_end(self, state: TrainingState) -> None:
        """Runs after a batch."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """Runs after an epoch and its validation, before its checkpoint."""

    def on_train_end(self, state: TrainingState) -> None:
        """Runs after the last epoch."""


class CallbackGroup:
    """The callbacks of one run, by the moment at which they are called.

    Args:
        callbacks: the user's callbacks.
        state: argument of the callbacks.
    """

    def __init__(self, callbacks: Sequence[Any], state: TrainingState) -> None:
        self.state = state
        self._functions_by_method = {
            moment: _callbacks_of_method(callbacks, moment) for moment in _CALLBACK_METHODS
        }

    def __bool__(self) -> bool:
        """Returns whether there are any."""
        return any(self._functions_by_method.values())

    def has_callbacks(self, moment: str) -> bool:
        """Returns whether any is called at that moment."""
        return bool(self._functions_by_method[moment])

    def call_callbacks(self, moment: str) -> None:
        """Calls the callbacks of a moment.

        Args:
            moment: name of the method.
        """
        for function in self._functions_by_method[moment]:
            function(self.state)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that would never be called.

    Args:
        callbacks: as users gave them.

    Raises:
        TypeError: naming the object.
    """
    for callback in callbacks:
        if not callable(callback) and not any(
            hasattr(callback, moment) for moment in _CALLBACK_METHODS
        ):
            raise TypeError(
                f"a callback must be a function or have one of the methods "
                f"{', '.join(_CALLBACK_METHODS)}: "
                f"{callback!r}"
            )


def _callbacks_of_method(callbacks: Sequence[Any], moment: str) -> list[Any]:
    found: list[Any] = []
    for callback in callbacks:
        method = getattr(callback, moment, None)
        overridden = method is not None and getattr(type(callback), moment, None) is not getattr(
            Callback, moment
        )
        if overridden:
            found.append(method)
        elif (
            moment == "on_epoch_end"
            and callable(callback)
            and not any(hasattr(callback, name) for name in _CALLBACK_METHODS)
        ):
            found.append(callback)
    return found
