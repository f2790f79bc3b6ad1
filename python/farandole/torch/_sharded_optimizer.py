# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer(shard_states=True)`: each rank has a part of the optimizer's states.

Gradients are reduced in parts, each rank steps on its part of the parameters, and the parts are
gathered: stage 1 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models"). A part is a range of a bucket's memory, not a number of parameters, so
the wrapped optimizer must be element-wise.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from farandole.common import basics
from farandole.common.process_sets import global_process_set
from farandole.common.rank_progress import OWN_PROGRESS
from farandole.common.util import Average, Sum
from farandole.torch._allreduce import allreduce
from farandole.torch._forward_overlap import ForwardOverlap
from farandole.torch._sharded_gradients import ShardedBucket, ShardingReducer
from farandole.torch._unwrapped_copies import plain_optimizer_over
from farandole.torch.compress._base import Compressor as StatefulCompressor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from farandole.torch._buckets import ReductionOptions

SCALAR_KEYS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of states of torch's optimizers that are one number for a parameter of any shape."""


class _ShardedOptimizer(torch.optim.Optimizer):
    """The mixin that `DistributedOptimizer(shard_states=True)` adds to the class of the wrapped
    optimizer.
    """

    _parameter_names: dict[torch.Tensor, str]
    _reducer: ShardingReducer
    _inner_optimizers: dict[ShardedBucket, torch.optim.Optimizer]
    """The wrapped optimizer once for each bucket, over the shard of the bucket."""
    _whole_states: dict[int, dict[str, Any]] | None = None
    """States of all parameters by number, gathered from all ranks; `None` after a step."""
    _overlap: ForwardOverlap | None = None
    _is_reduced: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses pickles and copies, which would lack the states of other ranks."""
        raise TypeError(
            "an optimizer with shard_states=True cannot be copied or pickled: call "
            "consolidate_state_dict() on all ranks and save state_dict()"
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed up before gradients are reduced."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be positive: {passes!r}")
        self._reducer.passes = passes
        self._reducer.reset_counts()

    def synchronize(self) -> None:
        """Raises an error: no rank has all gradients.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "with shard_states=True, each rank has a part of the reduced gradients: clip them by "
            "optimizer.clip_grad_norm_(max_norm), and leave synchronize() out"
        )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` use gradients as they are, after `clip_grad_norm_`, which `step` does by
        itself.
        """
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backward passes add to the gradients without being counted."""
        self._reducer.paused = True
        try:
            yield
        finally:
            self._reducer.paused = False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Reduces the gradients, then scales them so that their norm is at most `max_norm`. A
        collective call.

        Args:
            max_norm: Largest norm of all gradients together.

        Returns:
            The norm before, a scalar.
        """
        self._reduce_gradients()
        shards = [bucket.shard for bucket in self._reducer.buckets]
        squares = torch.zeros(1, dtype=torch.float64)
        for shard in shards:
            if shard.grad is not None:
                squares += shard.grad.double().square().sum().cpu()
        norm = allreduce(squares, op=Sum, name="shards.norm").sqrt()[0]
        factor = max_norm / (float(norm) + 1e-6)
        if not factor >= 1.0:  # NaN makes all gradients NaN, as torch does
            for shard in shards:
                if shard.grad is not None:
                    shard.grad.mul_(factor)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces gradients, steps on this rank's part of the parameters, and gathers the parts of
        all ranks. Afterwards gradients are `None`.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The result of the closure.

        Raises:
            ValueError: When ranks disagree about a gradient, or the world has changed.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        loss = closure() if closure is not None else None
        self.wait_for_parameters()
        self._reduce_gradients()
        self._is_reduced = False
        self._whole_states = None
        previous = None
        deferred: dict[torch.Tensor, Callable[[], None]] = {}
        for bucket in self._reducer.buckets:
            if bucket.shard.grad is None:
                continue
            bucket.load_shard()
            self._inner_optimizer(bucket).step()
            bucket.shard.grad = None
            bucket.start_gather()
            # Parts of a bucket are gathered while the next bucket's step is computed. Two at a
            # time: each takes the memory of a whole bucket.
            if previous is not None:
                previous.finish_gather()
            previous = None if self._defers(bucket) else bucket
            if previous is None:
                deferred |= {slot.parameter: bucket.finish_gather for slot in bucket.slots}
        if previous is not None:
            previous.finish_gather()
        if self._overlap is not None:
            self._overlap.defer(deferred)
        OWN_PROGRESS.end_step()
        return loss

    def _defers(self, bucket: ShardedBucket) -> bool:
        """Returns whether the next forward pass waits for the parameters of a bucket."""
        overlap = self._overlap
        return (
            overlap is not None
            and overlap.is_ready
            and all(overlap.reads(slot.parameter) for slot in bucket.slots)
        )

    def overlap_forward(self, model: torch.nn.Module) -> None:
        """Lets `step` return while parameters are still being gathered; each module of the model
        waits for its own when it is called. The first forward pass of the model still finds all of
        them.

        `model.state_dict()` and `model.load_state_dict()` wait, too. Before you read parameters in
        another way, as an average of weights does, call `wait_for_parameters`. A module that is
        called in the first forward pass must be called in all passes that read its parameters.

        Args:
            model: The module that the training calls.
        """
        self._overlap = ForwardOverlap(model)

    def wait_for_parameters(self) -> None:
        """Waits until all parameters are gathered, after `overlap_forward`."""
        if self._overlap is not None:
            self._overlap.wait_for_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients like `zero_grad` of the wrapped optimizer.

        Raises:
            AssertionError: When gradients are being reduced; `step` comes first.
        """
        if self._reducer.has_started_reduction():
            raise AssertionError("zero_grad() came before step() while gradients are being reduced")
        self._reducer.reset_counts()
        self._is_reduced = False
        super().zero_grad(set_to_none)

    def consolidate_state_dict(self, to: int | None = None) -> None:
        """Gathers the states of all ranks, for `state_dict`. All ranks call it.

        Args:
            to: The rank that gets them; all ranks if `None`.
        """
        states: dict[int, dict[str, Any]] = {}
        holds = to is None or to == basics.rank()
        numbers = self._parameter_numbers()
        for bucket in self._reducer.buckets:
            own = self._inner_optimizer(bucket).state.get(bucket.shard, {})
            for key, value in own.items():
                if key not in SCALAR_KEYS and _has_shape_of_shard(value, bucket):
                    parts = bucket.gather_whole(value, str(key))
                else:
                    # Each parameter gets a copy: optimizers change counts of steps in place.
                    parts = [copy.deepcopy(value) for _ in bucket.slots]
                if holds:
                    for slot, part in zip(bucket.slots, parts, strict=True):
                        states.setdefault(numbers[slot.parameter], {})[key] = part
        self._whole_states = states if holds else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all parameters as the wrapped optimizer would, which any number of
        ranks can load.

        Raises:
            RuntimeError: `consolidate_state_dict` was not called since the last step.
        """
        if self._whole_states is None:
            raise RuntimeError(
                "each rank has a part of the states: call consolidate_state_dict() on all ranks "
                "after the last step, then state_dict()"
            )
        numbers = iter(range(len(self._parameter_names)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(self._whole_states.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a whole state, also one of another number of ranks or of a
        plain optimizer.

        Args:
            state_dict: The state, the same on all ranks.

        Raises:
            ValueError: The groups differ, or a state is no tensor of its parameter's shape.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.param_groups]
        if sizes != expected:
            raise ValueError(
                f"the loaded state has groups of {sizes} parameters, the optimizer {expected}"
            )
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        numbers = self._parameter_numbers()
        states = {
            parameter: state_dict["state"].get(number) for parameter, number in numbers.items()
        }
        # A bucket has one count of steps, so parameters with other counts need another bucket.
        kinds = {parameter: _scalar_values(state) for parameter, state in states.items()}
        self._reducer = self._reducer.divided_by(self.param_groups, kinds)
        self._inner_optimizers = {}
        for bucket in self._reducer.buckets:
            own = _own_part_of_states(bucket, [states[slot.parameter] for slot in bucket.slots])
            if own:
                self._inner_optimizer(bucket).state[bucket.shard] = own
        self._whole_states = None
        self._is_reduced = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses a GradScaler, which reads this property first and looks for infinities in
        gradients that this rank does not have.
        """
        raise ValueError(
            "shard_states=True cannot be combined with a GradScaler: train in bfloat16"
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def _reduce_gradients(self) -> None:
        if self._reducer.is_lost:
            raise ValueError(
                "the world has changed since DistributedOptimizer(shard_states=True): parts of the "
                "states are lost. Create the optimizer again, and load a state"
            )
        frozen = [
            slot.name
            for bucket in self._reducer.buckets
            for slot in bucket.slots
            if not slot.parameter.requires_grad
        ]
        if frozen:
            raise ValueError(
                "parameters were frozen since DistributedOptimizer(shard_states=True): "
                f"{', '.join(frozen)}. Their states are in one memory with others, which would "
                "change them: create the optimizer again and load its state"
            )
        if not self._is_reduced:
            with OWN_PROGRESS.measure_reduction():
                self._reducer.finish_reductions(self.param_groups)
            self._is_reduced = True

    def _parameter_numbers(self) -> dict[torch.Tensor, int]:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}

    def _inner_optimizer(self, bucket: ShardedBucket) -> torch.optim.Optimizer:
        """Returns the optimizer of a bucket's shard, with the present options of its group."""
        first = bucket.slots[0].parameter
        group = next(
            group
            for group in self.param_groups
            if any(parameter is first for parameter in group["params"])
        )
        options = {key: value for key, value in group.items() if key != "params"}
        inner = self._inner_optimizers.get(bucket)
        if inner is None:
            inner = plain_optimizer_over(self, _ShardedOptimizer, options, [bucket.shard])
            self._inner_optimizers[bucket] = inner
        inner.param_groups[0].update(options)
        return inner


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    options: ReductionOptions,
    *,
    passes: int,
) -> dict[str, Any]:
    """Returns the attributes of `_ShardedOptimizer` for an optimizer, with its present state.

    Args:
        optimizer: The wrapped optimizer.
        names: Its parameters and their names.
        options: Options of the reduction of gradients.
        passes: Backward passes per reduction.

    Raises:
        ValueError: The optimizer is not element-wise.
    """
    require_elementwise_optimizer(optimizer)
    reducer = ShardingReducer(names, optimizer.param_groups, options, passes=passes)
    return {
        "_parameter_names": names,
        "_reducer": reducer,
        "_inner_optimizers": {},
        "state": defaultdict(dict),
    }


def refuse_unsharded_options(options: ReductionOptions, refused: dict[str, bool]) -> None:
    """Refuses options that cannot be combined with `shard_states=True`.

    Raises:
        ValueError: An option was given.
    """
    reduction, compression, _ = options
    given_options = {
        "an op other than Average and Sum": reduction.op not in (Average, Sum),
        "a compressor that keeps what it has left out": isinstance(compression, StatefulCompressor),
        "a process set": reduction.process_set is not global_process_set,
        **refused,
    }
    for name, given in given_options.items():
        if given:
            raise ValueError(f"shard_states=True cannot be combined with {name}")


def _has_shape_of_shard(value: Any, bucket: ShardedBucket) -> bool:
    """Returns whether a state has a number for each number of the bucket's shard."""
    return isinstance(value, torch.Tensor) and value.shape == bucket.shard.shape


def _own_part_of_states(
    bucket: ShardedBucket, states: list[dict[str, Any] | None]
) -> dict[str, Any]:
    """Returns the state of a bucket's shard from the states of its parameters."""
    present = [state for state in states if state]
    own: dict[str, Any] = {}
    for key in {key: None for state in present for key in state}:
        values = [None if not state else state.get(key) for state in states]
        found = [value for value in values if value is not None]
        if not found:
            continue
        if key in SCALAR_KEYS or not isinstance(found[0], torch.Tensor):
            own[key] = copy.deepcopy(found[0])
            continue
        for slot, value in zip(bucket.slots, values, strict=True):
            if value is not None and value.shape != slot.parameter.shape:
                raise ValueError(
                    f"the loaded state {key!r} of parameter {slot.name} has the shape "
                    f"{tuple(value.shape)}, not {tuple(slot.parameter.shape)}"
                )
        own[key] = torch.zeros_like(bucket.shard, dtype=found[0].dtype)
        bucket.copy_own_part(values, own[key])
    return own


def _scalar_values(state: dict[str, Any] | None) -> str:
    """Returns the states of a parameter that are one number, as a key of a dict."""
    values = {
        key: _plain_value(value)
        for key, value in (state or {}).items()
        if key in SCALAR_KEYS or not isinstance(value, torch.Tensor)
    }
    return repr(sorted(values.items()))


def _plain_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def require_elementwise_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step on a matrix is not the steps on its halves.

    Raises:
        ValueError: It is not element-wise.
    """
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        # An optimizer that is still warming up does not move.
        known = {"capturable": False, "lr": 0.1}
        options |= {key: value for key, value in known.items() if key in options}
        _require_elementwise_options(optimizer, options)


def _require_elementwise_options(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4, 6, generator=generator)
    gradients = [torch.randn(4, 6, generator=generator) for _ in range(3)]

    def train(rows: slice, shape: tuple[int, ...]) -> torch.Tensor:
        parameter = torch.nn.Parameter(start[rows].reshape(shape).clone())
        own = plain_optimizer_over(optimizer, _ShardedOptimizer, dict(options), [parameter])
        for gradient in gradients:
            parameter.grad = gradient[rows].reshape(shape).clone()
            own.step()
        return parameter.detach().reshape(-1)

    whole = train(slice(0, 4), (4, 6))
    try:
        halves = torch.cat([train(slice(0, 2), (12,)), train(slice(2, 4), (12,))])
    except (ValueError, RuntimeError, IndexError):  # some optimizers take matrices only
        halves = None
    if halves is None or not torch.equal(whole, halves):
        raise ValueError(
            f"shard_states=True needs an element-wise optimizer, such as AdamW or SGD: the step of "
            f"{type(optimizer).__name__} on a matrix is not the steps on its parts"
        )
