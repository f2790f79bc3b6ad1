# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Optimizers, Gluon trainers and parameters of several ranks."""

from __future__ import annotations

import types
import warnings
from typing import TYPE_CHECKING, Any

import mxnet

from farandole.common.gradient_grouping import predivide_factors
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Average, split_list
from farandole.mxnet.compression import Compression, Compressor
from farandole.mxnet.mpi_ops import broadcast_, grouped_allreduce, size

mx: Any = mxnet  # nothing of it is annotated

if TYPE_CHECKING:
    from collections.abc import Callable


class _GradientAverager:
    """Reduces gradients in place, by name.

    Args:
        compression: Makes them smaller on the wire.
        gradient_predivide_factor: They are divided by it before and multiplied after the sum.
        process_set: The ranks that take part; others keep theirs.
    """

    def __init__(
        self,
        compression: type[Compressor],
        gradient_predivide_factor: float,
        process_set: ProcessSet,
    ) -> None:
        self.compression = compression
        self.factors = predivide_factors(gradient_predivide_factor, Average)
        self.process_set = process_set

    def average_in_place(self, grads: list[Any], name: str) -> None:
        """Averages several as one unit."""
        if not self.process_set.included() or self.process_set.size() == 1 or not grads:
            return
        pairs = [self.compression.compress(grad) for grad in grads]
        reduced = grouped_allreduce(
            [pair[0] for pair in pairs],
            name=name,
            prescale_factor=self.factors[0],
            postscale_factor=self.factors[1],
            process_set=self.process_set,
            op=Average,
        )
        for grad, value, (_, ctx) in zip(grads, reduced, pairs, strict=True):
            grad[:] = self.compression.decompress(value, ctx)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer so that it updates by the average of all ranks' gradients.

    Args:
        optimizer: MXNet's.
        gradient_predivide_factor: Gradients are divided by it before and multiplied after the sum.
        num_groups: Number of units in which the gradients of one call are reduced; 0 for one each.
        process_set: The ranks that take part; others update by their own.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        # The state stays the wrapped one's: attributes not found here are looked up there.
        self._optimizer = optimizer
        self._gradients = _GradientAverager(
            Compression.none, gradient_predivide_factor, process_set
        )
        self._num_groups = num_groups

    def __getattr__(self, item: str) -> Any:
        """Calls the method of the wrapped optimizer."""
        return getattr(self._optimizer, item)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Calls the method of the wrapped optimizer."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Calls the method of the wrapped optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def _reduce_gradients(self, index: Any, grad: Any) -> None:
        if not isinstance(index, tuple | list):
            self._gradients.average_in_place([grad], str(index))
            return
        parts = split_list(list(range(len(index))), self._num_groups or len(index))
        for part in parts:
            if part:
                name = (
                    f"{index[part[0]]}:{index[part[-1]]}"
                    if self._num_groups
                    else str(index[part[0]])
                )
                self._gradients.average_in_place([grad[index] for index in part], name)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduces and updates."""
        self._reduce_gradients(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduces and updates."""
        self._reduce_gradients(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """Calls the method of the wrapped optimizer."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """Calls the method of the wrapped optimizer."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """Calls the method of the wrapped optimizer."""
        self._optimizer.set_wd_mult(args_wd_mult)


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon trainer that averages gradients over all ranks.

    Args:
        params: A dictionary of parameters, or a list, which is sorted by name.
        optimizer: MXNet's, or its name; a `DistributedOptimizer` is unwrapped, with a warning.
        optimizer_params: Arguments of the optimizer.
        compression: Compresses the gradients for transport.
        gradient_predivide_factor: Gradients are divided by it before and multiplied after the sum.
        prefix: Distinguishes trainers, if there are several.
        num_groups: Number of units in which gradients are reduced, parted by dtype; 0 for one each.
        process_set: The ranks that take part; others keep their gradients.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer reduces gradients itself, so it unwraps the distributed "
                "optimizer",
                stacklevel=2,
            )
            optimizer = optimizer._optimizer  # noqa: SLF001 - internal to this package
        if isinstance(params, list):
            params = sorted(params, key=lambda param: param.name)
        self._gradients = _GradientAverager(compression, gradient_predivide_factor, process_set)
        self._farandole_prefix = prefix or ""
        self._num_groups = num_groups
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)

    def _allreduce_grads(self) -> None:
        """Reduces the gradients. `step` calls it before the update."""
        places = [index for index, param in enumerate(self._params) if param.grad_req != "null"]
        for part in self._split_into_groups(places):
            grads = [self._params[index].list_grad()[0] for index in part]
            ends = f"{part[0]}:{part[-1]}" if self._num_groups else str(part[0])
            self._gradients.average_in_place(grads, self._farandole_prefix + ends)

    def _split_into_groups(self, places: list[int]) -> list[list[int]]:
        if not self._num_groups:
            return [[index] for index in places]
        parts = []
        for group in split_list(places, self._num_groups):
            by_dtype: dict[Any, list[int]] = {}
            for index in group:
                by_dtype.setdefault(self._params[index].dtype, []).append(index)
            parts += by_dtype.values()
        return parts


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrites parameters with one rank's values, and deferred parameters when MXNet initializes
    them.

    Args:
        params: A dictionary of arrays or parameters, as `Module.get_params` and
            `Block.collect_params` give it.
        root_rank: The rank whose values count.
        prefix: Prefix of the names, which differs between calls that run at the same time.

    Raises:
        ValueError: When it is no dictionary.
    """
    if size() == 1:
        return
    if not isinstance(params, dict | mx.gluon.parameter.ParameterDict):
        raise ValueError(f"params must be a dictionary of parameters: {type(params).__name__}")
    for key, value in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if not isinstance(value, mx.gluon.parameter.Parameter):
            broadcast_(value, root_rank, name)
            continue
        try:
            data = value.data()
        except mx.gluon.parameter.DeferredInitializationError:
            value._init_impl = types.MethodType(  # noqa: SLF001
                _broadcast_after_init(value._init_impl, root_rank, name),  # noqa: SLF001
                value,
            )
            continue
        broadcast_(data, root_rank, name)


def _broadcast_after_init(
    initialize: Callable[..., None], root_rank: int, name: str
) -> Callable[..., None]:
    def initialize_and_broadcast(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        broadcast_(self.data(), root_rank, name)

    return initialize_and_broadcast
