# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The distributed optimizer: reduces gradients while the backward pass still runs."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import basics
from farandole.common.handles import member_ranks
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.rank_progress import OWN_PROGRESS
from farandole.common.termination_notices import install_notice_handlers, is_elastic_worker
from farandole.common.util import Adasum, Average, Sum, allows_rounded_sums, resolve_op_argument
from farandole.torch._buckets import ReductionOptions
from farandole.torch._compiler import import_torch_compiler
from farandole.torch._deferred_steps import DeferredSteps, require_separable_optimizer
from farandole.torch._fault_tolerance import (
    FaultTolerance,
    FaultTolerantReducer,
    claim_sole_fault_tolerant_owner,
)
from farandole.torch._forward_overlap import ForwardOverlap
from farandole.torch._names import group_parameters, name_parameters
from farandole.torch._reduce import TensorReduction
from farandole.torch._reducer import GradientReducer
from farandole.torch._sharded_optimizer import (
    _ShardedOptimizer,
    refuse_unsharded_options,
    require_elementwise_optimizer,  # noqa: F401 - a check of estimators, too
    shard_optimizer,
)
from farandole.torch._unwrapped_copies import plain_optimizer_over, unwrapped_copy_recipe
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
    _tolerance: FaultTolerance | None = None
    _deferred: DeferredSteps | None = None
    _skips_synchronize: bool = False
    _was_reduced_for_scaler: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain optimizer; `DistributedOptimizer` wraps the copy again."""
        self.wait_for_parameters()
        return unwrapped_copy_recipe(self, _DistributedOptimizer)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed up before gradients are reduced.

        Raises:
            ValueError: When `passes` is not positive.
        """
        _require_positive(passes)
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.reset_counts()

    def synchronize(self) -> None:
        """Waits until all gradients are reduced; parameters without a gradient take part with
        zeros.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self.wait_for_parameters()
        if self._reducer is not None:
            with OWN_PROGRESS.measure_reduction():
                self._reducer.finish_reductions(self.param_groups)
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` use gradients as they are, after an explicit `synchronize`: to clip or
        unscale in between.
        """
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

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

        With a closure, gradients are reduced after each evaluation of the closure. Horovod reduces
        only before the step, so the gradients that the closure computes stay local.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The result of the wrapped optimizer.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self.wait_for_parameters()
        if self._tolerance is not None:
            result = self._fault_tolerant_step(closure)
        elif self._reducer is None or self._skips_synchronize or self._is_reduced_for_scaler():
            result = super().step(closure)
        elif closure is not None:
            result = super().step(self._with_reduction(closure))
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
            if self._defers_step():
                assert self._deferred is not None  # noqa: S101 - tested by `_defers_step`
                result = self._deferred.start_step(self)
            else:
                self.synchronize()
                result = super().step()
        OWN_PROGRESS.end_step()
        self._synchronized = False
        self._was_reduced_for_scaler = False
        return result

    def overlap_forward(self, model: torch.nn.Module) -> None:
        """Lets `step` return while gradients are still being reduced. Each module of the model
        waits for its own parameters when it is called, and then they take their step.

        The results are the same. The first step still waits for all of them, because the first
        forward pass of the model shows the order in which modules are called.

        This saves time if the reductions need longer than the backward pass. Gradients that the
        first modules need come first, and large gradients are reduced in parts. All ranks call it
        before the first step.

        Gradients are `None` after a step, so none of them is left for a later backward pass to add
        to. `model.state_dict()`, `model.load_state_dict()` and the same methods of the optimizer
        wait. Before you read parameters in another way, as an average of weights does, call
        `wait_for_parameters`. A module that is called in the first forward pass must be called in
        all passes that read its parameters. A step with a closure, a GradScaler, `skip_synchronize`
        or hooks of the optimizer waits as usual.

        Args:
            model: The module that the training calls.

        Raises:
            ValueError: When a step of the wrapped optimizer mixes parameters, or the optimizer is
                fault tolerant.
        """
        if self._tolerance is not None:
            raise ValueError("overlap_forward cannot be combined with fault_tolerant=True")
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            require_separable_optimizer(
                partial(plain_optimizer_over, self, _DistributedOptimizer, options)
            )
        if self._reducer is None or self._deferred is not None:
            return
        take_step = super().step
        self._deferred = DeferredSteps(self._reducer, ForwardOverlap(model), take_step)

    def wait_for_parameters(self) -> None:
        """Waits until all parameters have taken their last step, after `overlap_forward`."""
        if self._deferred is not None:
            self._deferred.finish()

    def _defers_step(self) -> bool:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return self._deferred is not None and not self._synchronized and not hooks

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer, after the last step."""
        self.wait_for_parameters()
        return super().state_dict()

    @property
    def steps(self) -> int:
        """Number of steps that training has finished, also before this rank joined. Only with
        `fault_tolerant`.
        """
        return self._require_fault_tolerance().steps

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
        self._require_fault_tolerance().share_stateful_objects(objects)

    def rejoin(self) -> None:
        """Leaves a broken world for the next one. Only with `fault_tolerant`.

        `step` rejoins by itself. Call `rejoin` when a collective of the training script, such as
        the average of a metric, has raised `FarandoleInternalError`. Between `synchronize` and
        `step`, `rejoin` only makes the next reduction leave the world; until then, collectives of
        the script fail.

        Raises:
            WorkerDismissed: When this worker is not in the next world.
        """
        self._require_fault_tolerance().move_to_world_when_due(self._synchronized)

    def _require_fault_tolerance(self) -> FaultTolerance:
        if self._tolerance is None:
            raise ValueError(
                "the optimizer is not fault tolerant: create it with fault_tolerant=True"
            )
        return self._tolerance

    def _fault_tolerant_step(self, closure: Callable[[], Any] | None) -> Any:
        """Takes a step that continues if ranks are lost."""
        if closure is not None:
            raise ValueError(
                "a fault-tolerant optimizer takes no closure: it may have to reduce gradients again"
            )
        tolerance, reducer = self._require_fault_tolerance(), self._reducer
        assert isinstance(reducer, FaultTolerantReducer)  # noqa: S101 - made with the tolerance
        if not (self._skips_synchronize or self._is_reduced_for_scaler()):
            self.synchronize()
        # A rank that has caught up has already finished this step.
        result = None if reducer.caught_up else super().step()
        if not reducer.caught_up:
            tolerance.count_step()
        reducer.caught_up = False
        return result

    def _with_reduction(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that calls `closure` and then reduces the gradients."""

        def evaluate_and_reduce() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate_and_reduce

    def _is_reduced_for_scaler(self) -> bool:
        """Returns whether a GradScaler has caused a reduction, with no new gradient since."""
        return (
            self._was_reduced_for_scaler
            and self._reducer is not None
            and not self._reducer.has_new_gradients()
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Reduces the gradients, because GradScaler.step reads this property before the gradients.

        Then all ranks find the same infinities and skip the same steps.
        """
        if (
            self._reducer is not None
            and not self._skips_synchronize
            and (not self._synchronized or self._reducer.has_new_gradients())
        ):
            self.synchronize()
            self._was_reduced_for_scaler = True
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients like `zero_grad` of the wrapped optimizer.

        Raises:
            AssertionError: When gradients are being reduced; `step` or `synchronize` comes first.
        """
        if self._deferred is not None and self._deferred.is_pending:
            return  # each parameter's step clears its gradient
        if self._reducer is not None and self._reducer.has_started_reduction():
            raise AssertionError(
                "zero_grad() came before step() or synchronize() while gradients are being "
                "reduced. If the loss of another optimizer reaches these parameters, as a "
                "generator's loss reaches the discriminator, call its backward() inside "
                "`with optimizer.no_sync():` of this optimizer, which does not step with these "
                "gradients"
            )
        if self._reducer is not None:
            self._reducer.reset_counts()
        self._synchronized = False
        self._was_reduced_for_scaler = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state like the wrapped optimizer; resets the count of backward passes."""
        self.wait_for_parameters()
        if self._reducer is not None:
            self._reducer.reset_counts()
        self._synchronized = False
        super().load_state_dict(state_dict)


def _require_positive(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be positive: {passes!r}")


def refuse_distributed_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that `DistributedOptimizer`, `LocalSGD` or `DiLoCo` has wrapped.

    Raises:
        ValueError: It is wrapped.
    """
    if hasattr(optimizer, "_parameter_names"):
        raise ValueError(f"the optimizer is distributed already: {type(optimizer).__name__}")


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, mixin: type, attributes: dict[str, Any]
) -> Any:
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
    shard_states: bool = False,
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
        named_parameters: Parameters by name, such as `model.named_parameters()`; names the
            gradients across ranks. Must name every parameter of the optimizer, if given.
        compression: Compresses the gradients for transport, for example `Compression.bf16`, or a
            compressor of `farandole.torch.compress` that only this optimizer uses.
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
        shard_states: Each rank has a part of the optimizer's states, so they take 1 / `size` of
            the memory (ZeRO, stage 1). Gradients are reduced in parts, each rank steps on its part
            of the parameters, and the parts are gathered. Needs an element-wise optimizer.
            Gradients are `None` after a step; clip them by `optimizer.clip_grad_norm_`, and save
            the state by `optimizer.consolidate_state_dict()` on all ranks and `state_dict()`.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: When an argument is wrong, or before `init`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS cannot be distributed: its line search would differ between ranks")
    refuse_distributed_optimizer(optimizer)
    resolve_op_argument(op, None)
    members = member_ranks(process_set)
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
    _refuse_unrepeatable_options(
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
    factors = 1.0 / gradient_predivide_factor, gradient_predivide_factor
    reduction = TensorReduction(op, *factors, process_set, allows_rounded_sums(compression))
    options = ReductionOptions(reduction, compression, sparse_as_dense)
    if shard_states:
        refused = {"fault_tolerant=True": fault_tolerant, "groups": groups is not None}
        return _shard_states(optimizer, names, options, backward_passes_per_step, refused)
    units = group_parameters(names, groups)
    alone = basics.rank() not in members or (len(members) == 1 and not is_elastic_worker())
    if op == Adasum:
        attributes = {
            "_compression": compression,
            "_reduction": TensorReduction(op, process_set=process_set),
        }
        attributes = {"_parameter_names": names, **({} if alone else attributes)}
        return wrap_optimizer(optimizer, _DistributedAdasumOptimizer, attributes)
    reducer = None
    if fault_tolerant and not alone:
        reducer = FaultTolerantReducer(names, units, options, passes=backward_passes_per_step)
    elif not alone:
        reducer = GradientReducer(
            names, units, options, passes=backward_passes_per_step, as_view=gradient_as_bucket_view
        )
    wrapped = wrap_optimizer(
        optimizer, _DistributedOptimizer, {"_parameter_names": names, "_reducer": reducer}
    )
    if fault_tolerant:
        _make_fault_tolerant(wrapped)
    return wrapped


def _shard_states(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    options: ReductionOptions,
    passes: int,
    refused: dict[str, bool],
) -> Any:
    """Wraps an optimizer of whose states each rank has a part, with its present state."""
    refuse_unsharded_options(options, refused)
    attributes = shard_optimizer(optimizer, names, options, passes=passes)
    wrapped = wrap_optimizer(optimizer, _ShardedOptimizer, attributes)
    wrapped._patch_step_function()  # noqa: SLF001 - torch's own way to call the hooks of a step
    if optimizer.state:
        wrapped.load_state_dict(optimizer.state_dict())
    return wrapped


def _refuse_unrepeatable_options(fault_tolerant: bool, options: dict[str, bool]) -> None:
    """Refuses options with which a reduction cannot be repeated, or for which fault tolerance has
    no meaning.
    """
    for name, given in options.items():
        if fault_tolerant and given:
            raise ValueError(f"fault_tolerant=True cannot be combined with {name}")


def _make_fault_tolerant(optimizer: Any) -> None:
    """Makes a distributed optimizer fault tolerant, and gives it the state of the ranks that
    have trained already.
    """
    tolerance = FaultTolerance(optimizer, is_elastic_worker())
    optimizer._tolerance = tolerance  # noqa: SLF001 - its own module's
    reducer = optimizer._reducer  # noqa: SLF001 - as above
    if reducer is None:
        raise ValueError(
            "fault_tolerant=True needs several ranks, or an elastic job: see farandole run --min-np"
        )
    reducer.tolerance = tolerance
    claim_sole_fault_tolerant_owner(optimizer)
    install_notice_handlers()
    tolerance.agree_with_new_world()


basics.call_before_elastic_join(import_torch_compiler)
