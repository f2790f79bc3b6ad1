# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training with little communication: ranks take steps of their own and combine parameters every
`sync_every` steps.

`LocalSGD` averages the parameters (Stich 2019, "Local SGD Converges Fast and Communicates Little");
with `synchronous_steps` it is post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use
Local SGD"). `DiLoCo` takes an outer step with Nesterov momentum (Douillard et al. 2023, "DiLoCo:
Distributed Low-Communication Training of Language Models"); with `fragments` and `overlap_steps` it
is its streaming form (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication").
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farandole.common import basics
from farandole.common.handles import member_ranks
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.termination_notices import is_elastic_worker
from farandole.common.util import Average, Sum
from farandole.torch._allreduce import allreduce_async, grouped_allreduce_async
from farandole.torch._buckets import ReductionOptions
from farandole.torch._handles import synchronize
from farandole.torch._names import group_parameters, name_parameters
from farandole.torch._reduce import TensorReduction
from farandole.torch._reducer import GradientReducer
from farandole.torch._unwrapped_copies import unwrapped_copy_recipe
from farandole.torch.compress._base import Compressor
from farandole.torch.compress._exchange import EngineExchange
from farandole.torch.compression import Compression
from farandole.torch.optimizer import refuse_distributed_optimizer, wrap_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

STATE_KEY = "local_steps"
"""Key of the state of these optimizers in `optimizer.state`, beside the states of parameters."""
DEFAULT_OUTER_LR = 0.7
"""Learning rate of the outer step, from the paper on DiLoCo."""
DEFAULT_OUTER_MOMENTUM = 0.9
"""Momentum of the outer step, from the paper on DiLoCo."""
DEFAULT_LOCAL_SHARE = 0.5
"""Share of a rank's own parameters when a late result arrives, from the paper on streaming."""


class _PendingSync(NamedTuple):
    """A combination of parameters in progress."""

    due: int
    """Number of the step after which the result is applied."""
    parameters: list[torch.Tensor]
    wait: Callable[[], list[torch.Tensor]]
    """Waits for the mean of the tensors that the ranks sent."""


class ParameterAverage:
    """Combines the parameters of all ranks by their mean: local SGD."""

    fragments = 1
    overlap_steps = 0

    def begin(self, state: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Prepares the state, before the first step."""

    def describe_change(self, state: dict[str, Any], number: int, parameter: torch.Tensor) -> Any:
        """Returns the tensor that this rank sends for a parameter."""
        del state, number
        return parameter.detach()

    def apply(
        self, state: dict[str, Any], number: int, parameter: torch.Tensor, mean: torch.Tensor
    ) -> None:
        """Applies the mean of the tensors that the ranks sent."""
        del state, number
        parameter.copy_(mean)


class OuterNesterovStep:
    """Combines the changes of all ranks by an outer step of SGD with Nesterov momentum: DiLoCo.

    Args:
        lr: Learning rate of the outer step.
        momentum: Its momentum.
        fragments: Number of parts of the parameters that are sent at different steps.
        overlap_steps: Steps between sending and applying.
        local_share: Share of a rank's own parameters when a late result arrives.
    """

    def __init__(
        self, lr: float, momentum: float, fragments: int, overlap_steps: int, local_share: float
    ) -> None:
        self.fragments, self.overlap_steps = fragments, overlap_steps
        self._lr, self._momentum = lr, momentum
        self._local_share = local_share if overlap_steps else 0.0

    def begin(self, state: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Keeps the parameters that all ranks have in common, unless a loaded state has them."""
        if "anchors" not in state:
            state["anchors"] = [parameter.detach().clone() for parameter in parameters]
            state["momenta"] = [torch.zeros_like(parameter) for parameter in parameters]

    def describe_change(self, state: dict[str, Any], number: int, parameter: torch.Tensor) -> Any:
        """Returns the outer gradient of a parameter: its change since the last outer step,
        negated.
        """
        return state["anchors"][number] - parameter.detach()

    def apply(
        self, state: dict[str, Any], number: int, parameter: torch.Tensor, mean: torch.Tensor
    ) -> None:
        """Takes the outer step for a parameter."""
        anchor, momentum = state["anchors"][number], state["momenta"][number]
        momentum.mul_(self._momentum).add_(mean)
        anchor.sub_(mean.add(momentum, alpha=self._momentum), alpha=self._lr)
        parameter.lerp_(anchor, 1.0 - self._local_share)


class ParameterSynchronizer:
    """Starts and applies the combinations of parameters when they are due.

    Args:
        names: The parameters and their names, in the same order on all ranks.
        method: Combines parameters: `ParameterAverage` or `OuterNesterovStep`.
        sync_every: Steps between two combinations of the same parameter.
        compression: Compresses the sent tensors, or `Compression.none`.
        process_set: The ranks.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        method: ParameterAverage | OuterNesterovStep,
        sync_every: int,
        compression: Any,
        process_set: ProcessSet,
    ) -> None:
        self.method = method
        self.sync_every = sync_every
        self.parameters = list(names)
        self._names = [f"local_sgd.{name}" for name in names.values()]
        self._compression = compression
        self._process_set = process_set
        self._fragments = _deal_by_size(self.parameters, method.fragments)
        self._pending: list[_PendingSync] = []
        self._numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        _synchronizers.add(self)

    def forget_pending(self) -> None:
        """Forgets combinations in progress: their world is lost, or another state was loaded."""
        self._pending = []

    def finish_step(self, state: dict[str, Any]) -> None:
        """Counts a step, then applies and starts the combinations that are due.

        The count begins again when all parameters are equal on all ranks.
        """
        state["steps"] += 1
        state["steps_since_sync"] += 1
        step = state["steps_since_sync"]
        self._apply_due(state, step)
        for number, fragment in enumerate(self._fragments):
            offset = number * self.sync_every // len(self._fragments)
            if step > offset and (step - offset) % self.sync_every == 0:
                self._start(state, fragment, step + self.method.overlap_steps)
        self._apply_due(state, step)
        if len(self._fragments) == 1 and step == self.sync_every and not self._pending:
            state["steps_since_sync"] = 0

    def combine_all(self, state: dict[str, Any]) -> None:
        """Applies combinations in progress, then combines all parameters."""
        self._apply_due(state, None)
        for fragment in self._fragments:
            self._start(state, fragment, 0)
        # What ranks add of their own to a late result would differ: the anchors are equal.
        self._apply_due(state, None)
        for number, parameter in enumerate(self.parameters):
            if "anchors" in state:
                parameter.detach().copy_(state["anchors"][number])
        state["steps_since_sync"] = 0

    def _start(self, state: dict[str, Any], fragment: list[torch.Tensor], due: int) -> None:
        if not fragment:
            return
        numbers = [self._numbers[parameter] for parameter in fragment]
        changes = [
            self.method.describe_change(state, number, self.parameters[number])
            for number in numbers
        ]
        name = self._names[numbers[0]]
        count = allreduce_async(
            torch.ones(1), name=f"{name}.ranks", op=Sum, process_set=self._process_set
        )
        if isinstance(self._compression, Compressor):
            named = [
                (self._names[number], change)
                for number, change in zip(numbers, changes, strict=True)
            ]
            exchange = EngineExchange(name, self._process_set)
            finish = self._compression.start(named, exchange, average=True)
        else:
            finish = self._start_mean(name, changes)

        def wait() -> list[torch.Tensor]:
            self._require_all_ranks(float(synchronize(count)))
            return finish()

        self._pending.append(_PendingSync(due, fragment, wait))

    def _start_mean(
        self, name: str, changes: list[torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]]:
        """Starts a mean over the ranks."""
        pairs = [self._compression.compress(change) for change in changes]
        handle = grouped_allreduce_async(
            [tensor for tensor, _ in pairs], name=name, op=Average, process_set=self._process_set
        )

        def wait_for_mean() -> list[torch.Tensor]:
            return [
                self._compression.decompress(mean, ctx)
                for mean, (_, ctx) in zip(synchronize(handle), pairs, strict=True)
            ]

        return wait_for_mean

    def _require_all_ranks(self, present: float) -> None:
        """Refuses a mean to which a rank in `join` has added zeros."""
        size = len(member_ranks(self._process_set))
        if present != size:
            raise ValueError(
                f"{present:g} of {size} ranks have sent their parameters; the others are in "
                "join(). With LocalSGD and DiLoCo, all ranks take the same number of steps"
            )

    def _apply_due(self, state: dict[str, Any], step: int | None) -> None:
        """Applies combinations that are due at a step; all, if `step` is `None`."""
        while self._pending and (step is None or self._pending[0].due <= step):
            pending = self._pending.pop(0)
            with torch.no_grad():
                for parameter, mean in zip(pending.parameters, pending.wait(), strict=True):
                    self.method.apply(state, self._numbers[parameter], parameter, mean)


_synchronizers: weakref.WeakSet[ParameterSynchronizer] = weakref.WeakSet()


def _forget_pending_syncs() -> None:
    for synchronizer in list(_synchronizers):
        synchronizer.forget_pending()


basics.call_on_each_init(_forget_pending_syncs)


def _deal_by_size(parameters: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Deals parameters to `count` fragments of about equal bytes, the largest first.

    Returns the same on all ranks.
    """
    fragments: list[list[torch.Tensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(parameter)
        sizes[smallest] += parameter.nbytes
    return fragments


class _LocalStepOptimizer(torch.optim.Optimizer):
    """The mixin that `LocalSGD` and `DiLoCo` add to the class of the wrapped optimizer."""

    _parameter_names: dict[torch.Tensor, str]
    _synchronizer: ParameterSynchronizer | None = None
    _reducer: GradientReducer | None = None
    _synchronous_steps: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain optimizer; `LocalSGD` and `DiLoCo` wrap the copy again."""
        return unwrapped_copy_recipe(self, _LocalStepOptimizer)

    @property
    def is_synchronized(self) -> bool:
        """Whether the last step has made the parameters of all ranks equal: the moment for a
        checkpoint or an elastic commit. With several fragments or `overlap_steps`, only
        `synchronize` does.
        """
        return self.state.get(STATE_KEY, {}).get("steps_since_sync", 0) == 0  # type: ignore[call-overload]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the wrapped optimizer's step on this rank's gradients; combines parameters when
        they are due.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The result of the wrapped optimizer.

        Raises:
            ValueError: When ranks disagree about a parameter, or parameters were added.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._synchronizer is None:
            return super().step(closure)
        state = self._begin_state(self._synchronizer)
        if state["steps"] < self._synchronous_steps:
            return self._take_synchronous_step(state, closure)
        result = super().step(closure)
        self._synchronizer.finish_step(state)
        return result

    def _take_synchronous_step(
        self, state: dict[str, Any], closure: Callable[[], Any] | None
    ) -> Any:
        """Takes a step with averaged gradients: parameters stay equal."""
        if closure is not None:
            raise ValueError("synchronous_steps cannot be combined with a closure")
        assert self._reducer is not None  # noqa: S101 - made with synchronous_steps
        self._reducer.finish_reductions(self.param_groups)
        result = super().step()
        state["steps"] += 1
        self._pause_reducer()
        return result

    def _pause_reducer(self) -> None:
        """Lets backward passes reduce gradients in synchronous steps only. The number of steps may
        come from another rank.
        """
        if self._reducer is not None:
            steps = self.state.get(STATE_KEY, {}).get("steps", 0)  # type: ignore[call-overload]
            self._reducer.paused = steps >= self._synchronous_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward passes of synchronous steps add to the gradients without being counted."""
        if self._reducer is not None:
            self._reducer.paused = True
        try:
            yield
        finally:
            self._pause_reducer()

    def synchronize(self) -> None:
        """Combines the parameters of all ranks now: before an evaluation, a checkpoint, or at the
        end. All ranks call it. The next combination comes `sync_every` steps later.

        Raises:
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._synchronizer is not None and not self.is_synchronized:
            self._synchronizer.combine_all(self._begin_state(self._synchronizer))

    def _begin_state(self, synchronizer: ParameterSynchronizer) -> dict[str, Any]:
        """Returns the state of this optimizer; creates it before the first step."""
        trained = {
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        added = trained.difference(synchronizer.parameters)
        if added:
            names = sorted(self._parameter_names.get(each, "without a name") for each in added)
            raise ValueError(
                "parameters were added or unfrozen since the optimizer was wrapped: "
                f"{', '.join(names)}. Wrap it after that"
            )
        state = self.state.setdefault(STATE_KEY, {"steps": 0, "steps_since_sync": 0})  # type: ignore[call-overload, arg-type]
        synchronizer.method.begin(state, synchronizer.parameters)
        return state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses a GradScaler, which reads this property first: ranks would skip different
        steps.
        """
        if self._synchronizer is not None:
            raise ValueError(
                "LocalSGD and DiLoCo cannot be combined with a GradScaler, which lets ranks skip "
                "different steps: train in bfloat16"
            )
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients like `zero_grad` of the wrapped optimizer.

        Raises:
            AssertionError: When gradients of a synchronous step are being reduced.
        """
        if self._reducer is not None:
            if self._reducer.has_started_reduction():
                raise AssertionError(
                    "zero_grad() came before step() while gradients are being reduced, in the "
                    "first synchronous_steps: call a backward() without a step inside "
                    "`with optimizer.no_sync():`"
                )
            self._reducer.reset_counts()
            self._pause_reducer()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state like the wrapped optimizer, with the steps and the outer state if it has
        them. Drops combinations in progress.
        """
        super().load_state_dict(state_dict)
        state = self.state.get(STATE_KEY)  # type: ignore[call-overload]
        if state is not None:
            # The wrapped optimizer takes values as they are. The steps change them in place, next
            # to the parameters.
            parameters = self._synchronizer.parameters if self._synchronizer else []
            copied = {
                key: [
                    tensor.to(parameter, copy=True)
                    for tensor, parameter in zip(value, parameters, strict=True)
                ]
                if isinstance(value, list) and parameters
                else value
                for key, value in state.items()
            }
            self.state[STATE_KEY] = copied  # type: ignore[index]
        if self._synchronizer is not None:
            self._synchronizer.forget_pending()
        if self._reducer is not None:
            self._reducer.reset_counts()
            self._pause_reducer()


def LocalSGD(  # noqa: N802 - named like DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    sync_every: int,
    synchronous_steps: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that each rank takes steps on its own gradients, and all ranks average
    their parameters after every `sync_every` steps: 1 / `sync_every` of the bytes of
    `DistributedOptimizer`.

    Give all ranks equal parameters first (`broadcast_parameters`). All ranks take the same number
    of steps. Buffers, such as the statistics of batch
    normalization, are not averaged. For compressed changes, use `DiLoCo` with `outer_lr=1` and
    `outer_momentum=0`, which is the same average.

    The result is an instance of a subclass of the optimizer's class; its `state_dict` has the
    number of steps. Call its `synchronize()` on all ranks before an evaluation or a checkpoint.

    Args:
        optimizer: Any optimizer.
        named_parameters: Parameters by name, such as `model.named_parameters()`. Must name every
            parameter of the optimizer, if given.
        sync_every: Steps between two averages.
        synchronous_steps: Steps at the beginning that average gradients, as `DistributedOptimizer`
            does: post-local SGD.
        process_set: The ranks that train together; on others the result is a plain local optimizer.

    Returns:
        The optimizer, with `synchronize()` and `is_synchronized`.

    Raises:
        ValueError: When an argument is wrong, or before `init`.
    """
    if synchronous_steps < 0:
        raise ValueError(f"synchronous_steps must not be negative: {synchronous_steps!r}")
    return _wrap_local_optimizer(
        optimizer,
        named_parameters,
        ParameterAverage(),
        sync_every,
        Compression.none,
        process_set,
        synchronous_steps,
    )


def DiLoCo(  # noqa: N802 - named like DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    sync_every: int,
    outer_lr: float = DEFAULT_OUTER_LR,
    outer_momentum: float = DEFAULT_OUTER_MOMENTUM,
    fragments: int = 1,
    overlap_steps: int = 0,
    local_share: float = DEFAULT_LOCAL_SHARE,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that each rank takes steps on its own gradients, and all ranks take an
    outer step on the mean change of their parameters after every `sync_every` steps.

    The outer step is SGD with Nesterov momentum. With several fragments, parts of the parameters
    are sent at different steps, so the network is used evenly. With `overlap_steps`, training goes
    on while a fragment is sent. Needs memory for two more copies of the parameters. Otherwise as
    `LocalSGD`; its `state_dict` also has the outer state. A checkpoint between sending and applying
    has the parameters before that outer step: the next one makes up for it.

    Args:
        optimizer: The inner optimizer; the paper uses AdamW.
        named_parameters: Parameters by name, such as `model.named_parameters()`. Must name every
            parameter of the optimizer, if given.
        sync_every: Steps between two outer steps of a parameter.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Momentum of the outer step.
        fragments: Number of parts, at most `sync_every`.
        overlap_steps: Steps that are taken while a fragment is sent, fewer than `sync_every`.
        local_share: With `overlap_steps`, the share of a rank's own parameters in the result; the
            rest is the parameters after the outer step.
        compression: Compresses the changes: a class of `Compression`, or a compressor of
            `farandole.torch.compress` that only this optimizer uses, such as `Int8()`.
        process_set: The ranks that train together; on others the result is a plain local optimizer.

    Returns:
        The optimizer, with `synchronize()` and `is_synchronized`.

    Raises:
        ValueError: When an argument is wrong, or before `init`.
    """
    if not 0 <= overlap_steps < max(1, sync_every):
        raise ValueError(
            f"overlap_steps must be from 0 to sync_every - 1 = {sync_every - 1}: {overlap_steps!r}"
        )
    if not 1 <= fragments <= max(1, sync_every):
        raise ValueError(f"fragments must be from 1 to sync_every = {sync_every}: {fragments!r}")
    if not 0 <= local_share < 1:
        raise ValueError(f"local_share must be from 0 to below 1: {local_share!r}")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum must be from 0 to below 1: {outer_momentum!r}")
    if outer_lr <= 0:
        raise ValueError(f"outer_lr must be positive: {outer_lr!r}")
    method = OuterNesterovStep(outer_lr, outer_momentum, fragments, overlap_steps, local_share)
    return _wrap_local_optimizer(
        optimizer, named_parameters, method, sync_every, compression, process_set
    )


def _wrap_local_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    method: ParameterAverage | OuterNesterovStep,
    sync_every: int,
    compression: Any,
    process_set: ProcessSet,
    synchronous_steps: int = 0,
) -> Any:
    refuse_distributed_optimizer(optimizer)
    if sync_every <= 0:
        raise ValueError(f"sync_every must be positive: {sync_every!r}")
    if not isinstance(compression, Compressor) and not hasattr(compression, "decompress"):
        raise ValueError(
            "compression must be a class of Compression or a compressor of "
            f"farandole.torch.compress: {compression!r}"
        )
    members = member_ranks(process_set)
    names = name_parameters(optimizer.param_groups, named_parameters)
    attributes: dict[str, Any] = {"_parameter_names": names}
    if basics.rank() in members and (len(members) > 1 or is_elastic_worker()):
        trained = {parameter: n for parameter, n in names.items() if parameter.requires_grad}
        attributes["_synchronizer"] = ParameterSynchronizer(
            trained, method, sync_every, compression, process_set
        )
        attributes["_synchronous_steps"] = synchronous_steps
        if synchronous_steps:
            reduction = TensorReduction(Average, process_set=process_set)
            attributes["_reducer"] = GradientReducer(
                names,
                group_parameters(names, None),
                ReductionOptions(reduction, Compression.none, sparse_as_dense=False),
                passes=1,
                as_view=False,
            )
    return wrap_optimizer(optimizer, _LocalStepOptimizer, attributes)
