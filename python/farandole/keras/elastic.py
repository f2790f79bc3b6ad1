# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic training with Keras: a model's state that survives a failed world, and callbacks that
keep it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from farandole._keras.elastic import (
    CommitStateCallback,
    KerasState,
    TensorFlowKerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from farandole.common.elastic import leave, leave_and_join, run_fn
from farandole.common.exceptions import FarandoleInternalError

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "leave",
    "run",
]


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a training function: after a failure the state goes back to the last commit, in a new
    world.

    Args:
        func: The training function; takes a `KerasState` first, returns when training is done.

    Returns:
        A function of the same arguments and result.
    """
    if keras.backend.backend() == "tensorflow":
        from farandole.tensorflow import elastic  # noqa: PLC0415 - the backend

        return elastic.run(func)
    if keras.backend.backend() == "jax":
        func = _translate_jax_errors(func)
    return run_fn(func, leave_and_join)


def _translate_jax_errors(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Raises failures in compiled steps with their own types, which JAX replaces by its own
    errors.
    """
    import jax  # noqa: PLC0415 - the backend

    @functools.wraps(func)
    def run_translating_errors(*args: Any, **kwargs: Any) -> _Result:
        try:
            return func(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            _, separator, message = str(error).rpartition("FarandoleInternalError: ")
            if not separator:
                raise
            raise FarandoleInternalError(message.splitlines()[0]) from error

    return run_translating_errors
