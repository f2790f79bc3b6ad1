# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Broadcast of variables and objects from one rank to all.

Objects are sent with cloudpickle over links that the job's key secures. They need no graph and no
session; these arguments exist for compatibility with Horovod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

import farandole.numpy as arrays
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.tensorflow.mpi_ops import broadcast_assign_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrites variables with one rank's values, so that all ranks start from the same model.

    Args:
        variables: TensorFlow's, Keras's or `tf.compat.v1`'s.
        root_rank: The rank whose values count.
        process_set: The ranks that take part.
        inplace: Accepted for compatibility with Horovod: variables are always read, sent and
            assigned.

    Returns:
        In a graph of `tf.compat.v1`, the op to run; elsewhere nothing.
    """
    del inplace
    done = tf.group(*broadcast_assign_ops(list(variables), root_rank, None, process_set))
    return None if tf.compat.v1.executing_eagerly_outside_functions() else done


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank.

    Args:
        obj: Value to send; ignored on other ranks.
        root_rank: The rank that sends.
        session: Not needed.
        name: Names the operation across ranks.
        process_set: The ranks that take part.

    Returns:
        `obj` itself on the root, a copy elsewhere.

    Raises:
        ValueError: When an argument is wrong.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    del session
    return arrays.broadcast_object(obj, root_rank, name, process_set=process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function that returns the root's object on every rank; see `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks, in the order of ranks.

    Args:
        obj: This rank's object.
        session: Not needed.
        name: Names the operation across ranks.
        process_set: The ranks that take part.

    Returns:
        One object per rank; this rank's own is a copy too.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    del session
    return arrays.allgather_object(obj, name, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns an op that overwrites all global variables of the default `tf.compat.v1` graph with
    the values of one rank.

    Raises:
        RuntimeError: When executing eagerly, where there are none: use `broadcast_variables`.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "there are no global variables in eager mode: use "
            "broadcast_variables(model.variables, ...)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Overwrites all global variables with one rank's values when a monitored session has begun.

    Args:
        root_rank: The rank whose values count.
        device: Device of the op.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the op to the graph before the graph is finalized."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        del coord
        session.run(self.bcast_op)
