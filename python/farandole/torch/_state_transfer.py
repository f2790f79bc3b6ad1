# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Moves tensors from ranks that have them to ranks that lack them.

Tensors are moved as bytes, in pieces of limited size: a large tensor is cut, small ones are packed
into one piece. All ranks of the world take part, because a collective needs them all, but a rank
that neither sends nor takes has no memory for the tensors. There are two ways:

- Every sender sends a part of each piece to each taker, all at the same time, by `alltoall`. Nobody
  else receives anything. The taker copies each piece into its place. The tensors must have the same
  bytes on all senders, as `farandole.torch._state_comparison` finds out.
- If there are more takers than senders, each byte would be sent too often. Then one sender
  broadcasts each piece. In a world of two, the sender does so, too, because a large tensor is then
  received in its place.
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
from farandole.torch._state_comparison import bytes_of
from farandole.torch.functions import rebuilt

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIECE: Final = 16 << 20
"""Bytes of a piece at most. The memory for a piece is one that workers keep when they free it."""
_LARGE: Final = 1 << 20
"""Bytes from which a tensor is not packed with others; not more than a piece has."""
_EDGE: Final = 16
"""A large tensor is cut at multiples of this many bytes, so between two elements."""
_AHEAD: Final = 4
"""Pieces on their way at a time."""


class Roles(NamedTuple):
    """The ranks that send and those that take, the same on all ranks. Other ranks do neither."""

    senders: list[int]
    """Ranks that have equal tensors, in ascending order; at least one."""
    takers: list[int]
    """Ranks that lack them, in ascending order."""

    @property
    def has_parts(self) -> bool:
        """Whether each sender sends a part of each piece; if not, the first one broadcasts it."""
        return basics.size() > 2 and len(self.takers) <= len(self.senders)  # noqa: PLR2004 - the two of a pair


