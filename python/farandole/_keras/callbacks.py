# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Callbacks for `model.fit` on several ranks; public as `hvd.callbacks`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import farandole.numpy as arrays
from farandole._keras.optimizer import rank_local_variables
from farandole._keras.value_collectives import broadcast_variables, to_numpy_array
from farandole.common import basics
from farandole.numpy.plain_value_exchange import allgather_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def write_jax_state_to_model(model: Any) -> None:
    """Puts a running fit's state into the model's variables: on JAX it is kept apart."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Overwrites the model's and the optimizer's variables once with one rank's values, so that all
    ranks start alike.

    If all ranks have built the model, the broadcast is at the begin of training; else at the end of
    the first batch, whose step the ranks have then taken from different weights.

    Args:
        root_rank: The rank whose values count.
        device: Accepted for compatibility with Horovod.
        local_variables: Variables that belong to each rank, in addition to those given to the
            optimizer's `register_local_var`; Horovod's scripts register them with the callback.
            The optimizer's slots for these variables stay local, too.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local_variable_ids: set[int] = set()
        for variable in local_variables or []:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable to each rank."""
        self._local_variable_ids.add(id(var))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts if there is something to, on all ranks."""
        del logs
        model: Any = self.model
        if self.broadcast_done or not _is_true_on_all_ranks(bool(model.built)):
            return
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._broadcast_variables()

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts if that has not been."""
        del batch, logs
        if not self.broadcast_done:
            write_jax_state_to_model(self.model)
            self._broadcast_variables()

    def _broadcast_variables(self) -> None:
        model: Any = self.model
        optimizer = getattr(model, "optimizer", None)
        variables, local = list(model.weights), self._local_variable_ids
        if optimizer is not None:
            variables += optimizer.variables
            local = rank_local_variables(optimizer, local)
        broadcast_variables(
            [entry for entry in variables if id(entry) not in local], self.root_rank
        )
        self.broadcast_done = True


def _is_true_on_all_ranks(flag: bool) -> bool:
    mine = np.array([int(flag)], np.int32)
    return bool(arrays.allreduce(mine, op=arrays.Min, name="keras.built")[0])


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages metrics over all ranks at the end of every epoch, in place; list it before those
    that read them.

    Args:
        device: Accepted for compatibility with Horovod.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the numbers that `logs` holds; all ranks must have the same metrics."""
        del epoch
        logs = {} if logs is None else logs
        names = sorted(name for name, value in logs.items() if _is_number(value))
        for rank, theirs in enumerate(allgather_plain(names, name="keras.metrics.names")):
            if theirs != names:
                raise ValueError(
                    f"ranks have different metrics; rank {rank} has {theirs}, this one: {names}"
                )
        if not names:
            return
        mine = np.array([float(to_numpy_array(logs[name])) for name in names], np.float64)
        average = arrays.allreduce(mine, name="keras.metrics")
        logs.update(zip(names, average.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    array = to_numpy_array(value)
    return array.ndim == 0 and array.dtype.kind in "biuf"


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies a learning rate by a factor that depends on the epoch.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch, a fraction unless `staircase`; or a number m, for m to
            the power of the epochs since `start_epoch`.
        start_epoch: The first epoch in which the callback acts.
        end_epoch: The first in which it no longer does.
        staircase: Whether the rate changes once an epoch rather than with every batch.
        momentum_correction: Whether the momentum an optimizer has gathered is scaled along when the
            rate changes.
        steps_per_epoch: Batches in an epoch, if Keras does not know.

    Raises:
        ValueError: Without an initial rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.staircase = staircase
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.staircase = True
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Learns how many batches an epoch has.

        Raises:
            ValueError: The number is unknown and it matters.
        """
        del logs
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "steps_per_epoch is needed: Keras does not know how many batches an epoch has"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the epoch."""
        del logs
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate."""
        del logs
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._adjust_learning_rate(self.current_epoch)
        elif not self.staircase:
            self._adjust_learning_rate(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the rate among the metrics."""
        del epoch
        if logs is not None:
            logs["lr"] = self._current_learning_rate()

    def _current_learning_rate(self) -> float:
        model: Any = self.model
        write_jax_state_to_model(model)
        return float(to_numpy_array(model.optimizer.learning_rate))

    def _adjust_learning_rate(self, epoch: float) -> None:
        old, new = self._current_learning_rate(), self.initial_lr * self.multiplier(epoch)
        if math.isclose(old, new, rel_tol=1e-9):
            return
        model: Any = self.model
        optimizer = model.optimizer
        optimizer.learning_rate = new
        # A velocity has the rates of past steps in it. Scaling it once is what multiplying the
        # momentum for one batch is, and works in compiled steps, too.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if (
            self.momentum_correction
            and old > 0
            and isinstance(getattr(inner, "momentum", None), float)
        ):
            for velocity in (
                getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
            ):
                if velocity is not None:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Goes from about `initial_lr / size` to `initial_lr` over some epochs, batch by batch.

    Args:
        initial_lr: The rate for all ranks together, where the warm-up ends.
        warmup_epochs: Number of epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: As there.
        verbose: Whether rank 0 says when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def warmup_multiplier(epoch: float) -> float:
            return 1.0 / basics.size() * (epoch * (basics.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            warmup_multiplier,
            start_epoch=0,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _adjust_learning_rate(self, epoch: float) -> None:
        # The function of epochs gets all values of this object as arguments, because copies have
        # their own steps.
        super()._adjust_learning_rate(
            min(epoch + 1.0 / (self.steps_per_epoch or 1), self.warmup_epochs)
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Does the same as the base class, and prints a message at the end."""
        super().on_epoch_end(epoch, logs)
        if (
            self.end_epoch is not None
            and epoch == self.end_epoch - 1
            and self.verbose > 0
            and basics.rank() == 0
        ):
            rate = self._current_learning_rate()
            print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate}.")  # noqa: T201


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model, at a path that the Spark estimator sets.

    Args:
        monitor: The metric.
        verbose: As in Keras.
        save_weights_only: Whether only weights are kept.
        mode: As in Keras.
        save_freq: As in Keras.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        # Keras checks the file's ending here; the estimator sets the path later.
        placeholder = "best.weights.h5" if save_weights_only else "best.keras"
        options: dict[str, Any] = {"save_freq": save_freq}
        super().__init__(
            filepath=placeholder,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            **options,
        )
        self.filepath: Any = None
