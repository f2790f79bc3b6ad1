# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Local SGD in Keras: each process steps on its own gradients, and weights are averaged every
`sync_every` steps, before each validation and at the end of each epoch.

Keras calls this callback after each step on every backend, so the averages are at the same step on
all processes.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import farandole.numpy as arrays
from farandole._keras.callbacks import write_jax_state_to_model
from farandole._keras.value_collectives import broadcast_variables, to_numpy_array
from farandole.common import basics


class AverageWeightsCallback(keras.callbacks.Callback):
    """A callback that averages the weights of all processes; the first callback of all.

    Args:
        sync_every: steps of a process between two averages.
    """

    def __init__(self, sync_every: int) -> None:
        super().__init__()
        self._sync_every = sync_every
        self._own_steps = 0
        self._has_own_optimizer_state = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a step."""
        del batch, logs
        self._own_steps += 1
        self._has_own_optimizer_state = True
        if self._own_steps == self._sync_every:
            self._average_weights()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Averages before a validation."""
        del logs
        self._synchronize()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages at the end of an epoch without validation."""
        del epoch, logs
        self._synchronize()

    def _synchronize(self) -> None:
        """Averages weights. The state of the optimizer becomes the one of rank 0, which is in
        checkpoints, so that a resumed run equals an uninterrupted one.
        """
        if not self._has_own_optimizer_state:
            return
        if self._own_steps:
            self._average_weights()
        model: Any = self.model
        write_jax_state_to_model(model)
        broadcast_variables(model.optimizer.variables, 0)
        self._has_own_optimizer_state = False

    def _average_weights(self) -> None:
        self._own_steps = 0
        model: Any = self.model
        if basics.size() == 1:
            return
        write_jax_state_to_model(model)
        by_type: dict[str, list[tuple[Any, Any]]] = {}
        for variable in model.trainable_variables:
            value = to_numpy_array(variable)
            by_type.setdefault(str(value.dtype), []).append((variable, value))
        for name, pairs in by_type.items():
            flat = np.concatenate([value.reshape(-1) for _, value in pairs])
            mean = arrays.allreduce(flat, name=f"farandole.keras.local.{name}")
            start = 0
            for variable, value in pairs:
                part = mean[start : start + value.size]
                variable.assign(part.reshape(value.shape).astype(value.dtype))
                start += value.size