class Layout(list[tuple[tuple[int, ...], torch.dtype]]):
    """The shapes and data types of tensors."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Returns the layout of these tensors."""
        return cls((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def shadows(self) -> list[torch.Tensor]:
        """Tensors of this layout without memory, for ranks that neither send nor take."""
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self]


class Span(NamedTuple):
    """Bytes of a tensor."""

    number: int
    """The place of the tensor among those that are moved."""
    start: int
    end: int


class Piece(NamedTuple):
    """A unit of the transfer."""

    spans: list[Span]
    """One span of a large tensor, or several small tensors."""
    is_packed: bool
    """Whether it has small tensors, which are copied into host memory one after another."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(span.end - span.start for span in self.spans)


def pieces_of(sizes: Sequence[int]) -> list[Piece]:
    """Cuts large tensors, and packs small ones together.

    Args:
        sizes: Of each tensor, in bytes.
    """
    pieces: list[Piece] = []
    packed: list[Span] = []
    held = 0
    for index, size in enumerate(sizes):
        if size >= _LARGE:
            starts = range(0, size, _PIECE)
            pieces += [
                Piece([Span(index, start, min(start + _PIECE, size))], is_packed=False)
                for start in starts
            ]
        elif size > 0:
            if held + size > _PIECE:
                pieces.append(Piece(packed, is_packed=True))
                packed, held = [], 0
            packed.append(Span(index, 0, size))
            held += size
    return [*pieces, Piece(packed, is_packed=True)] if packed else pieces


def edges_of(size: int, parts: int) -> list[int]:
    """Returns the offset at which each part of a piece begins, and the end of the last part."""
    return [*(size * part // parts // _EDGE * _EDGE for part in range(parts)), size]


def move(name: str, tensors: Sequence[torch.Tensor], roles: Roles) -> None:
    """Overwrites the tensors of takers with those of senders.

    If it fails, some tensors of a taker may have been overwritten, also in part.

    Args:
        name: Names the operations across ranks.
        tensors: The same shapes and data types on all ranks: `Layout.shadows` on those that neither
            send nor take.
        roles: The ranks that send and those that take.

    Raises:
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    with torch.no_grad():
        mover = _Mover(name, tensors, roles)
        flights: deque[tuple[Piece, int]] = deque()
        try:
            for piece in pieces_of([tensor.numel() * tensor.element_size() for tensor in tensors]):
                if len(flights) == _AHEAD:
                    mover.land(*flights.popleft())
                flights.append((piece, mover.start(piece)))
            while flights:
                mover.land(*flights.popleft())
        except Exception:
            for _, handle in flights:  # they write to memory of the caller until they end
                with suppress(Exception):
                    synchronize(handle)
            raise
        mover.finish()


class _Mover:
    """The part of one rank in a move.

    Args:
        name: As for `move`.
        tensors: As for `move`.
        roles: As for `move`.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], roles: Roles) -> None:
        self._name = name
        self._tensors = tensors
        self._roles = roles
        self._rank, self._size = basics.rank(), basics.size()
        self._takes = self._rank in roles.takers
        self._has_parts = roles.has_parts
        self._sends = self._rank in (roles.senders if self._has_parts else roles.senders[:1])
        self._dense: dict[int, torch.Tensor] = {}
        """Contiguous stand-ins for the taker's tensors that are not contiguous."""
        self._current: tuple[int, torch.Tensor] | None = None
        """The bytes of the tensor that was looked at last."""
        self._count = 0

    def start(self, piece: Piece) -> int:
        """Starts to move a piece; returns the handle of the operation."""
        name = f"{self._name}.{self._count}"
        self._count += 1
        if self._has_parts:
            return self._start_parts(name, piece)
        if self._sends:
            buffer = self._load(piece)
        elif self._takes and not piece.is_packed:
            buffer = self._window(piece.spans[0])
        else:
            buffer = torch.empty(piece.size, dtype=torch.uint8)
        return broadcast_async_(buffer, self._roles.senders[0], name)

    def _start_parts(self, name: str, piece: Piece) -> int:
        senders, takers = self._roles
        splits = [0] * self._size
        if not self._sends:
            in_place = self._takes and not piece.is_packed
            nothing = (
                self._window(piece.spans[0])[:0] if in_place else torch.empty(0, dtype=torch.uint8)
            )
            return alltoall_async(nothing, splits, name)
        place = senders.index(self._rank)
        start, end = edges_of(piece.size, len(senders))[place : place + 2]
        for taker in takers:
            splits[taker] = end - start
        part = self._load(piece)[start:end]
        return alltoall_async(part if len(takers) == 1 else part.repeat(len(takers)), splits, name)

    def land(self, piece: Piece, handle: int) -> None:
        """Waits for a piece, and puts it where it belongs."""
        arrived = synchronize(handle)
        if not self._takes or not (self._has_parts or piece.is_packed):
            return  # another rank's, or received where it belongs
        source = arrived[0] if self._has_parts else arrived
        at = 0
        for span in piece.spans:
            count = span.end - span.start
            self._window(span).copy_(source[at : at + count])
            at += count

    def finish(self) -> None:
        """Copies the received bytes to tensors that are not contiguous."""
        for index, dense in self._dense.items():
            self._tensors[index].detach().copy_(dense)

    def _load(self, piece: Piece) -> torch.Tensor:
        """Returns the bytes of a piece on a sender."""
        windows = [self._window(span) for span in piece.spans]
        return torch.cat([window.cpu() for window in windows]) if piece.is_packed else windows[0]

    def _window(self, span: Span) -> torch.Tensor:
        """Returns the bytes of a span, where they are."""
        if self._current is None or self._current[0] != span.number:
            self._current = span.number, self._bytes(span.number)
        return self._current[1][span.start : span.end]

    def _bytes(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index].detach()
        if self._takes and (not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()):
            if index not in self._dense:
                self._dense[index] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=tensor.device
                )
            tensor = self._dense[index]
        return bytes_of(tensor)


def room(
    options: list[Any], states: list[Any], param_groups: list[dict[str, Any]]
) -> tuple[list[Any], list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """Makes memory for the tensors of an optimizer's described options and states.

    Args:
        options: Of each group.
        states: Of each parameter.
        param_groups: The groups of this rank's optimizer.

    Returns:
        Options and states with that memory, and the tensors of each, in their order.
    """
    kept: dict[int, torch.Tensor] = {}
    sent: dict[int, torch.Tensor] = {}
    firsts = [group["params"][0] if group["params"] else None for group in param_groups]
    groups = [rebuilt(group, first, kept) for group, first in zip(options, firsts, strict=True)]
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    built = [
        None if state is None else rebuilt(state, parameter, sent)
        for state, parameter in zip(states, parameters, strict=True)
    ]
    return groups, built, _ordered(kept), _ordered(sent)


def _ordered(slots: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    return [slots[index] for index in range(len(slots))]
