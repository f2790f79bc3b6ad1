# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Moves tensors from ranks that have them to ranks that lack them.

Tensors are moved as bytes, in pieces of limited size: a large tensor is cut, small ones are packed
into one piece. All ranks of the world take part, because a collective needs them all, but a rank
that neither sends nor takes has no memory for the tensors. There are two ways:

- Every sender sends a part of each piece to each taker, all at the same time, by `alltoall`. Only
  takers receive. The taker copies each piece into its tensors. The tensors must have the same bytes
  on all senders, as `farandole.torch._state_comparison` finds out.
- If there are more takers than senders, `alltoall` would send each byte too often, and one sender
  broadcasts each piece instead. In a world of two, the sender also broadcasts, because the taker
  then receives a large tensor without a copy.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from farandole.common import basics
from farandole.torch._alltoall import alltoall_async
from farandole.torch._broadcast import broadcast_async_
from farandole.torch._handles import synchronize
from farandole.torch._state_comparison import tensor_bytes
from farandole.torch.functions import rebuild_state

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_PIECE_BYTES: Final = 16 << 20
"""Bytes of a piece at most. The memory for a piece is one that workers keep when they free it."""
_LARGE_TENSOR_BYTES: Final = 1 << 20
"""Bytes from which a tensor is not packed with others; not more than a piece has."""
_CUT_ALIGNMENT_BYTES: Final = 16
"""A large tensor is cut at multiples of this many bytes, so between two elements."""
_MAX_PIECES_IN_FLIGHT: Final = 4
"""Pieces on their way at a time."""


class TransferRoles(NamedTuple):
    """The ranks that send and the ranks that take, the same on all ranks."""

    senders: list[int]
    """Ranks that have equal tensors, in ascending order; at least one."""
    takers: list[int]
    """Ranks that lack them, in ascending order."""

    @property
    def sends_pieces_in_parts(self) -> bool:
        """Whether each sender sends a part of each piece; if not, the first one broadcasts it."""
        return basics.size() > 2 and len(self.takers) <= len(self.senders)  # noqa: PLR2004 - the two of a pair


