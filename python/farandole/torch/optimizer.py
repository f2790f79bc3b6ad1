# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The distributed optimizer: reduces gradients while the backward pass still runs."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import basics
from farandole.common.handles import members_of
from farandole.common.notices import heed, is_elastic
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Adasum, Average, Sum, choose_op, rounds_sums
from farandole.torch._buckets import Options
from farandole.torch._compiler import load_compiler
from farandole.torch._names import group_parameters, name_parameters
from farandole.torch._plain import plain
from farandole.torch._reduce import Reduction
from farandole.torch._reducer import GradientReducer
from farandole.torch._tolerant import Tolerance, TolerantReducer, claim
from farandole.torch.adasum import _DistributedAdasumOptimizer
from farandole.torch.compress._base import Compressor as StatefulCompressor
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class _DistributedOptimizer(torch.optim.Optimizer):
    """The mixin that `DistributedOptimizer` adds to the class of the wrapped optimizer."""

    _parameter_names: dict[torch.Tensor, str]
    """The name of every parameter, as scripts look it up with Horovod."""
    _reducer: GradientReducer | None = None
    _synchronized: bool = False
    _tolerance: Tolerance | None = None
    _skips: bool = False
    _scaled: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also one that was pickled, is a plain optimizer; `DistributedOptimizer` wraps
        it again.
        """
        return plain(self, _DistributedOptimizer)

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
        """Waits until all gradients are reduced; parameters without a gradient take part with
        zeros.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._reducer is not None:
            self._reducer.finish(self.param_groups)
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` use gradients as they are, after an explicit `synchronize`: to clip or
        unscale in between.
        """
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward passes add to the gradients without being counted, for accumulation of
        uneven length.
        """
        if self._reducer is None:
            yield
            return
        self._reducer.paused = True
        try:
            yield
        finally:
            self._reducer.paused = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces gradients, then takes the wrapped optimizer's step.

        With a closure, gradients are reduced each time it has been evaluated; Horovod reduces only
        before, so what the closure computes stays local.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the wrapped optimizer returns.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._tolerance is not None:
            result = self._tolerant_step(closure)
        elif self._reducer is None or self._skips or self._settled():
            result = super().step(closure)
        elif closure is not None:
            result = super().step(self._reduced(closure))
        else:
            if self._synchronized:
                # Scripts filter this warning by Horovod's words.
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
            result = super().step()
        self._synchronized = False
        self._scaled = False
        return result

    @property
    def steps(self) -> int:
        """Steps that training has finished, before this rank came included. Only with
        `fault_tolerant`.
        """
        return self._tolerant().steps

    def share(self, **objects: Any) -> None:
        """Sends objects such as a schedule of learning rates to ranks that join later. Only with
        `fault_tolerant`.

        On such a rank each object takes its state in this call.

        Args:
            **objects: Objects with `state_dict` and `load_state_dict`, under names that are the
                same on all ranks. A loader of `farandole.data` continues with the right rows
                whenever the world changes.

        Raises:
            TypeError: An object has no such methods.
        """
        self._tolerant().share(objects)

    def rejoin(self) -> None:
        """Leaves a world that another collective has found broken, for the next one. Only with
        `fault_tolerant`.

        `step` does so by itself. Call it where a collective of your own, such as the average of a
        metric, has raised `FarandoleInternalError`. Between `synchronize` and `step` it only has
        the next reduction leave the world; collectives of your own fail until then.

        Raises:
            WorkerDismissed: When this worker is not in the next world.
        """
        self._tolerant().rejoin(self._synchronized)

    def _tolerant(self) -> Tolerance:
        if self._tolerance is None:
            raise ValueError(
                "the optimizer is not fault tolerant: create it with fault_tolerant=True"
            )
        return self._tolerance

    def _tolerant_step(self, closure: Callable[[], Any] | None) -> Any:
        """A step that ranks which are lost in it do not end."""
        if closure is not None:
            raise ValueError(
                "a fault-tolerant optimizer takes no closure: it may have to reduce gradients again"
            )
        tolerance, reducer = self._tolerant(), self._reducer
        assert isinstance(reducer, TolerantReducer)  # noqa: S101 - made with the tolerance
        if not (self._skips or self._settled()):
            self.synchronize()
        # A rank that has caught up has this step behind it already.
        result = None if reducer.caught_up else super().step()
        if not reducer.caught_up:
            tolerance.finished()
        reducer.caught_up = False
        return result

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` followed by the reduction of the gradients it computed."""

        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate

    def _settled(self) -> bool:
        """Returns whether a GradScaler has had the gradients reduced, and none was computed
        since.
        """
        return self._scaled and self._reducer is not None and not self._reducer.is_touched()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Reduces the gradients, because GradScaler.step reads this before it looks at them.

        Then all ranks find the same infinities and skip the same steps.
        """
        if (
            self._reducer is not None
            and not self._skips
            and (not self._synchronized or self._reducer.is_touched())
        ):
            self.synchronize()
            self._scaled = True
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like that of the wrapped optimizer.

        Raises:
            AssertionError: When gradients are being reduced; `step` or `synchronize` comes first.
        """
        if self._reducer is not None and self._reducer.is_busy():
            raise AssertionError(
                "zero_grad() came before step() or synchronize() while gradients are being reduced"
            )
        if self._reducer is not None:
            self._reducer.reset()
        self._synchronized = False
        self._scaled = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like that of the wrapped optimizer; forgets backward passes counted so far."""
        if self._reducer is not None:
            self._reducer.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)


