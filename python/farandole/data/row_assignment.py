# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The assignment of the rows of an epoch while ranks come and go, for loaders that fault-tolerant
optimizers share.

An epoch is assigned in rounds. In each round, every rank gets a piece. All ranks keep the same
record, so each knows the positions of the others. The pieces of a step count when the step is
finished. When the world changes, the ranks exchange the pieces that they hold. The pieces of lost
ranks are assigned again at the end of the epoch. New ranks, which hold no piece for the present
step, get a piece first.

- `RD-T1`: the rows that are not counted yet are the unassigned rows and the rows of the present
  step.
- `RD-T2`: after an agreement all ranks have the same record.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowPiece(NamedTuple):
    """Rows of one rank: every `stride`th row, from `offset` on, of the first batch of a reader with
    these arguments.
    """

    epoch: int
    start: int
    rank: int
    size: int
    batch: int
    offset: int = 0
    stride: int = 1

    def part_of_piece(self, number: int, parts: int) -> RowPiece:
        """Returns one of several parts of the piece."""
        return self._replace(offset=self.offset + number * self.stride, stride=self.stride * parts)


class RoundPieces(NamedTuple):
    """Pieces of several ranks."""

    whole: RowPiece
    """The piece of rank 0; with `is_divided`, the piece that is divided among the ranks."""
    size: int
    is_divided: bool

    def piece_of_rank(self, number: int) -> RowPiece:
        """Returns the piece of one rank."""
        return (
            self.whole.part_of_piece(number, self.size)
            if self.is_divided
            else self.whole._replace(rank=number)
        )

    def all_pieces(self) -> list[RowPiece]:
        """Returns the pieces of all ranks."""
        return [self.piece_of_rank(number) for number in range(self.size)]


@dataclass(frozen=True)
class UnassignedRows:
    """The rows of an epoch that are not assigned yet."""

    epoch: int
    start: int
    """The first row, in the order of the epoch, that was never assigned."""
    lost_pieces: tuple[RowPiece, ...] = ()
    """The rows that were assigned to lost ranks."""


