# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data-parallel training: broadcast of parameters, and gradients averaged over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import farandole.numpy as plain
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average
from farandole.jax._operations import grouped_allreduce

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the parameters of one rank on all ranks, so that all ranks start from the same model.

    Args:
        params: Any pytree of arrays; equal structure, shapes and dtypes on all ranks. Not under
            jit.
        root_rank: The global rank whose values count.
        name: Names the operations across ranks.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: When an argument is wrong, or ranks disagree.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    leaves, structure = jax.tree.flatten(params)
    name = "parameters" if name is None else name
    handles = [
        plain.broadcast_async(np.asarray(leaf), root_rank, f"{name}.{i}", process_set)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(
        structure, [jnp.asarray(plain.synchronize(handle)) for handle in handles]
    )


def allreduce_gradients(
    grads: Any,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines a tree of gradients over all ranks as one unit; works under jit.

    Args:
        grads: Any pytree of arrays; equal on all ranks in structure, shapes and dtypes.
        op: `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        name: Names the operation across ranks.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A tree of the same structure.
    """
    leaves, structure = jax.tree.flatten(grads)
    if not leaves:
        return grads
    return jax.tree.unflatten(
        structure, grouped_allreduce(leaves, None, name, op, process_set=process_set)
    )


def distributed_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, with gradients combined over all ranks; the value is
    this rank's.

    Args:
        fun: The loss.
        argnums: The arguments to differentiate by.
        has_aux: Whether `fun` returns something besides the loss.
        op: Operation that combines the gradients.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A function that can be compiled by `jax.jit`.
    """
    differentiate = jax.value_and_grad(fun, argnums, has_aux)

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, grads = differentiate(*args, **kwargs)
        return value, allreduce_gradients(grads, op, process_set=process_set)

    return value_and_grad


class GradientTransformation(NamedTuple):
    """A pair of functions as optax has it, so that it fits into `optax.chain`."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, op: int = Average, process_set: ProcessSet = global_process_set
) -> GradientTransformation:
    """Wraps an optax optimizer, or any pair of `init` and `update`, so that it gets the gradients
    of all ranks.

    Args:
        optimizer: Has `init(params)` and `update(grads, state, params=None)`.
        op: Operation that combines the gradients.
        process_set: The ranks that take part; this one must be a member.

    Returns:
        A pair of the same kind; its state is the wrapped optimizer's.
    """

    def update_with_reduced_gradients(
        grads: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        return optimizer.update(
            allreduce_gradients(grads, op, process_set=process_set), state, params, **extra
        )

    return GradientTransformation(optimizer.init, update_with_reduced_gradients)
