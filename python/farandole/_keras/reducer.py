# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of one step, reduced on the backend that Keras runs on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

import keras

from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.reduction import check_groups, check_predivide, partition
from farandole.common.util import Average, Min

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reducer(Protocol):
    """What a distributed optimizer needs."""

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients; `None` stays `None`."""
        ...

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradients to this rank."""
        ...

    def agree(self, flag: Any) -> Any:
        """Whether a boolean is true on all ranks."""
        ...


_numbers = itertools.count()
"""Tells the reducers of a process apart; ranks make theirs in the same order."""


class _Reducer:
    """Groups, factors, local variables and compression, on any backend."""

    def __init__(
        self,
        compression: Any,
        op: int,
        gradient_predivide_factor: float,
        groups: Any,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        self.compression = compression
        self.op = op
        self.factors = check_predivide(gradient_predivide_factor, op)
        self.groups = check_groups(groups, id)
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.local: set[int] = set()
        self.number = next(_numbers)

    def register_local(self, variable: Any) -> None:
        self.local.add(id(variable))

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
                results[index] = grad / (self.process_set.size() or 1) if self.scale_local_gradients else grad
            else:
                shared.append(index)
        for part, group in enumerate(partition(shared, keys, self.groups)):
            pairs = [self.compression.compress(results[index]) for index in group]
            name = f"keras.{self.number}.gradients.{part}"
            reduced = self._reduce([pair[0] for pair in pairs], self.op, self.factors, name)
            for index, grad, (_, ctx) in zip(group, reduced, pairs, strict=True):
                results[index] = self.compression.decompress(grad, ctx)
        return results

    def _reduce(self, grads: list[Any], op: int, factors: tuple[float, float], name: str) -> list[Any]:
        raise NotImplementedError

    def agree(self, flag: Any) -> Any:
        if not self.process_set.included():
            return flag
        number = keras.ops.cast(flag, "int32")
        name = f"keras.{self.number}.finite"
        return keras.ops.cast(self._reduce([number], Min, (1.0, 1.0), name)[0], "bool")


class _TorchReducer(_Reducer):
    """Reduces in place of the backward pass's results, which nobody else reads."""

    def _reduce(self, grads: list[Any], op: int, factors: tuple[float, float], name: str) -> list[Any]:
        import torch  # noqa: PLC0415 - the backend

        from farandole.torch import grouped_allreduce  # noqa: PLC0415

        def reduce() -> list[Any]:
            return grouped_allreduce(
                [grad.detach().contiguous() for grad in grads],
                name=name,
                op=op,
                prescale_factor=factors[0],
                postscale_factor=factors[1],
                process_set=self.process_set,
            )

        # No part of a compiled graph.
        disable: Any = torch.compiler.disable
        return disable(reduce)()


class _JaxReducer(_Reducer):
    """Calls out of the compiled step, once for every unit, in the same order on every rank."""

    def _reduce(self, grads: list[Any], op: int, factors: tuple[float, float], name: str) -> list[Any]:
        import jax  # noqa: PLC0415 - the backend
        import numpy as np  # noqa: PLC0415
        from jax.core import Tracer  # noqa: PLC0415
        from jax.experimental import io_callback  # noqa: PLC0415

        from farandole.numpy import grouped_allreduce  # noqa: PLC0415

        def reduce(*arrays: Any) -> list[Any]:
            return grouped_allreduce(
                [np.asarray(array) for array in arrays],
                name=name,
                op=op,
                prescale_factor=factors[0],
                postscale_factor=factors[1],
                process_set=self.process_set,
            )

        if not any(isinstance(grad, Tracer) for grad in grads):
            return [jax.numpy.asarray(array) for array in reduce(*grads)]
        shapes = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in grads]
        return list(io_callback(reduce, shapes, *grads, ordered=True))


def make_reducer(
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Reducer:
    """The reducer of the backend that Keras runs on.

    Raises:
        ValueError: When arguments do not fit together, or there is none for the backend.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from farandole.tensorflow._reducer import GradientReducer  # noqa: PLC0415 - the backend
        from farandole.tensorflow.compression import Compression  # noqa: PLC0415

        return GradientReducer(
            device_dense,
            device_sparse,
            compression or Compression.none,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            groups,
            process_set,
            scale_local_gradients,
        )
    from farandole._keras.compression import Compression  # noqa: PLC0415

    kinds = {"torch": _TorchReducer, "jax": _JaxReducer}
    if backend not in kinds:
        raise ValueError(f"distributed optimizers need Keras on TensorFlow, torch or JAX: {backend}")
    compression = compression or Compression.none
    return kinds[backend](compression, op, gradient_predivide_factor, groups, process_set, scale_local_gradients)