@dataclass
class RowAssignment:
    """One rank's record of the assigned rows.

    Args:
        total: Rows of an epoch.
        batch: Rows of a piece, at most.
        drops: Whether rows that do not fill a round are left out.
        rank: This rank.
        size: Number of ranks.
        position: The position to begin at.
    """

    total: int
    batch: int
    drops: bool
    rank: int
    size: int
    position: UnassignedRows
    rounds: int = 0
    """Rounds assigned since the last finished step."""
    dealt_rounds: list[RoundPieces] = field(default_factory=list)
    """The rows assigned since the last finished step."""
    taken_pieces: list[RowPiece] = field(default_factory=list)
    """The rows that this rank has taken since the last finished step."""
    pending_pieces: list[RowPiece] = field(default_factory=list)
    """The rows that are assigned to this rank and not taken yet."""

    @classmethod
    def from_records(cls, records: Sequence[dict[str, Any] | None]) -> RowAssignment:
        """Returns the state of a new rank, from the other ranks' records; call
        `adopt_agreed_records` next.
        """
        known = next(record for record in records if record is not None)
        return cls(known["total"], known["batch"], known["drops"], 0, len(records), known["place"])

    def __post_init__(self) -> None:
        """Skips an epoch without remaining rows."""
        self.reset_to_position(self.position)

    @property
    def epoch(self) -> int:
        """The epoch of the next piece."""
        return (
            self.position.epoch
            if self.pending_pieces or self._has_unassigned_rows(self.position)
            else self.position.epoch + 1
        )

    def reset_to_position(self, position: UnassignedRows) -> None:
        """Begins at a position, without assigned pieces."""
        self.position, self.rounds, self.dealt_rounds, self.taken_pieces, self.pending_pieces = (
            position,
            0,
            [],
            [],
            [],
        )

    def advance_to_next_epoch(self) -> int:
        """Begins an iteration and returns its epoch."""
        if self.epoch != self.position.epoch:
            self.position = UnassignedRows(self.epoch, 0)
        return self.position.epoch

    def next_piece(self, epoch: int) -> RowPiece | None:
        """Returns this rank's piece of the next round; `None` at the end of the epoch."""
        if self.pending_pieces and self.pending_pieces[0].epoch <= epoch:
            self.taken_pieces.append(self.pending_pieces.pop(0))
            return self.taken_pieces[-1]
        if (
            self.pending_pieces
            or self.position.epoch != epoch
            or not self._has_unassigned_rows(self.position)
        ):
            return None
        self.position, dealt = self._assign_next_round(self.position, self.size)
        self.rounds += 1
        self.dealt_rounds.append(dealt)
        self.taken_pieces.append(dealt.piece_of_rank(self.rank))
        return self.taken_pieces[-1]

    def rounds_left(self) -> int:
        """Returns the number of rounds until the end of the epoch, if the world does not change."""
        position = (
            self.position if self.epoch == self.position.epoch else UnassignedRows(self.epoch, 0)
        )
        whole, remaining_rows = self.size * self.batch, self.total - position.start
        return (
            len(self.pending_pieces)
            + len(position.lost_pieces)
            + (remaining_rows // whole if self.drops else -(-remaining_rows // whole))
        )

    def commit_taken_pieces(self) -> None:
        """Counts the taken pieces: their step is finished, on this rank or on the rank whose state
        this rank has adopted.
        """
        self.rounds, self.dealt_rounds, self.taken_pieces = 0, [], []

    def _has_unassigned_rows(self, position: UnassignedRows) -> bool:
        min_rows = self.size * self.batch if self.drops else 1
        return bool(position.lost_pieces) or self.total - position.start >= min_rows

    def _assign_next_round(
        self, position: UnassignedRows, size: int
    ) -> tuple[UnassignedRows, RoundPieces]:
        """Assigns one piece to each of `size` ranks; the pieces are empty when no row is left."""
        remaining_rows = self.total - position.start
        if remaining_rows >= (size * self.batch if self.drops else 1):
            whole = RowPiece(position.epoch, position.start, 0, size, self.batch)
            return replace(
                position, start=min(position.start + size * self.batch, self.total)
            ), RoundPieces(whole, size, False)
        if position.lost_pieces:
            return replace(position, lost_pieces=position.lost_pieces[1:]), RoundPieces(
                position.lost_pieces[0], size, True
            )
        nothing = RowPiece(position.epoch, 0, 0, 1, 1, offset=1)
        return position, RoundPieces(nothing, size, True)

    def piece_row_count(self, piece: RowPiece) -> int:
        """Returns the number of rows of a piece."""
        read = min(piece.batch, -(-(self.total - piece.start - piece.rank) // piece.size))
        return max(0, -(-(read - piece.offset) // piece.stride))

    def to_record(self, finishes: bool = False) -> dict[str, Any]:
        """Returns the record for the other ranks; with `finishes`, the record describes the state
        after `commit_taken_pieces`, although the call is still to come.
        """
        rounds, dealt, hand = (
            (0, [], [])
            if finishes
            else (self.rounds, list(self.dealt_rounds), list(self.taken_pieces))
        )
        kind = {"total": self.total, "batch": self.batch, "drops": self.drops}
        return {**kind, "place": self.position, "rounds": rounds, "dealt": dealt, "hand": hand}

    def adopt_agreed_records(self, records: Sequence[dict[str, Any] | None], rank: int) -> None:
        """Takes over the agreed state of the ranks of a new world.

        Args:
            records: The record of each rank; `None` for new ranks. At least one rank has a record.
            rank: This rank's index in `records`.
        """
        best = max(
            (record for record in records if record is not None),
            key=lambda record: record["rounds"],
        )
        hands = [[] if record is None else record["hand"] for record in records]
        held = {piece for hand in hands for piece in hand}
        dealt = [piece for turn in best["dealt"] for piece in turn.all_pieces()]
        lost = [piece for piece in dealt if piece not in held and self.piece_row_count(piece) > 0]
        position = replace(best["place"], lost_pieces=(*best["place"].lost_pieces, *lost))
        self.rank, self.size = rank, len(records)
        self.rounds = best["rounds"]
        self.dealt_rounds = [RoundPieces(piece, 1, True) for hand in hands for piece in hand]
        self.taken_pieces, self.pending_pieces = list(hands[rank]), []
        for turn in range(self.rounds):
            sharers = [other for other, hand in enumerate(hands) if len(hand) <= turn]
            if not sharers:
                continue
            position, turned = self._assign_next_round(position, len(sharers))
            self.dealt_rounds.append(turned)
            if rank in sharers:
                self.pending_pieces.append(turned.piece_of_rank(sharers.index(rank)))
        self.position = position
