# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where a training process gets its batches from: the native reader, as NumPy arrays.

Rank `r` of `n` has the rows `r, r + n, r + 2n, ...` of an epoch, so its last batch may hold a row less than another's;
where a step has fewer rows than there are processes, some have none and repeat a row that does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native.reader import Dataset, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from farandole._native.reader import Batch

    Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Rows:
    """One batch of this rank, rows first; padding is left out, but for one row where there is no other."""

    columns: Arrays
    count: int
    step: int
    """Its number in the pass."""
    counts: bool
    """Whether its rows count."""


class Source:
    """One rank's batches of a data set, pass by pass; every rank has as many.

    Args:
        url: of the data set.
        columns: which columns, and the types that the reader is to make of them; `None` leaves the type.
        batch_size: rows of one batch of this process.
        rank: this process.
        size: processes.
        seed: of the order.
        shuffle: whether each pass has an order of its own.
        threads: reading threads.
        in_memory: whether the rows of this process stay in memory after the first pass; their order is then drawn
            from them alone.
        transformation: makes other columns of each batch.
    """

    def __init__(
        self,
        url: str,
        columns: Mapping[str, str | None],
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        threads: int = 2,
        in_memory: bool = False,
        transformation: Callable[[Arrays], Arrays] | None = None,
    ) -> None:
        dataset = Dataset.open(url)
        self._reader = Reader(
            dataset,
            columns=list(columns),
            batch_size=batch_size,
            rank=rank,
            size=size,
            seed=seed,
            shuffle=shuffle,
            threads=threads,
            tail="pad",
            cast={name: dtype for name, dtype in columns.items() if dtype is not None},
        )
        self.steps = self._reader.steps()
        self.total = dataset.rows
        self.own = max(0, -(-(dataset.rows - rank) // size))
        self._batch_size = batch_size
        self._whole = size * batch_size
        self._size = size
        self._names = list(columns)
        self._transformation = transformation
        self._seed = (seed, rank)
        self._shuffle = shuffle
        self._in_memory = in_memory
        self._kept: list[Rows] = []

    @property
    def last_rows(self) -> int:
        """Rows of all processes in the last step of a pass."""
        return self.total - (self.steps - 1) * self._whole

    @property
    def is_even(self) -> bool:
        """Whether every process has as many rows as the others in every step."""
        return self.total % self._size == 0

    @property
    def leaves_out(self) -> bool:
        """Whether there are processes without a row in the last step."""
        return self.last_rows < self._size

    def rows_in(self, steps: int) -> int:
        """Rows of all processes in so many steps, of one pass after the other."""
        passes, rest = divmod(steps, self.steps)
        return passes * self.total + min(rest * self._whole, self.total)

    def share(self, rows: Rows) -> float:
        """By what the mean loss of a batch is multiplied, before gradients are averaged over processes."""
        if not rows.counts:
            return 0.0
        everywhere = self._whole if rows.step < self.steps - 1 else self.last_rows
        return rows.count * self._size / everywhere

    @property
    def own_steps(self) -> int:
        """Batches in which this process has rows, one at least."""
        return max(1, -(-self.own // self._batch_size))

    def a_pass(self, number: int) -> Iterator[Rows]:
        """The batches of a pass.

        Args:
            number: of the pass, which gives its order.
        """
        if len(self._kept) == self.steps:
            yield from self._from_memory(number)
            return
        self._kept = []
        epoch = self._reader.epoch(number)
        try:
            for step, batch in enumerate(epoch):
                rows = self._rows(batch, step)
                if self._in_memory:
                    self._kept.append(rows)
                yield rows
        finally:
            epoch.close()

    def _rows(self, batch: Batch, step: int) -> Rows:
        count = max(1, batch.valid_rows)
        arrays = {name: _array(batch, name)[:count] for name in self._names}
        if self._transformation is not None:
            arrays = self._transformation(arrays)
        return Rows(arrays, count, step, batch.valid_rows > 0)

    def _from_memory(self, number: int) -> Iterator[Rows]:
        if not self._shuffle:
            yield from self._kept
            return
        counted = [rows for rows in self._kept if rows.counts]
        whole = {name: np.concatenate([rows.columns[name] for rows in counted]) for name in counted[0].columns}
        order = np.random.default_rng((*self._seed, number)).permutation(sum(rows.count for rows in counted))
        start = 0
        for rows in self._kept:
            if not rows.counts:
                yield rows
                continue
            chosen = order[start : start + rows.count]
            start += rows.count
            yield Rows({name: values[chosen] for name, values in whole.items()}, rows.count, rows.step, counts=True)


def sample(url: str, columns: Sequence[str], transformation: Callable[[Arrays], Arrays]) -> Arrays:
    """What a transformation makes of the first rows of a data set.

    Args:
        url: of the data set.
        columns: that are read.
        transformation: of the user.
    """
    rows = Source(url, dict.fromkeys(columns), batch_size=2, transformation=transformation).a_pass(0)
    try:
        return next(iter(rows)).columns
    finally:
        rows.close()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _array(batch: Batch, name: str) -> npt.NDArray[Any]:
    column = batch.column(name)
    return np.frombuffer(memoryview(column), dtype=column.dtype).reshape(column.shape)
