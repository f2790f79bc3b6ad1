# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients on their way: hooks that start reductions, and the end of the step that waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole.torch._allreduce import allreduce_async_, grouped_allreduce_async_
from farandole.torch._handles import synchronize

if TYPE_CHECKING:
    from farandole.torch.compression import Compressor


class _Bucket:
    """Parameters whose gradients are reduced as one unit."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.ready = 0
        self.handle: int | None = None
        self.wire: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        """Per parameter: its gradient, what is reduced for it, and what the compressor needs to know."""


class GradientReducer:
    """Reduces gradients in place, each bucket when its last gradient is there.

    Args:
        names: Every parameter and its name.
        buckets: The parameters that need gradients, in units.
        op: The reduction.
        compression: Makes gradients smaller.
        passes: Backward passes per reduction.
        predivide: Divides before the sum and multiplies after.
        sparse_as_dense: Whether sparse gradients are made dense, or refused.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        buckets: list[list[torch.Tensor]],
        *,
        op: int,
        compression: type[Compressor],
        passes: int,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self.passes = passes
        self._names = dict(names)
        self._arguments: dict[str, Any] = {
            "op": op,
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide,
        }
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._buckets = [_Bucket(bucket) for bucket in buckets]
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._left: dict[torch.Tensor, int] = {}
        for bucket in self._buckets:
            self._watch(bucket)

    def is_busy(self) -> bool:
        """Whether a reduction was started and not waited for."""
        return any(bucket.handle is not None for bucket in self._buckets)

    def reset(self) -> None:
        """Forgets what was counted and started. Only when nothing is under way, or the world is lost."""
        for bucket in self._buckets:
            bucket.ready, bucket.handle, bucket.wire = 0, None, []
        self._left = dict.fromkeys(self._bucket_of, self.passes)

    def finish(self, param_groups: list[dict[str, Any]]) -> None:
        """Starts what no hook has started, and waits for everything.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        self._adopt(param_groups)
        try:
            for bucket in self._buckets:
                if bucket.handle is None and any(parameter.requires_grad for parameter in bucket.parameters):
                    self._start(bucket)
            for bucket in self._buckets:
                self._land(bucket)
        finally:
            self.reset()

    def _watch(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            self._bucket_of[parameter] = bucket
            self._left[parameter] = self.passes
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _adopt(self, param_groups: list[dict[str, Any]]) -> None:
        """Takes in parameters that were added or unfrozen since."""
        for i, group in enumerate(param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._bucket_of:
                    self._names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                    self._buckets.append(_Bucket([parameter]))
                    self._watch(self._buckets[-1])

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of[parameter]
        if self._left[parameter] == 0:
            raise AssertionError(
                f"the gradient of {self._names[parameter]} was computed more than backward_passes_per_step="
                f"{self.passes} times before step() or synchronize()"
            )
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            bucket.ready += 1
            if bucket.ready == len(bucket.parameters):
                self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.wire = [self._prepare(parameter) for parameter in bucket.parameters]
        tensors = [wire for _, wire, _ in bucket.wire]
        names = [self._names[parameter] for parameter in bucket.parameters]
        if len(tensors) == 1:
            bucket.handle = allreduce_async_(tensors[0], name=names[0], **self._arguments)
        else:
            bucket.handle = grouped_allreduce_async_(tensors, name=names[0], **self._arguments)

    def _prepare(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.detach()
        if grad.is_sparse:
            if not self._sparse_as_dense:
                name = self._names[parameter]
                raise ValueError(f"sparse gradients need sparse_as_dense=True, or a dense layer: {name}")
            grad = grad.to_dense()
        wire, ctx = self._compression.compress(grad)
        return grad, wire.contiguous().resolve_neg(), ctx

    def _land(self, bucket: _Bucket) -> None:
        if bucket.handle is None:
            return
        synchronize(bucket.handle)
        for parameter, (grad, wire, ctx) in zip(bucket.parameters, bucket.wire, strict=True):
            current = parameter.grad
            restored = self._compression.decompress(wire, ctx)
            if current is not None and current.is_sparse:
                parameter.grad = restored.to_sparse(current.sparse_dim())
            elif current is None:
                parameter.grad = restored
            elif restored is not grad or current.data_ptr() != grad.data_ptr():
                current.detach().copy_(restored)