class TensorLayouts(list[tuple[tuple[int, ...], torch.dtype]]):
    """The shapes and data types of tensors."""

    @classmethod
    def from_tensors(cls, tensors: Sequence[torch.Tensor]) -> TensorLayouts:
        """Returns the layout of these tensors."""
        return cls((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def meta_tensors(self) -> list[torch.Tensor]:
        """Tensors of this layout without memory, for ranks that neither send nor take."""
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self]


class ByteSpan(NamedTuple):
    """Bytes of a tensor."""

    number: int
    """Index of the tensor in the list of moved tensors."""
    start: int
    end: int


class TransferPiece(NamedTuple):
    """A unit of the transfer."""

    spans: list[ByteSpan]
    """One span of a large tensor, or several small tensors."""
    is_packed: bool
    """Whether the piece has small tensors, which are copied into host memory one by one."""

    @property
    def byte_count(self) -> int:
        """Number of bytes."""
        return sum(span.end - span.start for span in self.spans)


def split_into_pieces(sizes: Sequence[int]) -> list[TransferPiece]:
    """Cuts large tensors, and packs small ones together.

    Args:
        sizes: Size of each tensor, in bytes.
    """
    pieces: list[TransferPiece] = []
    packed: list[ByteSpan] = []
    held = 0
    for index, size in enumerate(sizes):
        if size >= _LARGE_TENSOR_BYTES:
            starts = range(0, size, _MAX_PIECE_BYTES)
            pieces += [
                TransferPiece(
                    [ByteSpan(index, start, min(start + _MAX_PIECE_BYTES, size))], is_packed=False
                )
                for start in starts
            ]
        elif size > 0:
            if held + size > _MAX_PIECE_BYTES:
                pieces.append(TransferPiece(packed, is_packed=True))
                packed, held = [], 0
            packed.append(ByteSpan(index, 0, size))
            held += size
    return [*pieces, TransferPiece(packed, is_packed=True)] if packed else pieces


def part_offsets(size: int, parts: int) -> list[int]:
    """Returns the offset at which each part of a piece begins, and the end of the last part."""
    return [
        *(
            size * part // parts // _CUT_ALIGNMENT_BYTES * _CUT_ALIGNMENT_BYTES
            for part in range(parts)
        ),
        size,
    ]


def transfer_tensors(name: str, tensors: Sequence[torch.Tensor], roles: TransferRoles) -> None:
    """Overwrites the tensors of takers with the tensors of senders.

    After an error, some tensors of a taker may be overwritten, also in part.

    Args:
        name: Names the operations across ranks.
        tensors: The same shapes and data types on all ranks. A rank that neither sends nor takes
            passes `TensorLayouts.meta_tensors`.
        roles: The ranks that send and the ranks that take.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    with torch.no_grad():
        mover = _StateTransfer(name, tensors, roles)
        flights: deque[tuple[TransferPiece, int]] = deque()
        try:
            for piece in split_into_pieces(
                [tensor.numel() * tensor.element_size() for tensor in tensors]
            ):
                if len(flights) == _MAX_PIECES_IN_FLIGHT:
                    mover.finish_piece(*flights.popleft())
                flights.append((piece, mover.start_piece(piece)))
            while flights:
                mover.finish_piece(*flights.popleft())
        except Exception:
            for _, handle in flights:  # they write to memory of the caller until they end
                with suppress(Exception):
                    synchronize(handle)
            raise
        mover.copy_to_noncontiguous()


class _StateTransfer:
    """The part of one rank in a transfer.

    Args:
        name: As for `transfer_tensors`.
        tensors: As for `transfer_tensors`.
        roles: As for `transfer_tensors`.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], roles: TransferRoles) -> None:
        self._name = name
        self._tensors = tensors
        self._roles = roles
        self._rank, self._size = basics.rank(), basics.size()
        self._is_taker = self._rank in roles.takers
        self._has_parts = roles.sends_pieces_in_parts
        self._is_sender = self._rank in (roles.senders if self._has_parts else roles.senders[:1])
        self._contiguous_copies: dict[int, torch.Tensor] = {}
        """Contiguous stand-ins for the taker's tensors that are not contiguous."""
        self._last_tensor_bytes: tuple[int, torch.Tensor] | None = None
        """The bytes of the tensor that was used last."""
        self._count = 0

    def start_piece(self, piece: TransferPiece) -> int:
        """Starts to move a piece; returns the handle of the operation."""
        name = f"{self._name}.{self._count}"
        self._count += 1
        if self._has_parts:
            return self._start_piece_by_alltoall(name, piece)
        if self._is_sender:
            buffer = self._piece_bytes(piece)
        elif self._is_taker and not piece.is_packed:
            buffer = self._span_bytes(piece.spans[0])
        else:
            buffer = torch.empty(piece.byte_count, dtype=torch.uint8)
        return broadcast_async_(buffer, self._roles.senders[0], name)

    def _start_piece_by_alltoall(self, name: str, piece: TransferPiece) -> int:
        senders, takers = self._roles
        splits = [0] * self._size
        if not self._is_sender:
            in_place = self._is_taker and not piece.is_packed
            nothing = (
                self._span_bytes(piece.spans[0])[:0]
                if in_place
                else torch.empty(0, dtype=torch.uint8)
            )
            return alltoall_async(nothing, splits, name)
        own_index = senders.index(self._rank)
        start, end = part_offsets(piece.byte_count, len(senders))[own_index : own_index + 2]
        for taker in takers:
            splits[taker] = end - start
        part = self._piece_bytes(piece)[start:end]
        return alltoall_async(part if len(takers) == 1 else part.repeat(len(takers)), splits, name)

    def finish_piece(self, piece: TransferPiece, handle: int) -> None:
        """Waits for a piece, and copies it to its tensors."""
        arrived = synchronize(handle)
        if not self._is_taker or not (self._has_parts or piece.is_packed):
            return  # another rank's, or received where it belongs
        source = arrived[0] if self._has_parts else arrived
        at = 0
        for span in piece.spans:
            count = span.end - span.start
            self._span_bytes(span).copy_(source[at : at + count])
            at += count

    def copy_to_noncontiguous(self) -> None:
        """Copies the received bytes to tensors that are not contiguous."""
        for index, dense in self._contiguous_copies.items():
            self._tensors[index].detach().copy_(dense)

    def _piece_bytes(self, piece: TransferPiece) -> torch.Tensor:
        """Returns the bytes of a piece on a sender."""
        windows = [self._span_bytes(span) for span in piece.spans]
        return torch.cat([window.cpu() for window in windows]) if piece.is_packed else windows[0]

    def _span_bytes(self, span: ByteSpan) -> torch.Tensor:
        """Returns the bytes of a span, where they are."""
        if self._last_tensor_bytes is None or self._last_tensor_bytes[0] != span.number:
            self._last_tensor_bytes = span.number, self._tensor_bytes(span.number)
        return self._last_tensor_bytes[1][span.start : span.end]

    def _tensor_bytes(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index].detach()
        if self._is_taker and (not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()):
            if index not in self._contiguous_copies:
                self._contiguous_copies[index] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=tensor.device
                )
            tensor = self._contiguous_copies[index]
        return tensor_bytes(tensor)


def allocate_optimizer_state(
    options: list[Any], states: list[Any], param_groups: list[dict[str, Any]]
) -> tuple[list[Any], list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """Makes memory for the tensors of an optimizer's described options and states.

    Args:
        options: Options of each group.
        states: State of each parameter.
        param_groups: The groups of this rank's optimizer.

    Returns:
        Options and states with that memory, and the tensors of each, in their order.
    """
    option_tensors: dict[int, torch.Tensor] = {}
    state_tensors: dict[int, torch.Tensor] = {}
    firsts = [group["params"][0] if group["params"] else None for group in param_groups]
    groups = [
        rebuild_state(group, first, option_tensors)
        for group, first in zip(options, firsts, strict=True)
    ]
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    built = [
        None if state is None else rebuild_state(state, parameter, state_tensors)
        for state, parameter in zip(states, parameters, strict=True)
    ]
    return groups, built, _tensors_in_order(option_tensors), _tensors_in_order(state_tensors)


def _tensors_in_order(slots: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return [slots[index] for index in range(len(slots))]
