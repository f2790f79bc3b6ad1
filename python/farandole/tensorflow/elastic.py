# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with TensorFlow: variables that survive a failed world, and a loop that
continues in the next one.

Example:
    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0))
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from farandole.common import basics
from farandole.common.elastic import (
    HostUpdateResult,
    ObjectState,
    State,
    leave,
    leave_and_join,
    run_fn,
)
from farandole.common.exceptions import FarandoleInternalError
from farandole.tensorflow.functions import broadcast_object, broadcast_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole._keras.elastic import KerasState as TensorFlowKerasState

_Result = TypeVar("_Result")

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "leave",
    "run",
]


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function: after a failure the state goes back to the last commit, in a new
    world.

    TensorFlow errors that one of our ops raised because a peer failed count as failures. All others
    are raised.

    Args:
        func: The training function; takes a `State` first, returns when training is done.

    Returns:
        A function of the same arguments and result.
    """

    @functools.wraps(func)
    def run_translating_errors(*args: Any, **kwargs: Any) -> _Result:
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            # In functions that XLA compiled, all failures have the same error code.
            compiled = "FarandoleInternalError: " in error.message
            if compiled or (
                isinstance(error, tf.errors.UnknownError) and "Farandole" in error.message
            ):
                raise FarandoleInternalError(error.message) from error
            raise

    return run_fn(run_translating_errors, leave_and_join)


class TensorFlowState(ObjectState):
    """State of variables and anything else: each further keyword becomes an attribute.

    Args:
        variables: All global ones in a graph of `tf.compat.v1`, by default.
        session: The session they live in; needed in such a graph.
        **kwargs: Further attributes and their first values.

    Raises:
        ValueError: In eager mode without variables.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if variables is None:
            if tf.executing_eagerly():
                raise ValueError("there are no global variables in eager mode: pass variables")
            variables = tf.compat.v1.global_variables()
        self.variables: list[Any] = list(variables or [])
        self.session = session
        self._variable_snapshots: list[Any] = []
        self._broadcast_op: Any = None
        super().__init__(broadcast_object, basics.rank, **kwargs)
        self._snapshot_variables()

    def _snapshot_variables(self) -> None:
        if self.session is None:
            self._variable_snapshots = [tf.identity(variable) for variable in self.variables]
        else:
            self._variable_snapshots = self.session.run(self.variables)

    def save(self) -> None:
        """Keeps copies of the variables, and the attributes."""
        self._snapshot_variables()
        super().save()

    def restore(self) -> None:
        """Restores the last saved state."""
        self._restore_variables()
        super().restore()

    def _restore_variables(self) -> None:
        for variable, value in zip(self.variables, self._variable_snapshots, strict=True):
            if self.session is None:
                variable.assign(value)
            else:
                variable.load(value, self.session)

    def sync(self) -> None:
        """Spreads rank 0's variables and attributes, and keeps them."""
        if self.session is None:
            broadcast_variables(self.variables, root_rank=0)
        else:
            with self.session.graph.as_default():
                self._broadcast_op = self._broadcast_op or broadcast_variables(
                    self.variables, root_rank=0
                )
            self.session.run(self._broadcast_op)
        self._snapshot_variables()
        super().sync()

    def _last_saved_arrays(self) -> list[Any]:
        return [
            value.numpy() if isinstance(value, tf.Tensor) else value
            for value in self._variable_snapshots
        ]

    def _apply_arrays(self, arrays: list[Any]) -> None:
        self._variable_snapshots = [
            value.view(variable.dtype.base_dtype.as_numpy_dtype)
            for variable, value in zip(self.variables, arrays, strict=True)
        ]
        self._restore_variables()


def __getattr__(name: str) -> Any:
    """Loads Keras for the state that needs it."""
    if name == "TensorFlowKerasState":
        from farandole._keras.elastic import TensorFlowKerasState  # noqa: PLC0415 - Keras may run on another backend

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
