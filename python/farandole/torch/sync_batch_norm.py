# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batch normalization over the batches of all ranks, on any device, with public functions of
torch only.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from farandole.common import basics
from farandole.common.handles import member_ranks
from farandole.common.process_sets import ProcessSet, global_process_set
from farandole.common.util import Sum
from farandole.torch._allgather import allgather
from farandole.torch._allreduce import allreduce

if TYPE_CHECKING:
    from collections.abc import Iterator

_layers = itertools.count()
_world = 0
_padding = threading.local()


def _reset_layer_numbers() -> None:
    global _layers, _world  # noqa: PLW0603 - as the world, there is one per process
    _layers = itertools.count()
    _world += 1


basics.call_on_each_init(_reset_layer_numbers)


@contextlib.contextmanager
def exclude_padding_rows(valid: int, count: int) -> Iterator[None]:
    """Lets the layers that this thread calls leave out the last rows of a batch.

    The statistics include only the first rows. The gradients of the last rows do not depend on the
    statistics.

    Args:
        valid: Rows that count.
        count: Rows of the batch. The inputs of layers have this number of rows, or a multiple of it
            where every row became several.
    """
    _padding.rows = valid, count
    try:
        yield
    finally:
        _padding.rows = None


def is_batch_all_padding() -> bool:
    """Returns whether all rows of the batch that this thread computes on are padding."""
    rows = getattr(_padding, "rows", None)
    return rows is not None and rows[0] == 0


def _unpadded_row_count(tensor: torch.Tensor) -> int:
    """Returns how many of the first rows of an input count."""
    rows = getattr(_padding, "rows", None)
    if rows is None or tensor.shape[0] % rows[1] != 0:
        return tensor.shape[0]
    return tensor.shape[0] // rows[1] * rows[0]


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - DistributedDataParallel refuses torch's SyncBatchNorm on CPUs
    """Like `torch.nn.BatchNorm1d` to `3d`, with statistics over the batches of all ranks.

    Works on CPU and GPU, for any input of at least two dimensions, and for batches of different
    sizes, also none. In evaluation with tracked statistics it is local. Ranks run their layers in
    the same order.

    Args:
        num_features: Channels: size of the input's second dimension.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; `None` for the average of all
            batches.
        affine: Whether there are a weight and a bias to learn.
        track_running_stats: Whether there are running statistics; without, evaluation normalizes by
            the batches too.
        process_set: The ranks whose batches count; on others the layer is local.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_set = process_set
        self._number = -1
        self._number_of_world = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalizes every channel.

        Raises:
            ValueError: When the input has less than two dimensions, other channels, or only one
                value per channel.
        """
        if input.dim() < 2:  # noqa: PLR2004 - batch and channels
            raise ValueError(
                f"batch norm needs an input of at least two dimensions: shape {tuple(input.shape)}"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"batch norm needs {self.num_features} channels: shape {tuple(input.shape)}"
            )
        if not self.training and self.running_mean is not None:
            return torch.nn.functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        rows = _unpadded_row_count(input)
        counted = input[:rows]
        if len(member_ranks(self.process_set)) == 1 or not self.process_set.included():
            statistics = _local_statistics(counted)
        else:
            statistics = _global_statistics(counted, self.name_of("forward"), self.process_set)
        count, mean, variance = statistics
        if count <= 1:
            raise ValueError(
                f"batch norm needs more than one value per channel: shape {tuple(input.shape)}"
            )
        if self.training:
            self._update_running_statistics(count, mean, variance)
        return _NormalizeFunction.apply(input, self.weight, self.bias, statistics, self, rows)

    def name_of(self, purpose: str) -> str:
        """Returns a unique name of this layer, so that layers may run at the same time in
        several threads.
        """
        if self._number < 0 or self._number_of_world != _world:
            self._number, self._number_of_world = next(_layers), _world
        return f"sync_batch_norm.{self._number}.{purpose}"

    @torch.no_grad()
    def _update_running_statistics(
        self, count: float, mean: torch.Tensor, variance: torch.Tensor
    ) -> None:
        """Moves the running statistics towards the statistics of a batch."""
        if self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        momentum = 0.0 if momentum is None else momentum
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var), momentum)

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: torch.nn.Module,
        process_group: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> torch.nn.Module:
        """Replaces every batch norm in a module, keeping weights and running statistics.

        Args:
            module: Any module; changed in place, unless it is a batch norm itself.
            process_group: Not used; accepted for compatibility with torch.
            process_set: The ranks whose batches count.

        Returns:
            The module, or what replaces it.
        """
        del process_group
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(  # noqa: SLF001 - the class that BatchNorm1d to 3d have in common
            module, cls
        ):
            layer = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            layer.weight, layer.bias = module.weight, module.bias
            layer.running_mean, layer.running_var = module.running_mean, module.running_var
            layer.num_batches_tracked = module.num_batches_tracked
            layer.train(module.training)
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set=process_set))
        return module


