# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The distributed optimizer: reduces gradients while the backward pass still runs."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from farandole.common import basics
from farandole.common.process_sets import ProcessSet, global_process_set, require_global
from farandole.common.util import Average, choose_op
from farandole.torch._buckets import GradientReducer
from farandole.torch._names import group_parameters, name_parameters
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class _DistributedOptimizer(torch.optim.Optimizer):
    """What `DistributedOptimizer` mixes into the class of the optimizer it wraps."""

    _reducer: GradientReducer | None
    _synchronized: bool
    _skips: bool

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed up before gradients are reduced.

        Raises:
            ValueError: When `passes` is not positive.
        """
        _require_positive(passes)
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.reset()

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; parameters without a gradient take part with zeros.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._reducer is not None:
            self._reducer.finish(self.param_groups)
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` use gradients as they are, after an explicit `synchronize`: to clip or unscale in between."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces gradients, then takes the wrapped optimizer's step.

        With a closure, gradients are reduced each time it has been evaluated; Horovod reduces only before, so what
        the closure computes stays local.

        Args:
            closure: Evaluates the model anew and returns the loss.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._reducer is None or self._skips:
            result = super().step(closure)
        elif closure is not None:
            result = super().step(self._reduced(closure))
        else:
            if self._synchronized:
                warnings.warn(
                    "step() reduces the gradients a second time after synchronize(); "
                    "wrap it in `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
            result = super().step()
        self._synchronized = False
        return result

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` followed by the reduction of the gradients it computed."""

        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: When gradients are being reduced; `step` or `synchronize` comes first.
        """
        if self._reducer is not None and self._reducer.is_busy():
            raise AssertionError("zero_grad() came before step() or synchronize() while gradients are being reduced")
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; forgets backward passes counted so far."""
        if self._reducer is not None:
            self._reducer.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


def _require_positive(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {passes!r}")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that every step uses gradients reduced over all ranks.

    The result is an instance of a subclass of the optimizer's class and shares its parameters and its state (Horovod
    drops the state). Gradients are reduced in place while the backward pass still runs; gradients of several passes
    per step are summed.

    Args:
        optimizer: Any optimizer but `LBFGS`, whose line search would take different turns on different ranks.
        named_parameters: Such as `model.named_parameters()`; names the gradients across ranks. Must name every
            parameter of the optimizer, if given.
        compression: Makes gradients smaller on the wire, e.g. `Compression.bf16`.
        backward_passes_per_step: Backward passes whose gradients are summed up before one reduction.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: Splits the averaging: gradients are divided by it before the sum and multiplied
            after. Needs `op=Average`.
        num_groups: Deprecated; use `groups`.
        groups: Gradients that are reduced as one unit: a number of consecutive groups, or lists of parameters.
        sparse_as_dense: Makes sparse gradients dense before the reduction. They are refused otherwise.
        process_set: The global one.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: When an argument is wrong, or before `init`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS cannot be distributed: its line search would take different turns on different ranks")
    choose_op(op, None)
    require_global(process_set)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    _require_positive(backward_passes_per_step)
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = name_parameters(optimizer.param_groups, named_parameters)
    buckets = group_parameters(names, groups)

    kind = type(optimizer)
    cls = type(kind.__name__, (_DistributedOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    wrapped = cast("_DistributedOptimizer", cls.__new__(cls))
    # A learning-rate scheduler of the wrapped optimizer has replaced `step` on that instance only.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._synchronized = False  # noqa: SLF001 - built here instead of in __init__, which takes the optimizer's arguments
    wrapped._skips = False  # noqa: SLF001
    wrapped._reducer = (  # noqa: SLF001
        None
        if basics.size() == 1
        else GradientReducer(
            names,
            buckets,
            op=op,
            compression=compression,
            passes=backward_passes_per_step,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
        )
    )
    return wrapped
