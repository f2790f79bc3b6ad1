# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Buckets: gradients that are reduced as one unit, each in its own memory or all in one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farandole._native import engine
from farandole.common.util import Average, Sum
from farandole.torch._device import is_usable, spot, spots
from farandole.torch._handles import DTYPES, describe, table, usable
from farandole.torch._sparse import sparse_allreduce_async
from farandole.torch.compress._base import Compressor as StatefulCompressor
from farandole.torch.compress._exchange import EngineExchange
from farandole.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.torch._reduce import Reduction
    from farandole.torch.compression import Compressor

ALIGNMENT = 64
"""Bytes between the starts of gradients in one memory are a multiple of this: a cache line."""
PAST_CACHES = 4 << 20
"""Bytes of a memory from which on large gradients are copied into it past the caches, where they
would not stay until the memory is full. Measured on two cores with 32 MiB of cache, with one thread
a rank: a step of 87 ms took 83."""
LARGE = 64 << 10
"""Bytes of a large gradient."""


class Slot:
    """One parameter's gradient on its way."""

    __slots__ = (
        "__weakref__",
        "bucket",
        "dtype",
        "left",
        "name",
        "number",
        "operation",
        "parameter",
        "shape",
        "sparse_dim",
    )

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.operation = f"allreduce.{name}"
        self.dtype = parameter.dtype if parameter.dtype in DTYPES else None
        self.number = DTYPES.get(parameter.dtype, -1)
        self.shape = tuple(parameter.shape)
        self.left = 0
        """Backward passes still to come before the gradient is whole."""
        self.sparse_dim = 0
        """Sparse dimensions of its gradients, here or on other ranks; 0 when none was seen to be
        sparse.
        """
        self.bucket: Bucket


class Options(NamedTuple):
    """The settings of a gradient reduction."""

    reduction: Reduction
    compression: type[Compressor] | StatefulCompressor
    sparse_as_dense: bool


class _Flight(NamedTuple):
    """A dense gradient in progress in other memory, dtype or layout than its own."""

    slot: Slot
    grad: torch.Tensor
    wire: torch.Tensor
    ctx: Any


