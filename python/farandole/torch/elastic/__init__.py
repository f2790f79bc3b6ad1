# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with torch: state that survives a failed world, and a loop that continues in the
next one.

Example:
    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from farandole.common.basics import init, shutdown
from farandole.common.elastic import (
    HostUpdateResult,
    ObjectState,
    State,
    leave,
    leave_and_join,
    run_fn,
)
from farandole.torch.ddp_errors import restore_error_types
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state import TorchState

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

__all__ = [
    "ElasticSampler",
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "leave",
    "run",
    "shutdown",
]


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function: after a failure the state goes back to the last commit, in a new
    world.

    The first argument of the function is a `State`, which is broadcast from rank 0 before every
    call. A `FarandoleInternalError` restores the last commit; a `HostsUpdatedInterrupt` keeps the
    state as it is. In a world that does not change, the ranks meet again and continue. If a world
    fails several times in a row, the error is raised.

    Args:
        func: The training function; returns when training is done.

    Returns:
        A function of the same arguments and result.
    """
    return run_fn(restore_error_types(func), leave_and_join)
