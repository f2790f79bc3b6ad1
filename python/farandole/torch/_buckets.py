# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Buckets: gradients that are reduced as one unit, each in its own memory or all in one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farandole._native import engine
from farandole.common.util import Average, Sum
from farandole.torch._gpu_tensors import gpu_and_stream_of, gpus_and_streams_of, is_usable_in_place
from farandole.torch._handles import ENGINE_DTYPES, describe_tensor, table, to_engine_tensor
from farandole.torch._sparse import sparse_allreduce_async
from farandole.torch.compress._base import Compressor as StatefulCompressor
from farandole.torch.compress._exchange import EngineExchange
from farandole.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.torch._reduce import TensorReduction
    from farandole.torch.compression import Compressor

GRADIENT_ALIGNMENT_BYTES = 64
"""Alignment of gradients in one memory, in bytes: a cache line."""
CACHE_BYPASS_BUCKET_BYTES = 4 << 20
"""Least bytes of a memory into which large gradients are copied past the caches. They would not
stay in the caches until the memory is full. Measured on two cores with 32 MiB of cache, with one
thread a rank: a step of 87 ms took 83."""
LARGE_GRADIENT_BYTES = 64 << 10
"""Bytes of a large gradient."""


class GradientSlot:
    """State of the reduction of one parameter's gradient."""

    __slots__ = (
        "__weakref__",
        "bucket",
        "dtype",
        "name",
        "number",
        "operation",
        "parameter",
        "passes_left",
        "shape",
        "sparse_dim",
    )

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.operation = f"allreduce.{name}"
        self.dtype = parameter.dtype if parameter.dtype in ENGINE_DTYPES else None
        self.number = ENGINE_DTYPES.get(parameter.dtype, -1)
        self.shape = tuple(parameter.shape)
        self.passes_left = 0
        """Number of backward passes that are missing from the gradient."""
        self.sparse_dim = 0
        """Sparse dimensions of the gradients, here or on other ranks; 0 if none was sparse."""
        self.bucket: GradientBucket


class ReductionOptions(NamedTuple):
    """The settings of a gradient reduction."""

    reduction: TensorReduction
    compression: type[Compressor] | StatefulCompressor
    sparse_as_dense: bool


class _StagedGradient(NamedTuple):
    """A dense gradient in progress in other memory, dtype or layout than its own."""

    slot: GradientSlot
    grad: torch.Tensor
    wire: torch.Tensor
    ctx: Any