class Bucket:
    """Parameters whose gradients are reduced as one unit, each in its own memory.

    Args:
        slots: The parameters, in the same order on all ranks.
        options: How gradients are reduced.
    """

    views = False
    """Whether gradients are views of the bucket's memory."""

    def __init__(self, slots: list[Slot], options: Options) -> None:
        self.slots = slots
        self.options = options
        self.waiting = 0
        """Gradients still to come."""
        self.started = False
        self._handle: int | None = None
        self._direct: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients the engine reads where they are, and where it writes what
        they are reduced to.
        """
        self._flights: list[_Flight] = []
        self._sparse: list[tuple[Slot, Callable[[], torch.Tensor]]] = []
        self._finish: Callable[[], list[torch.Tensor]] | None = None
        self._stateful: StatefulCompressor | None = None
        self._cast: type[Compressor] = Compression.none
        if isinstance(options.compression, StatefulCompressor):
            self._stateful = options.compression
        else:
            self._cast = options.compression
        for slot in slots:
            slot.bucket = self

    def reset(self, passes: int) -> None:
        """Resets the counts and forgets the started reduction."""
        self.waiting = 0
        for slot in self.slots:
            slot.left = passes
            if slot.parameter.requires_grad:
                self.waiting += 1
        self.started, self._handle, self._finish = False, None, None
        self._direct, self._flights, self._sparse = [], [], []

    def adopt(self, slot: Slot) -> None:
        """Takes a gradient as autograd has left it."""

    def start(self) -> None:
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
                and (grad.is_cpu or is_usable(grad))
                and grad.is_contiguous()
                and grad.dtype is slot.dtype
                and not grad.is_neg()
                and not grad.is_conj()
            ):
                target = self._target(slot, grad)
                members.append(
                    (slot.operation, slot.number, slot.shape, grad.data_ptr(), target.data_ptr())
                )
                sources.append(grad)
                self._direct.append((parameter, target))
                continue
            flight = self._board(slot, _nothing(slot) if grad is None else grad)
            if flight is not None:
                self._flights.append(flight)
                if self._stateful is None:
                    members.append((*describe(slot.operation, flight.wire), flight.wire.data_ptr()))
                    sources.append(flight.wire)
        if self._stateful is not None and self._flights:
            self._compress(
                self._stateful, [(flight.slot.name, flight.wire) for flight in self._flights]
            )
        if not members:
            return
        arguments = self.options.reduction.arguments
        keep = (sources, self._direct, self._flights)
        if len(members) == 1:
            self._handle = table.submit(
                keep, len, engine.allreduce, *members[0], *arguments, False, spot(sources[0])
            )
        else:
            self._handle = table.submit(
                keep, len, engine.grouped_allreduce, members, *arguments, spots(sources)
            )

    def _target(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """Returns the memory that receives the reduced gradient: the gradient's own."""
        del slot
        return grad

    def _board(self, slot: Slot, grad: torch.Tensor) -> _Flight | None:
        """Makes a gradient what the engine can work on; a sparse one is gathered instead."""
        if grad.layout != torch.strided:
            if not self.options.sparse_as_dense:
                self._start_sparse(slot, grad)
                return None
            grad = grad.to_dense()
        if self._stateful is not None:
            return _Flight(slot, grad, grad.detach(), None)
        wire, ctx = self._cast.compress(grad.detach())
        return _Flight(slot, grad, usable(wire), ctx)

    def _compress(
        self, compressor: StatefulCompressor, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Starts a reduction in the compressor's own form."""
        reduction = self.options.reduction
        exchange = EngineExchange(gradients[0][0], reduction.process_set)
        self._finish = compressor.start(gradients, exchange, reduction.op == Average)

    def _start_sparse(self, slot: Slot, grad: torch.Tensor) -> None:
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

    def land(self) -> None:
        """Waits until the gradients are reduced and puts them where the optimizer reads them.

        Raises:
            ValueError: When ranks disagree about a gradient.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        if self._finish is not None:
            for flight, reduced in zip(self._flights, self._finish(), strict=True):
                self._put(flight.slot.parameter, reduced, flight.slot.sparse_dim)
        if self._handle is not None:
            table.synchronize(self._handle)
            for parameter, reduced in self._direct:
                if parameter.grad is not reduced:
                    self._put(parameter, reduced, 0)
            for slot, grad, wire, ctx in self._flights:
                reduced = self._cast.decompress(wire.to(grad.device), ctx)
                self._put(slot.parameter, reduced, slot.sparse_dim)
        for slot, result in self._sparse:
            slot.parameter.grad = result()

    def _put(self, parameter: torch.Tensor, reduced: torch.Tensor, sparse_dim: int) -> None:
        """Makes a result the parameter's gradient, in the layout that it has, or would have."""
        current = parameter.grad
        if current is not None and current.layout == torch.strided:
            current.detach().copy_(reduced)
            return
        if current is not None:
            sparse_dim = current.sparse_dim()
        parameter.grad = reduced.to_sparse(sparse_dim) if sparse_dim else reduced


def _nothing(slot: Slot) -> torch.Tensor:
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


class ViewBucket(Bucket):
    """Parameters whose gradients are views of one memory, which is reduced where it lies.

    What autograd stored elsewhere, since `zero_grad` dropped the view, is copied in and the view
    put back.

    Args:
        slots: The parameters, of one dtype on one device, in the same order on all ranks.
        options: How gradients are reduced.
    """

    views = True

    def __init__(self, slots: list[Slot], options: Options) -> None:
        super().__init__(slots, options)
        first = slots[0].parameter
        step = max(1, ALIGNMENT // first.element_size())
        starts = [0]
        for slot in slots:
            starts.append(starts[-1] + -(-slot.parameter.numel() // step) * step)
        self._memory, self._mapped = _memory(max(1, starts[-1]), first)
        self._views = {
            slot: self._memory[start : start + slot.parameter.numel()].view(slot.parameter.shape)
            for slot, start in zip(slots, starts, strict=False)
        }
        # Byte offsets of gradients that are copied past the caches.
        self._offsets: dict[Slot, int] = {}
        if self._mapped is not None and self._memory.nbytes >= PAST_CACHES:
            self._offsets = {
                slot: start * first.element_size()
                for slot, start in zip(slots, starts, strict=False)
                if slot.parameter.nbytes >= LARGE
            }
        self._name = f"allreduce.bucket.{slots[0].name}"
        self._wire: torch.Tensor | None = None
        self._ctx: Any = None
        for slot in slots:
            if slot.parameter.grad is not None:
                self.adopt(slot)

    def reset(self, passes: int) -> None:
        """Resets the counts and forgets the started reduction."""
        super().reset(passes)
        self._wire = None

    def adopt(self, slot: Slot) -> None:
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
        elif self._mapped is not None and self._goes_past(slot, grad, view):
            self._mapped.store(self._offsets[slot], grad.data_ptr(), view.nbytes)
        else:
            view.copy_(grad.detach() if grad.layout == torch.strided else grad.detach().to_dense())
        slot.parameter.grad = view

    def _goes_past(self, slot: Slot, grad: torch.Tensor, view: torch.Tensor) -> bool:
        """Returns whether a gradient is copied past the caches, by one thread: not if torch
        copies with several.
        """
        alone = slot in self._offsets and torch.get_num_threads() == 1
        return alone and _is_plain(grad, view) and not self._holds(grad)

    def _holds(self, grad: torch.Tensor) -> bool:
        """Returns whether the gradient is in the bucket's memory already, under its own name or
        a neighbour's.
        """
        return 0 <= grad.data_ptr() - self._memory.data_ptr() < self._memory.nbytes

    def start(self) -> None:
        """Starts the reduction; parameters without a gradient take part with zeros.

        Raises:
            FarandoleInternalError: When the world is broken already.
        """
        self.started = True
        live = [slot for slot in self.slots if slot.parameter.requires_grad]
        for slot in live:
            self.adopt(slot)
        if not live:
            return
        if self._stateful is not None:
            self._compress(self._stateful, [(slot.name, self._views[slot]) for slot in self.slots])
            return
        wire, self._ctx = self._cast.compress(self._memory)
        self._wire = usable(wire)
        described = describe(self._name, self._wire)
        arguments = (
            *described,
            self._wire.data_ptr(),
            *self.options.reduction.arguments,
            False,
            spot(self._wire),
        )
        self._handle = table.submit(self._wire, len, engine.allreduce, *arguments)

    def land(self) -> None:
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


def _is_plain(grad: torch.Tensor, like: torch.Tensor) -> bool:
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


def _memory(count: int, like: torch.Tensor) -> tuple[torch.Tensor, engine.Mapped | None]:
    """Zeros for `count` numbers; on the host in memory that the other ranks there can work in,
    which comes as well.
    """
    if like.device.type != "cpu":
        place = spot(like) if is_usable(like) else None
        given = None if place is None else engine.device_memory(*place, count * like.element_size())
        if given is None:
            return torch.zeros(count, dtype=like.dtype, device=like.device), None
        return torch.as_tensor(given, device=like.device).view(like.dtype).zero_(), None
    mapped = engine.mapped(count * like.element_size())
    return torch.frombuffer(mapped, dtype=like.dtype, count=count).zero_(), mapped
