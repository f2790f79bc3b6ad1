# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reductions of gradients: hooks that start them, and the end of the step, which waits for them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import door, engine
from farandole.common import basics
from farandole.common.resource_limits import usable_cores
from farandole.common.util import Max
from farandole.torch._allreduce import allreduce_
from farandole.torch._buckets import (
    GradientBucket,
    GradientSlot,
    GradientViewBucket,
    ReductionOptions,
)
from farandole.torch._gpu_tensors import is_in_cuda_graph_capture
from farandole.torch._names import batch_neighbouring_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class GradientReducer:
    """Reduces gradients in place, each bucket when its last gradient is computed.

    Args:
        names: Every parameter and its name.
        groups: The parameters that need gradients, in units.
        options: Options of the reduction of gradients.
        passes: Backward passes per reduction.
        as_view: Whether gradients are views of the buckets' memory.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        options: ReductionOptions,
        *,
        passes: int,
        as_view: bool,
    ) -> None:
        self.passes = passes
        self.paused = False
        """Whether gradients accumulate without being counted."""
        self._names = names
        self._options = options
        self._as_view = as_view
        self._buckets: list[GradientBucket] = []
        self._slots: dict[torch.Tensor, GradientSlot] = {}
        self._incomplete_buckets = 0
        """Buckets that lack gradients."""
        self._overlaps_backward = True
        """Whether reductions run beside the backward pass."""
        self._divides_large_gradients = False
        self._known_count = 0
        self._frozen: list[torch.Tensor] = []
        self._agreed_world: tuple[int, int] | None = None
        self._has_undecided_slots = True
        hooks: list[Any] = []
        self._hooks = hooks
        weakref.finalize(self, _remove_hooks, hooks).atexit = False
        _reducers.add(self)
        if as_view:  # one memory holds one dtype on one device
            groups = [
                part
                for group in groups
                for part in batch_neighbouring_parameters(group[::-1], sys.maxsize)
            ]
        for group in groups:
            self._hook_parameters(group)
        self.adopt_present_world()
        self._update_known_parameters()

    def has_started_reduction(self) -> bool:
        """Returns whether a reduction was started and not waited for."""
        return any(bucket.started for bucket in self._buckets)

    def has_new_gradients(self) -> bool:
        """Returns whether a gradient was computed since the last reduction."""
        return any(slot.passes_left != self.passes for slot in self._slots.values())

    def reset_counts(self) -> None:
        """Resets counts and started reductions. Call it only if none is in progress, or the
        world is lost.
        """
        self._reset_buckets(self._buckets)

    def _reset_buckets(self, buckets: Iterable[GradientBucket]) -> None:
        for bucket in buckets:
            bucket.reset_counts(self.passes)
        self._incomplete_buckets = sum(bucket.waiting > 0 for bucket in self._buckets)

    def divide_large_gradients(self) -> None:
        """Reduces large gradients in parts from now on. All ranks call it, before any reduction."""
        self._divides_large_gradients = True
        for bucket in self._buckets:
            bucket.divides_large_gradients = True

    def set_priorities(self, positions: Mapping[torch.Tensor, int]) -> None:
        """Reduces gradients of earlier positions first.

        Args:
            positions: The position of parameters in the forward pass.
        """
        for bucket in self._buckets:
            known = [
                positions[slot.parameter] for slot in bucket.slots if slot.parameter in positions
            ]
            # Other operations, as in a forward pass, have the priority 0 and come before these.
            bucket.priority = -1 - min(known, default=0)

    def adopt_present_world(self) -> None:
        """Forgets operations of another world, where they never end, and looks at this world."""
        self.reset_counts()
        on_host = all(parameter.is_cpu for parameter in self._slots)
        self._overlaps_backward = not on_host or _has_spare_core(engine.world(), usable_cores())

    def finish_reductions(self, param_groups: list[dict[str, Any]]) -> None:
        """Starts the reductions that no hook has started, and waits for all.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self.finish_undeferred_reductions(param_groups, lambda _: False)

    def finish_undeferred_reductions(
        self, param_groups: list[dict[str, Any]], defers: Callable[[GradientBucket], bool]
    ) -> list[GradientBucket]:
        """Like `finish_reductions`, but leaves some buckets to `finish_bucket`.

        Args:
            param_groups: The groups of the optimizer.
            defers: Whether a bucket is left.

        Returns:
            The buckets that are left; none after an error.
        """
        self._adopt_new_parameters(param_groups)
        deferred: list[GradientBucket] = []
        try:
            deferred = self._reduce_buckets(defers)
        finally:
            self._reset_buckets(bucket for bucket in self._buckets if bucket not in deferred)
        return deferred

    def finish_bucket(self, bucket: GradientBucket) -> None:
        """Waits for a bucket that `finish_undeferred_reductions` has left.

        Raises:
            As `finish_reductions`.
        """
        try:
            bucket.finish_reduction()
        finally:
            self._reset_buckets([bucket])

    def _reduce_buckets(
        self, defers: Callable[[GradientBucket], bool] = lambda _: False
    ) -> list[GradientBucket]:
        failure: Exception | None = None
        deferred: list[GradientBucket] = []
        try:
            self._agree_on_sparsity()
            for bucket in self._buckets:
                if not bucket.started:
                    bucket.start_reduction()
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        # Buckets that were started continue to write to gradients, even if others have failed.
        for bucket in self._buckets:
            if failure is None and defers(bucket):
                deferred.append(bucket)
                continue
            try:
                bucket.finish_reduction()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            for bucket in deferred:
                with contextlib.suppress(Exception):  # the first failure is raised
                    bucket.finish_reduction()
            raise failure
        return deferred

    def _agree_on_sparsity(self) -> None:
        """Agrees with all ranks on the parameters whose gradients are sparse: a rank without a
        gradient must take part in the same way.

        Runs once a world, and again while a parameter is new or has had no gradient on any rank.
        Also runs after every join: a rank that ran out of data before its first step does not know
        the agreement of the others.
        """
        since = engine.world().generation, door.completed_join_count()
        if self._as_view or (self._agreed_world == since and not self._has_undecided_slots):
            return
        slots = list(self._slots.values())
        kinds = torch.tensor([_sparse_dim(slot.parameter.grad) for slot in slots], dtype=torch.int8)
        allreduce_(kinds, op=Max, process_set=self._options.reduction.process_set)
        for slot, kind in zip(slots, kinds.tolist(), strict=True):
            slot.sparse_dim = max(kind, slot.sparse_dim, 0)
        self._agreed_world = since
        self._has_undecided_slots = any(
            kind == _NO_GRADIENT and slot.sparse_dim == 0
            for slot, kind in zip(slots, kinds.tolist(), strict=True)
        )

    def _hook_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        slots = [GradientSlot(parameter, self._names[parameter]) for parameter in parameters]
        bucket = self._make_bucket(slots)
        bucket.divides_large_gradients = self._divides_large_gradients
        bucket.reset_counts(self.passes)
        self._buckets.append(bucket)
        for slot in slots:
            self._slots[slot.parameter] = slot
            self._hooks.append(
                slot.parameter.register_post_accumulate_grad_hook(self._make_gradient_hook(slot))
            )

    def _make_bucket(self, slots: list[GradientSlot]) -> GradientBucket:
        return (GradientViewBucket if self._as_view else GradientBucket)(slots, self._options)

    def _make_gradient_hook(self, slot: GradientSlot) -> Callable[[torch.Tensor], None]:
        """Returns autograd's hook for an accumulated gradient. The hook keeps neither parameter
        nor reducer alive.
        """
        slot_of, reducer_of = weakref.ref(slot), weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            slot, reducer = slot_of(), reducer_of()
            if slot is None or reducer is None:
                return
            bucket = slot.bucket
            if bucket.views:
                bucket.take_gradient(slot)
            # A replayed graph calls no hooks: `finish_reductions` starts the reductions of its
            # gradients.
            if reducer.paused or is_in_cuda_graph_capture(slot.parameter):
                return
            slot.passes_left -= 1
            if slot.passes_left == 0:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    reducer._start_complete_bucket(bucket)  # noqa: SLF001 - the hook is the reducer's own
            elif slot.passes_left < 0:
                slot.passes_left = 0
                raise AssertionError(
                    f"the gradient of {slot.name} was computed more than "
                    f"backward_passes_per_step={reducer.passes} "
                    "times before step() or synchronize(). Set backward_passes_per_step to the "
                    "number of backward passes, or call those whose gradients this optimizer does "
                    "not step with inside `with optimizer.no_sync():`"
                )

        return on_gradient

    def _start_complete_bucket(self, bucket: GradientBucket) -> None:
        """Starts a bucket whose gradients are complete, or all buckets with the last one.

        Ranks need not agree on the order: gradients are matched by name.
        """
        self._incomplete_buckets -= 1
        if self._overlaps_backward:
            bucket.start_reduction()
        elif self._incomplete_buckets == 0:
            for each in self._buckets:
                if not each.started:
                    each.start_reduction()

    def _adopt_new_parameters(self, param_groups: list[dict[str, Any]]) -> None:
        """Adds parameters that were added to the optimizer or unfrozen since the last step."""
        if sum(len(group["params"]) for group in param_groups) == self._known_count and not any(
            parameter.requires_grad for parameter in self._frozen
        ):
            return
        for i, group in enumerate(param_groups):
            for j, parameter in enumerate(group["params"]):
                self._names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                if parameter.requires_grad and parameter not in self._slots:
                    self._hook_parameters([parameter])
                    self._has_undecided_slots = True
        self._update_known_parameters()

    def _update_known_parameters(self) -> None:
        self._known_count = len(self._names)
        self._frozen = [parameter for parameter in self._names if parameter not in self._slots]


_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _adopt_world_in_reducers() -> None:
    for reducer in list(_reducers):
        reducer.adopt_present_world()


basics.call_on_each_init(_adopt_world_in_reducers)


def _has_spare_core(world: engine.World, cores: int) -> bool:
    """Returns whether reductions can run beside the backward pass without slowing it down.

    If the ranks of a single host have no spare core, the backward pass loses more time than the
    reductions save: on two cores a step of 89 ms took 102. With several hosts, the backward pass
    hides network time in any case.
    """
    return world.local_size < world.size or world.local_size < cores


_NO_GRADIENT = -1


def _sparse_dim(grad: torch.Tensor | None) -> int:
    if grad is None:
        return _NO_GRADIENT
    return 0 if grad.layout == torch.strided else grad.sparse_dim()


def _remove_hooks(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