class GradientBucket:
    """Parameters whose gradients are reduced as one unit, each in its own memory.

    Args:
        slots: The parameters, in the same order on all ranks.
        options: Options of the reduction of gradients.
    """

    views = False
    """Whether gradients are views of the bucket's memory."""

    def __init__(self, slots: list[GradientSlot], options: ReductionOptions) -> None:
        self.slots = slots
        self.options = options
        self.waiting = 0
        """Number of missing gradients."""
        self.started = False
        self._handle: int | None = None
        self._in_place_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients the engine reads in place, with the memory that receives the
        reduced gradients.
        """
        self._staged_gradients: list[_StagedGradient] = []
        self._sparse: list[tuple[GradientSlot, Callable[[], torch.Tensor]]] = []
        self._finish: Callable[[], list[torch.Tensor]] | None = None
        self._stateful: StatefulCompressor | None = None
        self._cast: type[Compressor] = Compression.none
        if isinstance(options.compression, StatefulCompressor):
            self._stateful = options.compression
        else:
            self._cast = options.compression
        for slot in slots:
            slot.bucket = self

    def reset_counts(self, passes: int) -> None:
        """Resets the counts and forgets the started reduction."""
        self.waiting = 0
        for slot in self.slots:
            slot.passes_left = passes
            if slot.parameter.requires_grad:
                self.waiting += 1
        self.started, self._handle, self._finish = False, None, None
        self._in_place_gradients, self._staged_gradients, self._sparse = [], [], []

    def take_gradient(self, slot: GradientSlot) -> None:
        """Takes a gradient from autograd, unchanged."""

    def start_reduction(self) -> None:
        """Starts the reduction; parameters without a gradient take part with zeros, frozen ones not
        at all.

        Raises:
            ValueError: When a gradient cannot be reduced.
            FarandoleInternalError: When the world is broken already.
        """
        self.started = True
        straight = self.options.compression is Compression.none
        members: list[tuple[str, int, tuple[int, ...], int, int]] = []
        sources: list[torch.Tensor] = []
        for slot in self.slots:
            parameter = slot.parameter
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            # The common case comes first: a gradient whose memory the engine can use in place.
            if (
                straight
                and grad is not None
                and grad.layout is torch.strided
                and (grad.is_cpu or is_usable_in_place(grad))
                and grad.is_contiguous()
                and grad.dtype is slot.dtype
                and not grad.is_neg()
                and not grad.is_conj()
            ):
                target = self._result_memory(slot, grad)
                members.append(
                    (slot.operation, slot.number, slot.shape, grad.data_ptr(), target.data_ptr())
                )
                sources.append(grad)
                self._in_place_gradients.append((parameter, target))
                continue
            flight = self._stage_gradient(slot, _zero_gradient(slot) if grad is None else grad)
            if flight is not None:
                self._staged_gradients.append(flight)
                if self._stateful is None:
                    members.append(
                        (*describe_tensor(slot.operation, flight.wire), flight.wire.data_ptr())
                    )
                    sources.append(flight.wire)
        if self._stateful is not None and self._staged_gradients:
            self._start_compressed_reduction(
                self._stateful,
                [(flight.slot.name, flight.wire) for flight in self._staged_gradients],
            )
        if not members:
            return
        arguments = self.options.reduction.engine_arguments
        keep = (sources, self._in_place_gradients, self._staged_gradients)
        if len(members) == 1:
            self._handle = table.submit_operation(
                keep,
                len,
                engine.allreduce,
                *members[0],
                *arguments,
                False,
                gpu_and_stream_of(sources[0]),
            )
        else:
            self._handle = table.submit_operation(
                keep,
                len,
                engine.grouped_allreduce,
                members,
                *arguments,
                gpus_and_streams_of(sources),
            )

    def _result_memory(self, slot: GradientSlot, grad: torch.Tensor) -> torch.Tensor:
        """Returns the memory that receives the reduced gradient: the gradient's own."""
        del slot
        return grad

    def _stage_gradient(self, slot: GradientSlot, grad: torch.Tensor) -> _StagedGradient | None:
        """Converts a gradient to a tensor for the engine; a sparse gradient is gathered instead."""
        if grad.layout != torch.strided:
            if not self.options.sparse_as_dense:
                self._start_sparse_reduction(slot, grad)
                return None
            grad = grad.to_dense()
        if self._stateful is not None:
            return _StagedGradient(slot, grad, grad.detach(), None)
        wire, ctx = self._cast.compress(grad.detach())
        return _StagedGradient(slot, grad, to_engine_tensor(wire), ctx)

    def _start_compressed_reduction(
        self, compressor: StatefulCompressor, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Starts a reduction in the compressor's own form."""
        reduction = self.options.reduction
        exchange = EngineExchange(gradients[0][0], reduction.process_set)
        self._finish = compressor.start(gradients, exchange, reduction.op == Average)

    def _start_sparse_reduction(self, slot: GradientSlot, grad: torch.Tensor) -> None:
        reduction = self.options.reduction
        if reduction.op not in (Average, Sum):
            raise ValueError(
                f"sparse gradients need op=Average, op=Sum or sparse_as_dense=True: {slot.name}"
            )
        slot.sparse_dim = grad.sparse_dim()
        name = f"sparse.{slot.name}"
        self._sparse.append(
            (slot, sparse_allreduce_async(grad, name, reduction.op, reduction.process_set))
        )

    def finish_reduction(self) -> None:
        """Waits until the gradients are reduced and stores them for the optimizer.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._finish is not None:
            for flight, reduced in zip(self._staged_gradients, self._finish(), strict=True):
                self._store_gradient(flight.slot.parameter, reduced, flight.slot.sparse_dim)
        if self._handle is not None:
            table.synchronize(self._handle)
            for parameter, reduced in self._in_place_gradients:
                if parameter.grad is not reduced:
                    self._store_gradient(parameter, reduced, 0)
            for slot, grad, wire, ctx in self._staged_gradients:
                reduced = self._cast.decompress(wire.to(grad.device), ctx)
                self._store_gradient(slot.parameter, reduced, slot.sparse_dim)
        for slot, result in self._sparse:
            slot.parameter.grad = result()

    def _store_gradient(
        self, parameter: torch.Tensor, reduced: torch.Tensor, sparse_dim: int
    ) -> None:
        """Stores a result as the parameter's gradient, in the gradient's layout."""
        current = parameter.grad
        if current is not None and current.layout == torch.strided:
            current.detach().copy_(reduced)
            return
        if current is not None:
            sparse_dim = current.sparse_dim()
        parameter.grad = reduced.to_sparse(sparse_dim) if sparse_dim else reduced


def _zero_gradient(slot: GradientSlot) -> torch.Tensor:
    """Returns the gradient of a parameter that was not used."""
    parameter = slot.parameter
    if not slot.sparse_dim:
        return torch.zeros_like(
            parameter, memory_format=torch.contiguous_format, requires_grad=False
        )
    indices = torch.empty((slot.sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty(
        (0, *parameter.shape[slot.sparse_dim :]), dtype=parameter.dtype, device=parameter.device
    )
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


class GradientViewBucket(GradientBucket):
    """Parameters whose gradients are views of one memory, which is reduced in place.

    If `zero_grad` has dropped a view, autograd stores the gradient elsewhere. The gradient is then
    copied into the memory, and the view is restored.

    Args:
        slots: The parameters, of one dtype on one device, in the same order on all ranks.
        options: Options of the reduction of gradients.
    """

    views = True

    def __init__(self, slots: list[GradientSlot], options: ReductionOptions) -> None:
        super().__init__(slots, options)
        first = slots[0].parameter
        step = max(1, GRADIENT_ALIGNMENT_BYTES // first.element_size())
        starts = [0]
        for slot in slots:
            starts.append(starts[-1] + -(-slot.parameter.numel() // step) * step)
        self._starts = dict(zip(slots, starts, strict=False))
        self._memory, self._mapped = _allocate_bucket_memory(
            self._memory_length(max(1, starts[-1])), first
        )
        self._views = {
            slot: self._memory[start : start + slot.parameter.numel()].view(slot.parameter.shape)
            for slot, start in self._starts.items()
        }
        # Byte offsets of gradients that are copied past the caches.
        self._offsets: dict[GradientSlot, int] = {}
        if self._mapped is not None and self._memory.nbytes >= CACHE_BYPASS_BUCKET_BYTES:
            self._offsets = {
                slot: start * first.element_size()
                for slot, start in self._starts.items()
                if slot.parameter.nbytes >= LARGE_GRADIENT_BYTES
            }
        self._name = f"allreduce.bucket.{slots[0].name}"
        self._wire: torch.Tensor | None = None
        self._ctx: Any = None
        for slot in slots:
            if slot.parameter.grad is not None:
                self.take_gradient(slot)

    def _memory_length(self, length: int) -> int:
        """Returns the length of the memory for gradients of a total length."""
        return length

    def reset_counts(self, passes: int) -> None:
        """Resets the counts and forgets the started reduction."""
        super().reset_counts(passes)
        self._wire = None

    def take_gradient(self, slot: GradientSlot) -> None:
        """Makes the gradient a view of the bucket's memory, if it is none.

        Raises:
            ValueError: When it is sparse.
        """
        grad = slot.parameter.grad
        view = self._views[slot]
        if grad is view:
            return
        if grad is None:
            view.zero_()
        elif grad.layout != torch.strided and not self.options.sparse_as_dense:
            raise ValueError(
                "gradient_as_bucket_view needs dense gradients, or sparse_as_dense=True: "
                f"{slot.name}"
            )
        elif self._mapped is not None and self._copies_past_caches(slot, grad, view):
            self._mapped.copy_into(self._offsets[slot], grad.data_ptr(), view.nbytes)
        else:
            view.copy_(grad.detach() if grad.layout == torch.strided else grad.detach().to_dense())
        slot.parameter.grad = view

    def _copies_past_caches(
        self, slot: GradientSlot, grad: torch.Tensor, view: torch.Tensor
    ) -> bool:
        """Returns whether a gradient is copied past the caches, by one thread: not if torch copies
        with several threads.
        """
        alone = slot in self._offsets and torch.get_num_threads() == 1
        return alone and _has_same_host_layout(grad, view) and not self._contains_gradient(grad)

    def _contains_gradient(self, grad: torch.Tensor) -> bool:
        """Returns whether the gradient is already in the bucket's memory, in its own place or in
        the place of another parameter.
        """
        return 0 <= grad.data_ptr() - self._memory.data_ptr() < self._memory.nbytes

    def start_reduction(self) -> None:
        """Starts the reduction; parameters without a gradient take part with zeros.

        Raises:
            FarandoleInternalError: When the world is broken already.
        """
        self.started = True
        live = [slot for slot in self.slots if slot.parameter.requires_grad]
        for slot in live:
            self.take_gradient(slot)
        if not live:
            return
        if self._stateful is not None:
            self._start_compressed_reduction(
                self._stateful, [(slot.name, self._views[slot]) for slot in self.slots]
            )
            return
        wire, self._ctx = self._cast.compress(self._memory)
        self._wire = to_engine_tensor(wire)
        described = describe_tensor(self._name, self._wire)
        arguments = (
            *described,
            self._wire.data_ptr(),
            *self.options.reduction.engine_arguments,
            False,
            gpu_and_stream_of(self._wire),
        )
        self._handle = table.submit_operation(self._wire, len, engine.allreduce, *arguments)

    def finish_reduction(self) -> None:
        """Waits until the memory is reduced.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._finish is not None:
            for slot, reduced in zip(self.slots, self._finish(), strict=True):
                self._views[slot].copy_(reduced)
        elif self._handle is None or self._wire is None:
            return
        else:
            table.synchronize(self._handle)
            if self._wire is not self._memory:
                reduced = self._cast.decompress(self._wire.to(self._memory.device), self._ctx)
                self._memory.copy_(reduced)
        for slot in self.slots:
            if slot.parameter.requires_grad and slot.parameter.grad is not self._views[slot]:
                slot.parameter.grad = self._views[slot]


def _has_same_host_layout(grad: torch.Tensor, like: torch.Tensor) -> bool:
    """Returns whether `like`, of the same shape on the host, can be filled by copying the
    gradient's bytes.
    """
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.is_cpu
        and grad.dtype is like.dtype
        and grad.is_contiguous()
        and not grad.is_neg()
        and not grad.is_conj()
        and grad.data_ptr() != 0  # zeros that are not materialized
    )


def _allocate_bucket_memory(
    count: int, like: torch.Tensor
) -> tuple[torch.Tensor, engine.SharedTensorMemory | None]:
    """Returns zeros for `count` numbers. On the host, they are in memory that the other ranks of
    the host can use, which is returned as well.
    """
    if like.device.type != "cpu":
        location = gpu_and_stream_of(like) if is_usable_in_place(like) else None
        given = (
            None
            if location is None
            else engine.allocate_registered_memory(*location, count * like.element_size())
        )
        if given is None:
            return torch.zeros(count, dtype=like.dtype, device=like.device), None
        return torch.as_tensor(given, device=like.device).view(like.dtype).zero_(), None
    mapped = engine.allocate_shared_memory(count * like.element_size())
    return torch.frombuffer(mapped, dtype=like.dtype, count=count).zero_(), mapped
