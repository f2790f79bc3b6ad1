# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations on existing arrays, and on arrays that jit will compute.

Outside a transformation, an operation runs at once, on NumPy's view of the arrays. Under `jax.jit`
it becomes a host callback. Callbacks are ordered, because otherwise XLA could run two of them in
different orders on different ranks, which would then wait for each other. For the same reason,
unnamed operations in callbacks have their own numbers: jit runs them while the main thread
continues, so the two sequences mix differently on every rank.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback

from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_numbers = itertools.count()


def _reset_operation_numbers() -> None:
    global _numbers  # noqa: PLW0603 - as the world, there is one per process
    _numbers = itertools.count()


basics.call_on_each_init(_reset_operation_numbers)


def is_traced(values: Sequence[Any]) -> bool:
    """Returns whether some value has not been computed yet."""
    return any(isinstance(value, Tracer) for value in values)


def run_now_or_in_jit(
    operation: Callable[[list[Any], str | None], Sequence[Any]],
    values: Sequence[Any],
    results: Callable[[], Sequence[jax.ShapeDtypeStruct]],
    name: str | None,
) -> list[jax.Array]:
    """Runs an operation on arrays, now or when jit has computed them.

    Args:
        operation: Takes NumPy arrays and the operation's name, returns NumPy arrays.
        values: Arguments of the operation.
        results: Returns the shapes and dtypes of the results; only called under jit.
        name: The operation's name, if it has one.
    """
    if not is_traced(values):
        return [
            jax.numpy.asarray(result)
            for result in operation([np.asarray(value) for value in values], name)
        ]
    expected = list(results())

    def run_on_host(*arrays: Any) -> list[np.ndarray[Any, Any]]:
        numbered = name if name is not None else f"jit.{next(_numbers)}"
        return list(operation([np.asarray(array) for array in arrays], numbered))

    return list(io_callback(run_on_host, expected, *values, ordered=True))


def shape_dtype_of(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a value."""
    return jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.result_type(value))
