# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where a training process gets its batches from: the native reader, as NumPy arrays.

Rank `r` of `n` has the rows `r, r + n, r + 2n, ...` of a pass, and every rank has the same number of steps. Its last
batch may hold a row less than another's; where a step has fewer rows than there are processes, some have none and
repeat rows that do not count. A pass sees each row once; an epoch of more steps than a pass has goes on with the next.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native.reader import Dataset, Reader
from farandole.data.arrays import TEXTS, objects
from farandole.spark.common.visibility import seen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import numpy.typing as npt

    from farandole._native.reader import Batch

    Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Missing:
    """What becomes of nulls, NaN and infinities in data that somebody else wrote."""

    fill: Mapping[str, float] = field(default_factory=dict)
    """What takes the place of nulls and NaN, by column; `"*"` stands for all others that can hold it."""
    allow_nan: bool = True
    """Whether NaN and infinities are values like any others."""


@dataclass(frozen=True)
class Rows:
    """One batch of this rank, rows first; the first `valid` rows count, what follows repeats others."""

    columns: Mapping[str, Any]
    count: int
    """Rows that there are."""
    valid: int
    step: int = 0
    """Its number in the pass."""


class Source:
    """One rank's batches of a data set.

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
        least: rows of a batch at least, by repeats that do not count, where `batch_size` allows it.
        missing: what becomes of nulls, NaN and infinities.

    Raises:
        OSError: the data cannot be read, in the words of `seen`; while batches are read, too.
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
        least: int = 1,
        missing: Missing | None = None,
    ) -> None:
        missing = missing or Missing()
        with seen(url):
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
                fill=dict(missing.fill) or None,
                allow_nan=missing.allow_nan,
            )
        texts = [one.name for one in self._reader.columns if one.dtype in TEXTS]
        if texts and transformation is None:
            raise ValueError(f"tensors hold no strings: a transformation_fn can make numbers of {', '.join(texts)}")
        self.steps = self._reader.steps()
        self.total = dataset.rows
        self.own = max(0, -(-(dataset.rows - rank) // size))
        """Rows of this process in a pass."""
        self._url = url
        self._batch_size = batch_size
        self._size = size
        self._names = list(columns)
        self._transformation = transformation
        self._least = min(least, batch_size)
        self._seed = (seed, rank)
        self._shuffle = shuffle
        self._in_memory = in_memory
        self._kept: list[Rows] = []

    @property
    def own_steps(self) -> int:
        """Batches in which this process has rows, one at least."""
        return max(1, -(-self.own // self._batch_size))

    @property
    def is_even(self) -> bool:
        """Whether every process has as many rows as the others in every step."""
        return self.total % self._size == 0

    @property
    def leaves_out(self) -> bool:
        """Whether there are processes without a row in the last step."""
        return self.total - (self.steps - 1) * self._size * self._batch_size < self._size

    def rows_in(self, first: int, last: int) -> int:
        """Rows of all processes in the steps from `first` up to, not including, `last` of an epoch."""
        return self._until(last) - self._until(first)

    def share(self, rows: Rows) -> float:
        """By what the mean loss over a batch is multiplied, before gradients are averaged over processes."""
        return rows.valid * self._size / self.rows_in(rows.step, rows.step + 1)

    def epoch(self, number: int, steps: int) -> Generator[Rows]:
        """The batches of an epoch.

        Args:
            number: of the epoch, which gives its order.
            steps: how many batches.
        """
        passes = max(1, math.ceil(steps / max(self.steps, 1)))
        left = steps
        for index in range(passes):
            with closing(self._pass(number * passes + index)) as batches:
                for rows in batches:
                    if left == 0:
                        return
                    left -= 1
                    yield rows

    def _until(self, steps: int) -> int:
        passes, rest = divmod(steps, self.steps)
        return passes * self.total + min(rest * self._size * self._batch_size, self.total)

    def _pass(self, number: int) -> Generator[Rows]:
        if len(self._kept) == self.steps:
            yield from self._from_memory(number)
            return
        self._kept = []
        with closing(self._reader.epoch(number)) as batches:
            for step in range(self.steps):
                with seen(self._url):
                    batch = next(batches)
                rows = self._rows(batch, step)
                if self._in_memory:
                    self._kept.append(rows)
                yield rows

    def _rows(self, batch: Batch, step: int) -> Rows:
        count = max(self._least, batch.valid_rows)
        arrays = {name: array(batch, name)[:count] for name in self._names}
        if self._transformation is not None:
            arrays = self._transformation(arrays)
        return Rows(arrays, count, batch.valid_rows, step)

    def _from_memory(self, number: int) -> Generator[Rows]:
        if not self._shuffle:
            yield from self._kept
            return
        whole = {
            name: np.concatenate([rows.columns[name][: rows.valid] for rows in self._kept])
            for name in self._kept[0].columns
        }
        count = sum(rows.valid for rows in self._kept)
        order = np.random.default_rng((*self._seed, number)).permutation(count)
        start = 0
        for rows in self._kept:
            if rows.valid == 0:
                yield rows
                continue
            chosen = order[start : start + rows.valid]
            start += rows.valid
            chosen = np.concatenate([chosen, np.repeat(chosen[:1], rows.count - rows.valid)])
            yield replace(rows, columns={name: values[chosen] for name, values in whole.items()})


def sample(
    url: str,
    columns: Sequence[str],
    rows: int,
    transformation: Callable[[Arrays], Arrays] | None,
    missing: Missing | None = None,
) -> Arrays:
    """The first rows of a data set, as a training process would get them.

    Args:
        url: of the data set.
        columns: which.
        rows: how many; a smaller data set repeats itself.
        transformation: as in `Source`.
        missing: as in `Source`.
    """
    casts: dict[str, str | None] = dict.fromkeys(columns)
    source = Source(url, casts, batch_size=rows, threads=1, transformation=transformation, least=rows, missing=missing)
    with closing(source.epoch(0, 1)) as batches:
        return dict(next(batches).columns)


def array(batch: Batch, name: str) -> npt.NDArray[Any]:
    """A column of a batch, in the batch's own memory, which lives as long as the array; of texts, a copy.

    Args:
        batch: of the native reader.
        name: of the column.
    """
    column = batch.column(name)
    if column.dtype in TEXTS:
        return objects(batch, name, column.dtype)
    return np.frombuffer(memoryview(column), dtype=column.dtype).reshape(column.shape)
