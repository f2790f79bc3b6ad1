# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The assignment of the rows of an epoch while ranks come and go, for loaders that fault-tolerant
optimizers share.

An epoch is assigned in rounds. In each round, every rank gets a piece. All ranks keep the same
record, so each knows the positions of the others. The pieces of a step count when the step is
finished. When the world changes, the ranks exchange the pieces that they hold. The pieces of lost
ranks are assigned again at the end of the epoch. New ranks, which hold no piece for the present
step, get a piece first.

- `RD-T1`: the rows that are not counted yet are those that are not assigned, and those of the
  present step.
- `RD-T2`: after an agreement all ranks have the same record.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Piece(NamedTuple):
    """Rows of one rank: of the batch that a reader of these arguments reads first, each
    `stride`th from `offset` on.
    """

    epoch: int
    start: int
    rank: int
    size: int
    batch: int
    offset: int = 0
    stride: int = 1

    def part(self, number: int, parts: int) -> Piece:
        """Returns one of several parts of it."""
        return self._replace(offset=self.offset + number * self.stride, stride=self.stride * parts)


class Round(NamedTuple):
    """Pieces of several ranks."""

    whole: Piece
    """With rank 0 where readers of different ranks read them, or what is divided."""
    size: int
    is_divided: bool

    def piece(self, number: int) -> Piece:
        """Returns the piece of one of them."""
        return (
            self.whole.part(number, self.size)
            if self.is_divided
            else self.whole._replace(rank=number)
        )

    def pieces(self) -> list[Piece]:
        """Returns all of them."""
        return [self.piece(number) for number in range(self.size)]


@dataclass(frozen=True)
class Place:
    """The rows of an epoch that are not assigned yet."""

    epoch: int
    start: int
    """The first row, in the order of the epoch, that was never dealt."""
    left: tuple[Piece, ...] = ()
    """The rows that were assigned to lost ranks."""


@dataclass
class Turns:
    """The books of one rank.

    Args:
        total: Rows of an epoch.
        batch: Rows of a piece, at most.
        drops: Whether rows that do not fill a round are left out.
        rank: This rank.
        size: How many there are.
        place: Where to begin.
    """

    total: int
    batch: int
    drops: bool
    rank: int
    size: int
    place: Place
    rounds: int = 0
    """Rounds that were dealt since the last step was finished."""
    dealt: list[Round] = field(default_factory=list)
    """The rows that were assigned since."""
    hand: list[Piece] = field(default_factory=list)
    """The rows that this rank has taken since."""
    due: list[Piece] = field(default_factory=list)
    """The rows that were assigned to this rank and not taken."""

    @classmethod
    def told(cls, records: Sequence[dict[str, Any] | None]) -> Turns:
        """Returns the state of a new rank, from the records of the others; call `agree` next."""
        one = next(record for record in records if record is not None)
        return cls(one["total"], one["batch"], one["drops"], 0, len(records), one["place"])

    def __post_init__(self) -> None:
        """Passes over an epoch of which nothing is left."""
        self.start_at(self.place)

    @property
    def epoch(self) -> int:
        """The epoch that the next piece is of."""
        return self.place.epoch if self.due or self._has_more(self.place) else self.place.epoch + 1

    def start_at(self, place: Place) -> None:
        """Begins somewhere, with nothing in hand."""
        self.place, self.rounds, self.dealt, self.hand, self.due = place, 0, [], [], []

    def begin(self) -> int:
        """Begins an iteration; the epoch that it is of."""
        if self.epoch != self.place.epoch:
            self.place = Place(self.epoch, 0)
        return self.place.epoch

    def next(self, epoch: int) -> Piece | None:
        """This rank's piece of the next round; `None` at the end of the epoch."""
        if self.due and self.due[0].epoch <= epoch:
            self.hand.append(self.due.pop(0))
            return self.hand[-1]
        if self.due or self.place.epoch != epoch or not self._has_more(self.place):
            return None
        self.place, dealt = self._deal(self.place, self.size)
        self.rounds += 1
        self.dealt.append(dealt)
        self.hand.append(dealt.piece(self.rank))
        return self.hand[-1]

    def rounds_left(self) -> int:
        """Rounds until the end of the epoch, as things are."""
        place = self.place if self.epoch == self.place.epoch else Place(self.epoch, 0)
        whole, left = self.size * self.batch, self.total - place.start
        return (
            len(self.due) + len(place.left) + (left // whole if self.drops else -(-left // whole))
        )

    def finished(self) -> None:
        """The step that the pieces in hand were for is finished, here or at the rank whose state
        this one took.
        """
        self.rounds, self.dealt, self.hand = 0, [], []

    def _has_more(self, place: Place) -> bool:
        least = self.size * self.batch if self.drops else 1
        return bool(place.left) or self.total - place.start >= least

    def _deal(self, place: Place, size: int) -> tuple[Place, Round]:
        """Deals pieces out to so many ranks, empty ones when nothing is left."""
        left = self.total - place.start
        if left >= (size * self.batch if self.drops else 1):
            whole = Piece(place.epoch, place.start, 0, size, self.batch)
            return replace(place, start=min(place.start + size * self.batch, self.total)), Round(
                whole, size, False
            )
        if place.left:
            return replace(place, left=place.left[1:]), Round(place.left[0], size, True)
        nothing = Piece(place.epoch, 0, 0, 1, 1, offset=1)
        return place, Round(nothing, size, True)

    def rows(self, piece: Piece) -> int:
        """Returns the number of rows of a piece."""
        read = min(piece.batch, -(-(self.total - piece.start - piece.rank) // piece.size))
        return max(0, -(-(read - piece.offset) // piece.stride))

    def record(self, finishes: bool = False) -> dict[str, Any]:
        """Returns the message to the other ranks; it may describe the state after `finished`
        before that call.
        """
        rounds, dealt, hand = (
            (0, [], []) if finishes else (self.rounds, list(self.dealt), list(self.hand))
        )
        kind = {"total": self.total, "batch": self.batch, "drops": self.drops}
        return {**kind, "place": self.place, "rounds": rounds, "dealt": dealt, "hand": hand}

    def agree(self, records: Sequence[dict[str, Any] | None], rank: int) -> None:
        """Takes over the agreed state of the ranks of a new world.

        Args:
            records: What each of them has told; `None` of those that are new. Some rank has told
                one.
            rank: This rank among them.
        """
        best = max(
            (record for record in records if record is not None),
            key=lambda record: record["rounds"],
        )
        hands = [[] if record is None else record["hand"] for record in records]
        held = {piece for hand in hands for piece in hand}
        dealt = [piece for turn in best["dealt"] for piece in turn.pieces()]
        lost = [piece for piece in dealt if piece not in held and self.rows(piece) > 0]
        place = replace(best["place"], left=(*best["place"].left, *lost))
        self.rank, self.size = rank, len(records)
        self.rounds = best["rounds"]
        self.dealt = [Round(piece, 1, True) for hand in hands for piece in hand]
        self.hand, self.due = list(hands[rank]), []
        for turn in range(self.rounds):
            sharers = [other for other, hand in enumerate(hands) if len(hand) <= turn]
            if not sharers:
                continue
            place, turned = self._deal(place, len(sharers))
            self.dealt.append(turned)
            if rank in sharers:
                self.due.append(turned.piece(sharers.index(rank)))
        self.place = place
