# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reductions of gradients: hooks that start them, and the end of the step, which waits for them."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from farandole._native import door, engine
from farandole.common import basics
from farandole.common.util import Max
from farandole.torch._allreduce import allreduce_
from farandole.torch._buckets import Bucket, Options, Slot, ViewBucket
from farandole.torch._device import is_captured
from farandole.torch._names import batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GradientReducer:
    """Reduces gradients in place, each bucket when its last gradient is there.

    Args:
        names: Every parameter and its name.
        groups: The parameters that need gradients, in units.
        options: How gradients are reduced.
        passes: Backward passes per reduction.
        as_view: Whether gradients are views of the buckets' memory.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
        options: Options,
        *,
        passes: int,
        as_view: bool,
    ) -> None:
        self.passes = passes
        self.paused = False
        """While it holds, gradients add up and nothing is counted."""
        self._names = names
        self._options = options
        self._as_view = as_view
        self._buckets: list[Bucket] = []
        self._slots: dict[torch.Tensor, Slot] = {}
        self._open = 0
        """Buckets that lack gradients."""
        self._beside = True
        """Whether reductions run beside the backward pass."""
        self._known = 0
        self._frozen: list[torch.Tensor] = []
        self._agreed: tuple[int, int] | None = None
        self._undecided = True
        hooks: list[Any] = []
        self._hooks = hooks
        weakref.finalize(self, _unhook, hooks).atexit = False
        _reducers.add(self)
        if as_view:  # one memory holds one dtype on one device
            groups = [part for group in groups for part in batch(group[::-1], sys.maxsize)]
        for group in groups:
            self._watch(group)
        self.enter_world()
        self._take_stock()

    def is_busy(self) -> bool:
        """Returns whether a reduction was started and not waited for."""
        return any(bucket.started for bucket in self._buckets)

    def is_touched(self) -> bool:
        """Returns whether a gradient was computed since the last reduction."""
        return any(slot.left != self.passes for slot in self._slots.values())

    def reset(self) -> None:
        """Resets counts and started reductions. Call it only if none is in progress, or the
        world is lost.
        """
        for bucket in self._buckets:
            bucket.reset(self.passes)
        self._open = sum(bucket.waiting > 0 for bucket in self._buckets)

    def enter_world(self) -> None:
        """Forgets operations of another world, where they never end, and looks at this world."""
        self.reset()
        on_host = all(parameter.is_cpu for parameter in self._slots)
        self._beside = not on_host or _has_spare_core(engine.world(), len(os.sched_getaffinity(0)))

    def finish(self, param_groups: list[dict[str, Any]]) -> None:
        """Starts the reductions that no hook has started, and waits for all.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self._adopt(param_groups)
        try:
            self._reduce()
        finally:
            self.reset()

    def _reduce(self) -> None:
        failure: Exception | None = None
        try:
            self._agree()
            for bucket in self._buckets:
                if not bucket.started:
                    bucket.start()
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        # Buckets that were started continue to write to gradients, even if others have failed.
        for bucket in self._buckets:
            try:
                bucket.land()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure

    def _agree(self) -> None:
        """Ranks tell each other which gradients are sparse: a rank without a gradient must take
        part likewise.

        Once a world, and again while some parameter has had no gradient on any rank, or has come
        new. And after every join: a rank that ran out of data before its first step has not heard
        what the others agreed on.
        """
        since = engine.world().generation, door.joins()
        if self._as_view or (self._agreed == since and not self._undecided):
            return
        slots = list(self._slots.values())
        kinds = torch.tensor([_sparse_dim(slot.parameter.grad) for slot in slots], dtype=torch.int8)
        allreduce_(kinds, op=Max, process_set=self._options.reduction.process_set)
        for slot, kind in zip(slots, kinds.tolist(), strict=True):
            slot.sparse_dim = max(kind, slot.sparse_dim, 0)
        self._agreed = since
        self._undecided = any(
            kind == _NO_GRADIENT and slot.sparse_dim == 0
            for slot, kind in zip(slots, kinds.tolist(), strict=True)
        )

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        slots = [Slot(parameter, self._names[parameter]) for parameter in parameters]
        bucket = self._bucket(slots)
        bucket.reset(self.passes)
        self._buckets.append(bucket)
        for slot in slots:
            self._slots[slot.parameter] = slot
            self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(self._hook(slot)))

    def _bucket(self, slots: list[Slot]) -> Bucket:
        return (ViewBucket if self._as_view else Bucket)(slots, self._options)

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
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
                bucket.adopt(slot)
            # A graph that is replayed calls no hooks: `finish` starts what it has computed.
            if reducer.paused or is_captured(slot.parameter):
                return
            slot.left -= 1
            if slot.left == 0:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    reducer._complete(bucket)  # noqa: SLF001 - the hook is the reducer's own
            elif slot.left < 0:
                slot.left = 0
                raise AssertionError(
                    f"the gradient of {slot.name} was computed more than "
                    f"backward_passes_per_step={reducer.passes} "
                    "times before step() or synchronize()"
                )

        return on_gradient

    def _complete(self, bucket: Bucket) -> None:
        """Starts a bucket whose gradients are all there, or every one with the last.

        Ranks need not agree about this: gradients meet by name.
        """
        self._open -= 1
        if self._beside:
            bucket.start()
        elif self._open == 0:
            for each in self._buckets:
                if not each.started:
                    each.start()

    def _adopt(self, param_groups: list[dict[str, Any]]) -> None:
        """Takes in parameters that were added or unfrozen since."""
        if sum(len(group["params"]) for group in param_groups) == self._known and not any(
            parameter.requires_grad for parameter in self._frozen
        ):
            return
        for i, group in enumerate(param_groups):
            for j, parameter in enumerate(group["params"]):
                self._names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                if parameter.requires_grad and parameter not in self._slots:
                    self._watch([parameter])
                    self._undecided = True
        self._take_stock()

    def _take_stock(self) -> None:
        self._known = len(self._names)
        self._frozen = [parameter for parameter in self._names if parameter not in self._slots]


_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _enter_world() -> None:
    for reducer in list(_reducers):
        reducer.enter_world()


basics.on_init(_enter_world)


def _has_spare_core(world: engine.World, cores: int) -> bool:
    """Returns whether reductions can run beside the backward pass without slowing it down.

    Where the ranks of the only host have no core to spare, that pass loses more than is hidden: on
    two cores a step of 89 ms took 102. With several hosts the network's time is hidden in any case.
    """
    return world.local_size < world.size or world.local_size < cores


_NO_GRADIENT = -1


def _sparse_dim(grad: torch.Tensor | None) -> int:
    if grad is None:
        return _NO_GRADIENT
    return 0 if grad.layout == torch.strided else grad.sparse_dim()


def _unhook(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
