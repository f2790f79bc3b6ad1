# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""RD-T1 and RD-T2: each row of each epoch counts once, whichever ranks join and leave in any
step.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest

from farandole.data.row_assignment import RowAssignment, RowPiece, UnassignedRows

EPOCHS = 3


def rows_of(books: RowAssignment, piece: RowPiece) -> list[tuple[int, int]]:
    """The rows that a reader gives for a piece."""
    positions = range(piece.start + piece.rank, books.total, piece.size)[: piece.batch]
    rows = [(piece.epoch, position) for position in positions[piece.offset :: piece.stride]]
    assert len(rows) == books.piece_row_count(piece)
    return rows


class World:
    """Ranks that train, die in the middle of steps, and join."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.total, self.batch = self.random.choice([1, 7, 40, 97]), self.random.choice([1, 3, 4])
        self.passes = self.random.choice([1, 1, 2])
        self.counted: Counter[tuple[int, int]] = Counter()
        self.losses = 0
        size = self.random.randint(1, 4)
        self.ranks = [self.new(rank, size) for rank in range(size)]

    def new(self, rank: int, size: int) -> RowAssignment:
        return RowAssignment(self.total, self.batch, False, rank, size, UnassignedRows(0, 0))

    def take_step_rows(self, books: RowAssignment) -> bool:
        """Takes the rows that a rank needs for a step; false when all epochs are over."""
        while len(books.taken_pieces) < self.passes:
            if books.epoch >= EPOCHS:
                return bool(books.taken_pieces)
            epoch = books.advance_to_next_epoch()
            while len(books.taken_pieces) < self.passes and books.next_piece(epoch) is not None:
                pass
        return True

    def step(self) -> bool:
        """One step of all ranks, with everything that may happen in it; false at the end."""
        more = [self.take_step_rows(books) for books in self.ranks]
        assert len(set(more)) == 1, "all ranks end after the same step"
        if not more[0]:
            return False
        while self.random.random() < 0.3:
            if self.break_up():
                return True  # somebody had finished the step
        self.count()
        for books in self.ranks:
            books.commit_taken_pieces()
        return True

    def count(self) -> None:
        """The step is finished: the rows of all ranks are in its sum."""
        for books in self.ranks:
            for piece in books.taken_pieces:
                self.counted.update(rows_of(books, piece))

    def records_of_world(
        self, left: list[RowAssignment], comers: int
    ) -> list[dict[str, Any] | None]:
        """Returns the records of the remaining workers, and `None` for each new one."""
        return [*(copy.deepcopy(books.to_record()) for books in left), *[None] * comers]

    def break_up(self) -> bool:
        """Some die, some come, perhaps after some have finished the step; whether they had."""
        finished = self.random.random() < 0.3
        if finished:
            self.count()
        left = [books for books in self.ranks if self.random.random() >= 0.3] or self.ranks[:1]
        self.losses += len(self.ranks) - len(left)
        if finished:
            # Those that have not finished it take the state of one that has, which may have read
            # on.
            for books in left:
                books.commit_taken_pieces()
            if self.random.random() < 0.5 and left[0].epoch < EPOCHS - 1:
                self.take_step_rows(left[0])
        comers = self.random.randint(0, 2)
        everybody = [*left, *(self.new(0, 1) for _ in range(comers))]
        order = list(range(len(everybody)))
        self.random.shuffle(order)
        # The world may break again while some have agreed already.
        told = self.records_of_world(left, comers)
        for number in self.random.sample(
            range(len(left)), self.random.choice([0, 0, len(left) // 2])
        ):
            left[number].adopt_agreed_records([told[other] for other in order], order.index(number))
        records = self.records_of_world(left, comers)
        self.ranks = [everybody[number] for number in order]
        for rank, books in enumerate(self.ranks):
            books.adopt_agreed_records([records[number] for number in order], rank)
        first = self.ranks[0]
        for books in self.ranks:
            assert (books.position, books.rounds, books.dealt_rounds) == (
                first.position,
                first.rounds,
                first.dealt_rounds,
            ), "RD-T2"
        if not finished:
            for books in self.ranks:
                self.take_step_rows(books)
        return finished


@pytest.mark.parametrize("start", range(0, 2000, 500))
def test_rd_t1_each_row_of_each_epoch_counts_once(start: int) -> None:
    losses = 0
    for seed in range(start, start + 500):
        world = World(seed)
        for _ in range(10_000):
            if not world.step():
                break
        rows = {(epoch, row) for epoch in range(EPOCHS) for row in range(world.total)}
        counted = {key: count for key, count in world.counted.items() if key[0] < EPOCHS}
        assert counted == dict.fromkeys(rows, 1), f"seed {seed}"
        losses += world.losses
    assert losses > 500, "the faults did happen"


def test_an_epoch_without_changes_is_dealt_out_in_order() -> None:
    books = RowAssignment(10, 2, False, 1, 2, UnassignedRows(0, 0))
    epoch = books.advance_to_next_epoch()
    pieces = []
    while (piece := books.next_piece(epoch)) is not None:
        pieces.append(piece)
        books.commit_taken_pieces()
    assert [rows_of(books, piece) for piece in pieces] == [
        [(0, 1), (0, 3)],
        [(0, 5), (0, 7)],
        [(0, 9)],
    ]
    assert books.epoch == 1
    assert books.rounds_left() == 3


def test_drop_last_drops_rows_that_do_not_fill_a_round() -> None:
    books = RowAssignment(10, 2, True, 0, 2, UnassignedRows(0, 0))
    assert books.rounds_left() == 2
    epoch = books.advance_to_next_epoch()
    assert [books.next_piece(epoch) is not None for _ in range(3)] == [True, True, False]
