# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Buckets whose gradients are reduced in parts: each rank gets its part, and steps on the same part
of the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole._native import engine
from farandole.common import basics
from farandole.torch._allgather import allgather_async
from farandole.torch._buckets import GradientBucket, GradientViewBucket
from farandole.torch._handles import synchronize
from farandole.torch._names import MAX_UNIT_BYTES, batch_neighbouring_parameters
from farandole.torch._reducer import GradientReducer
from farandole.torch._reducescatter import reducescatter_async

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from farandole.torch._buckets import GradientSlot, ReductionOptions


class ShardedBucket(GradientViewBucket):
    """Parameters of one group of the optimizer, in one memory, of which each rank has a part.

    Attributes:
        shard: This rank's part of the parameters, a flat tensor with the gradient of that part.

    Args:
        slots: The parameters, of one dtype on one device, in the same order on all ranks.
        options: Options of the reduction of gradients.
    """

    def __init__(self, slots: list[GradientSlot], options: ReductionOptions) -> None:
        self._ranks = basics.size()
        super().__init__(slots, options)
        length = self._memory.numel() // self._ranks
        self._range = (basics.rank() * length, (basics.rank() + 1) * length)
        self.shard = torch.nn.Parameter(
            torch.zeros(length, dtype=self._memory.dtype, device=self._memory.device)
        )
        self._gathering: int | None = None
        self._scattering: int | None = None

    def _memory_length(self, length: int) -> int:
        """Pads the memory so that all ranks have parts of equal lengths."""
        return -(-length // self._ranks) * self._ranks

    def start_reduction(self) -> None:
        """Starts the reduction; parameters without a gradient take part with zeros.

        Raises:
            FarandoleInternalError: When the world is broken already.
        """
        self.started = True
        for slot in self.slots:
            if slot.parameter.requires_grad:
                self.take_gradient(slot)
        self._wire, self._ctx = self._cast.compress(self._memory)
        op, prescale, postscale, process_set, _ = self.options.reduction
        self._scattering = reducescatter_async(
            self._wire, self._name, op, process_set, prescale, postscale
        )

    def reset_counts(self, passes: int) -> None:
        """Resets the counts and forgets the started reduction."""
        super().reset_counts(passes)
        self._scattering = None

    def finish_reduction(self) -> None:
        """Waits for this rank's part of the gradients, which becomes the gradient of `shard`.

        Drops the gradients of the parameters, which come from this rank alone.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._scattering is None:
            return
        part = self._cast.decompress(synchronize(self._scattering), self._ctx)
        self.shard.grad = part.to(self.shard.dtype)
        for slot in self.slots:
            slot.parameter.grad = None

    def load_shard(self) -> None:
        """Copies this rank's part of the parameters, which a script may have changed, into
        `shard`.
        """
        with torch.no_grad():
            self.copy_own_part([slot.parameter for slot in self.slots], self.shard)

    def copy_own_part(self, tensors: Sequence[torch.Tensor | None], target: torch.Tensor) -> None:
        """Copies this rank's part of some tensors of the parameters' shapes; 0 for a tensor that is
        missing.
        """
        first, end = self._range
        for slot, tensor in zip(self.slots, tensors, strict=True):
            start = self._starts[slot]
            low, high = max(first, start), min(end, start + slot.parameter.numel())
            if low >= high:
                continue
            own = target[low - first : high - first]
            if tensor is None:
                own.zero_()
            else:
                own.copy_(tensor.detach().reshape(-1)[low - start : high - start])

    def split_whole(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Splits the parts of all ranks, end to end, into tensors of the parameters' shapes."""
        return [
            whole[start : start + slot.parameter.numel()].view(slot.parameter.shape)
            for slot, start in self._starts.items()
        ]

    def start_gather(self) -> None:
        """Starts to gather the parts of all ranks."""
        self._gathering = allgather_async(self.shard.detach(), name=f"shards.{self._name}")

    def finish_gather(self) -> None:
        """Waits for the parts of all ranks and stores them in the parameters."""
        if self._gathering is None:
            return
        handle, self._gathering = self._gathering, None
        whole = self.split_whole(synchronize(handle))
        with torch.no_grad():
            for slot, values in zip(self.slots, whole, strict=True):
                slot.parameter.copy_(values)

    def gather_whole(self, part: torch.Tensor, name: str) -> list[torch.Tensor]:
        """Returns tensors of the parameters' shapes from the parts of all ranks; a collective
        call.
        """
        whole = synchronize(allgather_async(part, name=f"shards.{self._name}.{name}"))
        return [tensor.clone() for tensor in self.split_whole(whole)]


class ShardingReducer(GradientReducer):
    """Reduces gradients in parts, one for each rank.

    Args:
        names: Every parameter and its name.
        param_groups: The groups of the optimizer: a bucket has parameters of one group.
        options: Options of the reduction of gradients.
        passes: Backward passes per reduction.
        kinds: The kind of each parameter; a bucket has parameters of one kind.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        param_groups: Sequence[dict[str, Any]],
        options: ReductionOptions,
        *,
        passes: int,
        kinds: dict[torch.Tensor, str] | None = None,
    ) -> None:
        self._world = _present_world()
        self.is_lost = False
        """Whether the world has changed, so parts of lost ranks are missing."""
        kinds = kinds or {}
        units = [
            unit
            for group in param_groups
            for alike in _group_by_kind(group["params"], kinds)
            for unit in batch_neighbouring_parameters(alike, MAX_UNIT_BYTES)
        ]
        super().__init__(names, units, options, passes=passes, as_view=True)

    def divided_by(
        self, param_groups: Sequence[dict[str, Any]], kinds: dict[torch.Tensor, str]
    ) -> ShardingReducer:
        """Returns a reducer in place of this one, whose buckets have parameters of one kind.

        Args:
            param_groups: The groups of the optimizer.
            kinds: The kind of each parameter, the same on all ranks.
        """
        for hook in self._hooks:
            hook.remove()
        return ShardingReducer(
            self._names, param_groups, self._options, passes=self.passes, kinds=kinds
        )

    @property
    def buckets(self) -> list[ShardedBucket]:
        """The buckets in the order of creation; unfrozen parameters have the last ones."""
        return [bucket for bucket in self._buckets if isinstance(bucket, ShardedBucket)]

    def adopt_present_world(self) -> None:
        """Notes that the world has changed."""
        super().adopt_present_world()
        self.is_lost = self.is_lost or _present_world() != self._world

    def _make_bucket(self, slots: list[GradientSlot]) -> GradientBucket:
        return ShardedBucket(slots, self._options)


def _group_by_kind(
    parameters: Sequence[torch.Tensor], kinds: dict[torch.Tensor, str]
) -> list[list[torch.Tensor]]:
    """Returns the parameters that need gradients, by kind, in the order of the first of each."""
    groups: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(kinds.get(parameter, ""), []).append(parameter)
    return list(groups.values())


def _present_world() -> tuple[int, int, int]:
    """Returns the generation and size of the world, and the rank of this process in it."""
    return engine.world().generation, basics.size(), basics.rank()