BatchStatistics = tuple[float, torch.Tensor, torch.Tensor]
"""Values per channel, their mean and their variance, over all ranks; in float32 or wider."""


def _widen_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _non_channel_dimensions(tensor: torch.Tensor) -> list[int]:
    """Returns all dimensions but the channels."""
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _local_statistics(tensor: torch.Tensor) -> BatchStatistics:
    """Returns the statistics of this rank's batch."""
    count = tensor.numel() // tensor.shape[1]
    data = _widen_dtype(tensor.detach())
    if count == 0:
        return 0.0, data.new_zeros(tensor.shape[1]), data.new_zeros(tensor.shape[1])
    variance, mean = torch.var_mean(data, _non_channel_dimensions(tensor), correction=0)
    return float(count), mean, variance


def _global_statistics(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> BatchStatistics:
    """Returns the statistics of all ranks' batches, put together in double precision from one
    gathered row per rank.
    """
    count, mean, variance = _local_statistics(tensor)
    row = torch.cat(
        [torch.tensor([count], dtype=torch.float64), mean.double().cpu(), variance.double().cpu()]
    )
    rows = allgather(row.unsqueeze(0), name, process_set)
    counts, means, variances = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
    total = counts.sum()
    if total == 0:
        return 0.0, mean, variance
    whole_mean = (counts * means).sum(0) / total
    whole_variance = (counts * (variances + (means - whole_mean) ** 2)).sum(0) / total
    return float(total), whole_mean.to(mean), whole_variance.to(mean)


def _normalize_backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Returns the backward half of `_NormalizeFunction`."""
    tensor, weight, mean, scale = ctx.saved_tensors
    layer = ctx.layer
    shape = [1, -1] + [1] * (tensor.dim() - 2)
    derived = _widen_dtype(grads[0])
    centred = _widen_dtype(tensor) - mean.view(shape)
    others = _non_channel_dimensions(tensor)
    # Weight and bias scale all rows; the statistics depend on the rows that count.
    own = torch.stack([derived.sum(others), (derived * centred).sum(others)])
    sums = own
    if not ctx.alone:
        sums = allreduce(own, name=layer.name_of("backward"), op=Sum, process_set=layer.process_set)
    for_input = None
    if ctx.needs_input_grad[0]:
        mean_derived, mean_product = sums / ctx.count
        slope = scale if weight is None else scale * weight.to(scale)
        inner = (
            derived
            - mean_derived.view(shape)
            - centred * (mean_product * scale * scale).view(shape)
        )
        inner[ctx.rows :] = derived[ctx.rows :]
        for_input = (inner * slope.view(shape)).to(tensor.dtype)
    for_weight = for_bias = None
    if weight is not None:
        for_weight, for_bias = (own[1] * scale).to(weight.dtype), own[0].to(weight.dtype)
    return for_input, for_weight, for_bias, None, None, None


class _NormalizeFunction(torch.autograd.Function):
    """Normalizes by given statistics, which depend on the input; backward is one small
    allreduce.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: BatchStatistics,
        layer: SyncBatchNorm,
        rows: int,
    ) -> torch.Tensor:
        count, mean, variance = statistics
        ctx.count, ctx.layer, ctx.rows = count, layer, rows
        ctx.alone = len(member_ranks(layer.process_set)) == 1 or not layer.process_set.included()
        ctx.save_for_backward(tensor, weight, mean, torch.rsqrt(variance + layer.eps))
        wide = torch.nn.functional.batch_norm(
            _widen_dtype(tensor),
            mean,
            variance,
            None if weight is None else weight.to(mean),
            None if bias is None else bias.to(mean),
            training=False,
            eps=layer.eps,
        )
        return wide.to(tensor.dtype)

    backward = staticmethod(once_differentiable(_normalize_backward))  # pyright: ignore[reportAssignmentType]
