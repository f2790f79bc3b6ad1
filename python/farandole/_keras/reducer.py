# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of one step, reduced on the backend that Keras runs on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

import keras

from farandole.common import basics
from farandole.common.gradient_grouping import (
    groups_by_variable_key,
    partition_gradients,
    predivide_factors,
)
from farandole.common.util import Min, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole._keras.settings import GradientReductionSettings


class OptimizerReducer(Protocol):
    """The methods that a distributed optimizer needs."""

    local: set[Any]

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients; `None` stays `None`."""
        ...

    def register_local(self, variable: Any) -> None:
        """Excludes the gradients of a variable from the reduction."""
        ...

    def is_local(self, variable: Any) -> bool:
        """Returns whether a variable's gradients are left to this rank."""
        ...

    def is_true_on_all_ranks(self, flag: Any) -> Any:
        """Returns whether a boolean is true on all ranks."""
        ...

    def sum_over_ranks(self, value: Any, part: str) -> Any:
        """Returns the sum of a tensor of all ranks. No gradient goes through it."""
        ...


class _ReducerNumbering:
    """Numbers the reducers of a process that have no optimizer name from the script.

    The numbers follow the order of the first reductions: ranks agree on this order, because a
    reduction waits for all ranks. Ranks may differ in the number of their optimizers and in the
    order of their creation. The numbers restart with every world.
    """

    def __init__(self) -> None:
        self.world = 0
        self.numbers = itertools.count()
        basics.call_on_each_init(self._restart_numbering)

    def _restart_numbering(self) -> None:
        self.world += 1
        self.numbers = itertools.count()


_reducer_numbering = _ReducerNumbering()


class _BaseKerasReducer:
    """Groups, factors, local variables and compression, on any backend."""

    def __init__(self, settings: GradientReductionSettings) -> None:
        from farandole._keras.compression import Compression  # noqa: PLC0415 - not for TensorFlow

        self.compression = settings.compression or Compression.none
        self.op = settings.op
        self.factors = predivide_factors(settings.gradient_predivide_factor, settings.op)
        self.groups = groups_by_variable_key(settings.groups, id)
        self.process_set = settings.process_set
        self.scale_local_gradients = settings.scale_local_gradients
        self.local: set[int] = set()
        self._name = settings.name
        self._number = (-1, 0)

    def operation_label(self) -> str:
        """This reducer's name across ranks; read at each reduction."""
        if self._name is not None:
            return self._name
        if self._number[0] != _reducer_numbering.world:
            self._number = (_reducer_numbering.world, next(_reducer_numbering.numbers))
        return str(self._number[1])

    def register_local(self, variable: Any) -> None:
        self.local.add(id(variable))

    def is_local(self, variable: Any) -> bool:
        return id(variable) in self.local

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(grads)
        if not self.process_set.included():
            return results
        keys = [id(variable) for variable in variables]
        shared = []
        for index, (grad, key) in enumerate(zip(results, keys, strict=True)):
            if grad is None:
                continue
            if key in self.local:
                results[index] = (
                    grad / (self.process_set.size() or 1) if self.scale_local_gradients else grad
                )
            else:
                shared.append(index)
        for part, group in enumerate(partition_gradients(shared, keys, self.groups)):
            pairs = [self.compression.compress(results[index]) for index in group]
            reduced = self._allreduce_gradients(
                [pair[0] for pair in pairs], self.op, self.factors, f"gradients.{part}"
            )
            for index, grad, (_, ctx) in zip(group, reduced, pairs, strict=True):
                results[index] = self.compression.decompress(grad, ctx)
        return results

    def _allreduce_gradients(
        self, grads: list[Any], op: int, factors: tuple[float, float], part: str
    ) -> list[Any]:
        raise NotImplementedError

    def is_true_on_all_ranks(self, flag: Any) -> Any:
        if not self.process_set.included():
            return flag
        number = keras.ops.cast(flag, "int32")
        return keras.ops.cast(
            self._allreduce_gradients([number], Min, (1.0, 1.0), "finite")[0], "bool"
        )

    def sum_over_ranks(self, value: Any, part: str) -> Any:
        if not self.process_set.included():
            return value
        # A tensor of its own: torch's reduction is in place.
        own = keras.ops.reshape(value * 1, (1,))
        return keras.ops.reshape(self._allreduce_gradients([own], Sum, (1.0, 1.0), part)[0], ())


class _TorchOptimizerReducer(_BaseKerasReducer):
    """Reduces in place of the backward pass's results, which have no other reader."""

    def _allreduce_gradients(
        self, grads: list[Any], op: int, factors: tuple[float, float], part: str
    ) -> list[Any]:
        import torch  # noqa: PLC0415 - the backend

        from farandole.torch import grouped_allreduce_  # noqa: PLC0415

        def reduce_tensors() -> list[Any]:
            return grouped_allreduce_(
                [grad.detach().contiguous() for grad in grads],
                name=f"keras.{self.operation_label()}.{part}",
                op=op,
                prescale_factor=factors[0],
                postscale_factor=factors[1],
                process_set=self.process_set,
            )

        if not torch.compiler.is_compiling():
            # The compiler stays away: it would bring Triton, whose LLVM and TensorFlow's do not go
            # together.
            return reduce_tensors()
        # No part of a compiled graph.
        disable: Any = torch.compiler.disable
        return disable(reduce_tensors)()


class _JaxOptimizerReducer(_BaseKerasReducer):
    """Calls out of the compiled step, once for every unit, in the same order on every rank."""

    def _allreduce_gradients(
        self, grads: list[Any], op: int, factors: tuple[float, float], part: str
    ) -> list[Any]:
        import jax  # noqa: PLC0415 - the backend
        import numpy as np  # noqa: PLC0415
        from jax.core import Tracer  # noqa: PLC0415
        from jax.experimental import io_callback  # noqa: PLC0415

        from farandole.numpy import grouped_allreduce  # noqa: PLC0415

        def reduce_arrays(*arrays: Any) -> list[Any]:
            return grouped_allreduce(
                [np.asarray(array) for array in arrays],
                name=f"keras.{self.operation_label()}.{part}",
                op=op,
                prescale_factor=factors[0],
                postscale_factor=factors[1],
                process_set=self.process_set,
            )

        if not any(isinstance(grad, Tracer) for grad in grads):
            return [jax.numpy.asarray(array) for array in reduce_arrays(*grads)]
        shapes = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in grads]
        return list(io_callback(reduce_arrays, shapes, *grads, ordered=True))


def make_reducer(settings: GradientReductionSettings) -> OptimizerReducer:
    """Returns the reducer of the backend that Keras runs on.

    Raises:
        ValueError: When arguments do not fit together, or there is none for the backend.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from farandole.tensorflow.compression import Compression  # noqa: PLC0415
        from farandole.tensorflow.reducer import GradientReducer  # noqa: PLC0415 - the backend

        return GradientReducer(
            settings.device_dense,
            settings.device_sparse,
            settings.compression or Compression.none,
            settings.sparse_as_dense,
            settings.op,
            settings.gradient_predivide_factor,
            settings.groups,
            settings.process_set,
            settings.scale_local_gradients,
            name=settings.name,
        )
    kinds = {"torch": _TorchOptimizerReducer, "jax": _JaxOptimizerReducer}
    if backend not in kinds:
        raise ValueError(
            f"distributed optimizers need Keras on TensorFlow, torch or JAX: {backend}"
        )
    return kinds[backend](settings)
