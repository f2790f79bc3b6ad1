# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with Keras: a model's state that survives a failed world, and callbacks that
keep it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import farandole.numpy as arrays
from farandole._keras.callbacks import write_jax_state_to_model
from farandole._keras.value_collectives import broadcast_variables, to_numpy_array
from farandole.common import basics
from farandole.common.elastic import ObjectState


class KerasState(ObjectState):
    """State of a model, its optimizer and anything else: each further keyword becomes an attribute.

    Args:
        model: Built, so that there is something to keep.
        optimizer: The model's own by default.
        **kwargs: Further attributes and their first values, `epoch` and `batch` for the callbacks
            here.

    Raises:
        ValueError: When the model has not been built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "the model must be built before its state can be kept: call "
                "model.build(input_shape)"
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._variable_snapshots: list[tuple[Any, Any]] = []
        super().__init__(arrays.broadcast_object, basics.rank, **kwargs)
        self._snapshot_variables()

    def _shared_variables(self) -> list[Any]:
        write_jax_state_to_model(self.model)
        return [*self.model.weights, *([] if self.optimizer is None else self.optimizer.variables)]

    def _snapshot_variables(self) -> None:
        # Local variables, such as the states of random layers, are saved too: on JAX a failed step
        # loses their values.
        mine = self._shared_variables()
        known = {id(variable) for variable in mine}
        mine += [
            variable for variable in self.model.non_trainable_variables if id(variable) not in known
        ]
        self._variable_snapshots = [
            (variable, np.array(to_numpy_array(variable))) for variable in mine
        ]

    def save(self) -> None:
        """Keeps copies of all variables, and the attributes."""
        self._snapshot_variables()
        super().save()

    def restore(self) -> None:
        """Restores the last saved state."""
        write_jax_state_to_model(self.model)
        for variable, value in self._variable_snapshots:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Spreads rank 0's variables and attributes, and keeps them."""
        broadcast_variables(self._shared_variables(), root_rank=0)
        self._snapshot_variables()
        super().sync()

    def _last_saved_arrays(self) -> list[Any]:
        return [value for _, value in self._variable_snapshots]

    def _apply_arrays(self, arrays: list[Any]) -> None:
        write_jax_state_to_model(self.model)
        for (variable, known), value in zip(self._variable_snapshots, arrays, strict=True):
            variable.assign(value.view(known.dtype))


class TensorFlowKerasState(KerasState):
    """`KerasState` under the name and with the arguments that it has in Horovod's TensorFlow
    module.

    Args:
        model: As there.
        optimizer: As there.
        backend: Not used: Keras knows its own.
        **kwargs: As there.

    Raises:
        ValueError: When the model has not been built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every `batches_per_commit` batches, and at the end of every epoch.

    Args:
        state: The state to commit.
        batches_per_commit: Batches from one commit to the next; a commit copies the model and
            communicates with all ranks.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts again."""
        del logs
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits when due."""
        del batch, logs
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits."""
        del epoch, logs
        self.commit()

    def commit(self) -> None:
        """Commits the state, and counts batches again."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch` at the batch that has been done, 0 between epochs.

    Callbacks see fewer steps in a continued epoch, although Keras 3 runs all of its batches.

    Args:
        state: Has an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._steps_per_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remembers how long a whole epoch is."""
        del logs
        self._steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the number of remaining steps of the epoch, which other callbacks read."""
        del epoch, logs
        if self.params is None or self.params.get("steps") is None:
            return
        if self._steps_per_epoch is None:
            self._steps_per_epoch = self.params["steps"]
        self.params["steps"] = self._steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes note."""
        del logs
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins again."""
        del epoch, logs
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch` at the number of epochs that have been done, over all calls of `fit`.

    Args:
        state: Has an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts from where the state is."""
        del logs
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes note."""
        del logs
        self.state.epoch = self.initial_epoch + epoch + 1
