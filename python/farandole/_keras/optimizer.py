# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras optimizers that reduce gradients over all ranks.

Gradients are reduced once for every update, after gradient accumulation and before clipping and
weight decay. A `LossScaleOptimizer` around a distributed optimizer asks all ranks whether gradients
are finite, so either all of them take a step or none.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from farandole._keras import patches
from farandole._keras.optimizer_slots import slots_with_owners
from farandole._keras.reducer import make_reducer
from farandole.common.util import Average, Sum

if TYPE_CHECKING:
    from farandole._keras.reducer import OptimizerReducer
    from farandole._keras.settings import GradientReductionSettings


class DistributedOptimizerState:
    """Makes an optimizer distributed.

    Args:
        settings: The caller's settings.
    """

    def __init__(self, settings: GradientReductionSettings) -> None:
        self.settings = settings
        self.reducer: OptimizerReducer = make_reducer(settings)
        self.variables: list[Any] = []

    @property
    def accumulated_gradient_scale(self) -> float:
        """Multiplies accumulated gradients, which Keras has averaged."""
        passes = self.settings.backward_passes_per_step
        return 1.0 if self.settings.average_aggregated_gradients else float(passes)


class _DistributedOptimizerMixin:
    """Mixed in before an optimizer's own class."""

    _farandole: DistributedOptimizerState
    _farandole_settings: GradientReductionSettings
    _farandole_kind: Any

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self._farandole.reducer.register_local(var)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a new distributed optimizer of the same settings."""
        return _distribute_plain_optimizer(
            cls._farandole_kind.from_config(*args, **kwargs), cls._farandole_settings
        )

    def __reduce__(self) -> Any:
        """Copies and pickles are distributed, too.

        Raises:
            TypeError: When variables are local: a copy has others.
        """
        if self._farandole.reducer.local:
            raise TypeError(
                "an optimizer with local variables cannot be copied: its copy has other variables"
            )
        plain = object.__new__(self._farandole_kind)
        plain.__dict__.update(
            {key: value for key, value in self.__dict__.items() if key != "_farandole"}
        )
        return _distribute_plain_optimizer, (plain, self._farandole_settings)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._farandole.variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        reduced, clip = self._reduce_gradients(list(grads)), super()._clip_gradients  # type: ignore[misc]
        is_local = [
            self._farandole.reducer.is_local(variable) for variable in self._farandole.variables
        ]
        if not any(is_local):
            return clip(reduced)
        # Apart: a norm with other gradients in it on every rank would clip what all share
        # differently.
        clipped = list(reduced)
        for kind in (False, True):
            places = [index for index, local in enumerate(is_local) if local is kind]
            for index, grad in zip(
                places, clip([reduced[index] for index in places]) if places else [], strict=True
            ):
                clipped[index] = grad
        return clipped

    def _reduce_gradients(self, grads: list[Any]) -> list[Any]:
        distribution, steps = self._farandole, self.gradient_accumulation_steps  # type: ignore[attr-defined]
        reducer, variables, factor = (
            distribution.reducer,
            distribution.variables,
            distribution.accumulated_gradient_scale,
        )

        def reduce_scaled(grads: list[Any]) -> list[Any]:
            if factor != 1.0:
                grads = [grad if grad is None else grad * factor for grad in grads]
            return reducer(grads, variables)

        if not steps or keras.backend.backend() != "jax":
            return reduce_scaled(grads)
        # On JAX Keras computes every update and keeps the due ones: only those may be sent.
        from jax import lax  # noqa: PLC0415 - the backend

        is_due = (self._iterations + 1) % steps == 0  # type: ignore[attr-defined]
        return lax.cond(is_due, reduce_scaled, list, grads)


class _LossScaleMixin:
    """Mixed in before a `LossScaleOptimizer`'s own class whose inner optimizer is distributed."""

    _farandole_settings: GradientReductionSettings
    _farandole_kind: Any

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        self.inner_optimizer.register_local_var(var)  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a new one of the same settings."""
        return _distribute_loss_scale_optimizer(
            cls._farandole_kind.from_config(*args, **kwargs), cls._farandole_settings
        )

    def __reduce__(self) -> Any:
        """Copies and pickles are distributed, too."""
        inner = self.inner_optimizer.__reduce__()[1][0]  # type: ignore[attr-defined]
        plain = object.__new__(self._farandole_kind)
        plain.__dict__.update(self.__dict__)
        plain.__dict__["inner_optimizer"] = inner
        return _distribute_loss_scale_optimizer, (plain, self._farandole_settings)


def is_optimizer(value: Any) -> bool:
    """Returns whether this is a Keras optimizer."""
    return isinstance(value, keras.optimizers.Optimizer)


def is_distributed(value: Any) -> bool:
    """Returns whether this optimizer, or the one in it, reduces over all ranks."""
    return isinstance(value, _DistributedOptimizerMixin) or isinstance(
        getattr(value, "inner_optimizer", None), _DistributedOptimizerMixin
    )


def rank_local_variables(optimizer: Any, others: set[int]) -> set[int]:
    """Returns the local variables of this rank: the variables given to `register_local_var`, and
    the optimizer's slots for them.

    Args:
        optimizer: A built Keras optimizer.
        others: Further local variables, by `id`.

    Returns:
        All local variables, by `id`.

    Raises:
        ValueError: When the optimizer's slots of the variables cannot be determined.
    """
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    trained = list(inner._trainable_variables)  # noqa: SLF001 - the variables it was built with
    if isinstance(inner, _DistributedOptimizerMixin):
        is_local = inner._farandole.reducer.is_local  # noqa: SLF001
    else:
        is_local = lambda _: False  # noqa: E731
    mine = {id(variable) for variable in trained if id(variable) in others or is_local(variable)}
    return (
        {
            *others,
            *mine,
            *(id(slot) for slot, owner in slots_with_owners(inner, trained) if owner in mine),
        }
        if mine
        else others
    )


def distribute_optimizer(optimizer: Any, settings: GradientReductionSettings) -> Any:
    """Returns a distributed optimizer with the state of the given one, which is not to be used any
    more.

    Args:
        optimizer: Keras's.
        settings: The caller's settings.

    Returns:
        An instance of a subclass of the same name and module, so that saved models load without
        Farandole.

    Raises:
        ValueError: If arguments contradict each other, or it is not a Keras optimizer, or it is
            already distributed.
    """
    if not is_optimizer(optimizer):
        raise ValueError(f"optimizer must be one of Keras's: {optimizer!r}")
    passes = settings.backward_passes_per_step
    if settings.op not in (Average, Sum):
        raise ValueError(f"Keras optimizers reduce by Average or Sum: {settings.op}")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {passes}")
    if is_distributed(optimizer):
        raise ValueError("the optimizer is distributed already")
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    target: Any = optimizer.inner_optimizer if scaled else optimizer
    if passes > 1:
        if target.gradient_accumulation_steps:
            raise ValueError(
                "give either backward_passes_per_step or gradient_accumulation_steps, not both"
            )
        if target.built:
            raise ValueError(
                "backward_passes_per_step > 1 needs an optimizer that has not been built"
            )
        target.gradient_accumulation_steps = passes
    new = (
        _distribute_loss_scale_optimizer(optimizer, settings)
        if scaled
        else _distribute_plain_optimizer(optimizer, settings)
    )
    if settings.name is not None:
        new.name = settings.name
    return new


def _rebuild_as_mixed_subclass(
    optimizer: Any, mixed_in: type, settings: GradientReductionSettings
) -> Any:
    """Returns an instance of a subclass that looks like the optimizer's own class.

    The instance is made without __init__ and gets the old optimizer's state: variables, slots and
    schedules stay the same objects.
    """
    kind = type(optimizer)
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_farandole_kind": kind,
        "_farandole_settings": settings,
    }
    new = object.__new__(type(kind.__name__, (mixed_in, kind), members))
    new.__dict__.update(optimizer.__dict__)
    return new


def _distribute_plain_optimizer(optimizer: Any, settings: GradientReductionSettings) -> Any:
    patches.install_patches()
    new = _rebuild_as_mixed_subclass(optimizer, _DistributedOptimizerMixin, settings)
    new.__dict__["_farandole"] = DistributedOptimizerState(settings)
    return new


def _distribute_loss_scale_optimizer(optimizer: Any, settings: GradientReductionSettings) -> Any:
    patches.install_patches()
    new = _rebuild_as_mixed_subclass(optimizer, _LossScaleMixin, settings)
    inner = _distribute_plain_optimizer(
        optimizer.inner_optimizer, dataclasses.replace(settings, name=None)
    )
    new.__dict__["inner_optimizer"] = inner
    return new