def _require_positive(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {passes!r}")


def _wrap(optimizer: torch.optim.Optimizer, mixin: type, attributes: dict[str, Any]) -> Any:
    """Returns an instance of a subclass of the optimizer's class, of the same name, with its
    parameters and state.
    """
    kind = type(optimizer)
    cls: Any = type(
        kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    wrapped = cls.__new__(cls)
    # A learning-rate scheduler of the wrapped optimizer has replaced `step` on that instance only.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped.__dict__.update(attributes)
    return wrapped


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | StatefulCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_bucket_view: bool = False,
    *,
    fault_tolerant: bool = False,
) -> Any:
    """Wraps an optimizer so that every step uses gradients reduced over all ranks.

    The result is an instance of a subclass of the optimizer's class and shares its parameters and
    its state (Horovod drops the state). Gradients are reduced in place while the backward pass
    still runs; gradients of several passes per step are summed.

    With `op=Adasum` each rank takes the wrapped optimizer's step on its own gradients, and the
    changes are combined. `groups`, `sparse_as_dense` and `gradient_as_bucket_view` then have no
    effect.

    Args:
        optimizer: Any optimizer except `LBFGS`, whose line search would differ between ranks.
        named_parameters: Such as `model.named_parameters()`; names the gradients across ranks. Must
            name every parameter of the optimizer, if given.
        compression: Compresses the gradients for transport, for example `Compression.bf16`, or a
            compressor of `farandole.torch.compress` of this optimizer's own.
        backward_passes_per_step: Backward passes whose gradients are summed up before one
            reduction.
        op: `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: Splits the averaging: gradients are divided by it before the sum
            and multiplied after. Needs `op=Average`.
        num_groups: Deprecated; use `groups`.
        groups: Gradients that are reduced as one unit: a number of consecutive groups, or lists of
            parameters.
        sparse_as_dense: Converts sparse gradients to dense ones before the reduction; otherwise
            their entries are gathered.
        process_set: The ranks that train together; on others the result is a plain local optimizer.
        gradient_as_bucket_view: Puts gradients into a few buffers that are reduced in place. They
            stay there from step to step with `zero_grad(set_to_none=False)`; with the default they
            are copied in.
        fault_tolerant: In an elastic job, if ranks are lost in a step, the others finish that step
            with the average over the remaining ranks, and new ranks join; see
            `docs/user-guide/elastic.md`. All ranks create the optimizer right after `init`, before
            any other collective, because it sends them parameters and state. It needs as much
            additional memory as the gradients.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: When an argument is wrong, or before `init`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS cannot be distributed: its line search would differ between ranks")
    if isinstance(optimizer, (_DistributedOptimizer, _DistributedAdasumOptimizer)):
        raise ValueError(f"the optimizer is distributed already: {type(optimizer).__name__}")
    choose_op(op, None)
    members = members_of(process_set)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if isinstance(compression, StatefulCompressor) and op not in (Average, Sum):
        raise ValueError(f"{type(compression).__name__} needs op=Average or op=Sum")
    _require_positive(backward_passes_per_step)
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`, and is deprecated",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    _refuse_intolerant(
        fault_tolerant,
        {
            "op=Adasum": op == Adasum,
            "a compressor that keeps what it has left out": isinstance(
                compression, StatefulCompressor
            ),
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "a process set": process_set is not global_process_set,
        },
    )
    names = name_parameters(optimizer.param_groups, named_parameters)
    units = group_parameters(names, groups)
    alone = basics.rank() not in members or (len(members) == 1 and not is_elastic())
    if op == Adasum:
        attributes = {
            "_compression": compression,
            "_reduction": Reduction(op, process_set=process_set),
        }
        attributes = {"_parameter_names": names, **({} if alone else attributes)}
        return _wrap(optimizer, _DistributedAdasumOptimizer, attributes)
    factors = 1.0 / gradient_predivide_factor, gradient_predivide_factor
    reduction = Reduction(op, *factors, process_set, rounds_sums(compression))
    options = Options(reduction, compression, sparse_as_dense)
    reducer = None
    if fault_tolerant and not alone:
        reducer = TolerantReducer(names, units, options, passes=backward_passes_per_step)
    elif not alone:
        reducer = GradientReducer(
            names, units, options, passes=backward_passes_per_step, as_view=gradient_as_bucket_view
        )
    wrapped = _wrap(
        optimizer, _DistributedOptimizer, {"_parameter_names": names, "_reducer": reducer}
    )
    if fault_tolerant:
        _enter(wrapped)
    return wrapped


def _refuse_intolerant(fault_tolerant: bool, options: dict[str, bool]) -> None:
    """Refuses what a reduction cannot be repeated with, or what fault tolerance has no meaning
    for.
    """
    for name, given in options.items():
        if fault_tolerant and given:
            raise ValueError(f"fault_tolerant=True cannot be combined with {name}")


def _enter(optimizer: Any) -> None:
    """Makes a distributed optimizer fault tolerant, and gives it the state of the ranks that
    have trained already.
    """
    tolerance = Tolerance(optimizer, is_elastic())
    optimizer._tolerance = tolerance  # noqa: SLF001 - its own module's
    reducer = optimizer._reducer  # noqa: SLF001 - as above
    if reducer is None:
        raise ValueError(
            "fault_tolerant=True needs several ranks, or an elastic job: see farandole run --min-np"
        )
    reducer.tolerance = tolerance
    claim(optimizer)
    heed()
    tolerance.enter()


basics.before_elastic(load_compiler)
