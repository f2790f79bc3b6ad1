# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras optimizers whose gradients are those of all ranks.

Reduction happens where Keras clips: after gradient accumulation, before clipping and weight decay, once for every
update. A `LossScaleOptimizer` around a distributed one asks all ranks whether gradients are finite, so that all of them
take a step or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from farandole._keras import patches
from farandole.common.util import Average, Sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._keras.reducer import Reducer


class Distribution:
    """What makes an optimizer distributed.

    Args:
        reducer: Reduces gradients.
        factor: Multiplies accumulated gradients, which Keras has averaged.
    """

    def __init__(self, reducer: Reducer, factor: float) -> None:
        self.reducer = reducer
        self.factor = factor
        self.variables: list[Any] = []


class _Distributed:
    """Mixed in before an optimizer's own class."""

    _farandole: Distribution

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable's gradients to this rank."""
        self._farandole.reducer.register_local(var)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._farandole.variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        return super()._clip_gradients(self._reduced(list(grads)))  # type: ignore[misc]

    def _reduced(self, grads: list[Any]) -> list[Any]:
        distribution, steps = self._farandole, self.gradient_accumulation_steps  # type: ignore[attr-defined]
        reducer, variables = distribution.reducer, distribution.variables

        def reduce(grads: list[Any]) -> list[Any]:
            if distribution.factor != 1.0:
                grads = [grad if grad is None else grad * distribution.factor for grad in grads]
            return reducer(grads, variables)

        if not steps or keras.backend.backend() != "jax":
            return reduce(grads)
        # On JAX Keras computes every update and keeps the due ones: only those may be sent.
        from jax import lax  # noqa: PLC0415 - the backend

        is_due = (self._iterations + 1) % steps == 0  # type: ignore[attr-defined]
        return lax.cond(is_due, reduce, list, grads)


def is_optimizer(value: Any) -> bool:
    """Whether this is an optimizer of Keras's."""
    return isinstance(value, keras.optimizers.Optimizer)


def is_distributed(value: Any) -> bool:
    """Whether this optimizer, or the one in it, reduces over all ranks."""
    return isinstance(value, _Distributed) or isinstance(getattr(value, "inner_optimizer", None), _Distributed)


def distribute(
    optimizer: Any,
    *,
    name: str | None,
    make_reducer: Callable[[], Reducer],
    op: int,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """A distributed optimizer with the state of the given one, which is not to be used any more.

    Args:
        optimizer: Keras's.
        name: Its new name, if any.
        make_reducer: Makes what reduces gradients.
        op: The reduction.
        backward_passes_per_step: Gradients of this many steps are accumulated, by Keras, and applied once.
        average_aggregated_gradients: Whether they are averaged rather than summed.

    Returns:
        An instance of a subclass of the same name and module, so that saved models load without Farandole.

    Raises:
        ValueError: When arguments do not fit together, or it is distributed already.
    """
    if op not in (Average, Sum):
        raise ValueError(f"Keras optimizers reduce by Average or Sum: {op}")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {backward_passes_per_step}")
    if is_distributed(optimizer):
        raise ValueError("the optimizer is distributed already")
    patches.install()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _with_inner(optimizer, name, make_reducer, op, backward_passes_per_step, average_aggregated_gradients)
    kind = type(optimizer)
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # Made anew without __init__ and given the old one's state: variables, slots and schedules stay what they are.
    new = object.__new__(type(kind.__name__, (_Distributed, kind), members))
    new.__dict__.update(optimizer.__dict__)
    factor = 1.0
    if backward_passes_per_step > 1:
        if new.gradient_accumulation_steps:
            raise ValueError("give either backward_passes_per_step or gradient_accumulation_steps, not both")
        if new.built:
            raise ValueError("backward_passes_per_step > 1 needs an optimizer that has not been built")
        new.gradient_accumulation_steps = backward_passes_per_step
        factor = 1.0 if average_aggregated_gradients else float(backward_passes_per_step)
    if name is not None:
        new.name = name
    new.__dict__["_farandole"] = Distribution(make_reducer(), factor)
    return new


def _with_inner(
    optimizer: Any, name: str | None, make_reducer: Callable[[], Reducer], op: int, passes: int, average: bool
) -> Any:
    inner = distribute(
        optimizer.inner_optimizer,
        name=None,
        make_reducer=make_reducer,
        op=op,
        backward_passes_per_step=passes,
        average_aggregated_gradients=average,
    )
    new = object.__new__(type(optimizer))
    new.__dict__.update(optimizer.__dict__)
    new.__dict__["inner_optimizer"] = inner
    if name is not None:
        new.name = name
    return new
