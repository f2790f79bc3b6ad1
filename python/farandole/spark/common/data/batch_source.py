# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The batches of a training process: from the native reader, as NumPy arrays.

Rank `r` of `n` has the rows `r, r + n, r + 2n, ...` of a pass, and every rank has the same number
of steps. The last batches of two ranks may differ by one row. If a step has fewer rows than there
are processes, some processes repeat rows with weight 0. A pass contains each row once.
If an epoch has more steps than a pass, it continues with the next pass.

With a fixed number of rows in a step of all processes (`step_rows`), step `k` of a pass has the
rows `k * step_rows` up to `(k + 1) * step_rows`, for any number of processes. If that number does
not divide `step_rows`, the batches of two ranks differ by one row in every step.

In an elastic job, an epoch may continue in the middle with another number of processes: at an
`EpochPosition`, which is the same for all of them. The order of a pass does not depend on the
number of processes.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native.reader import Dataset, Reader
from farandole.data.arrays import VARIABLE_WIDTH_DTYPES, make_batch_converter
from farandole.data.data_memory_budget import (
    MemoryReservation,
    choose_cache_directory,
    default_byte_budget,
    reserve_memory,
)
from farandole.data.ragged import lengths_column_name
from farandole.data.step_rows import own_row_count, recut_batches, step_row_counts
from farandole.stores.local_paths import explain_unreadable_data

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from farandole._native.reader import Batch
    from farandole.data.ragged import RaggedColumn

    Arrays = dict[str, npt.NDArray[Any]]

_batch_to_arrays = make_batch_converter("numpy")
_SAMPLED_BATCHES = 16
"""Batches from which `sample_rows` draws spread rows."""


@dataclass(frozen=True)
class MissingValuePolicy:
    """The treatment of nulls, NaN and infinities in data that another program wrote."""

    fill: Mapping[str, float] = field(default_factory=dict)
    """Replacements of nulls and NaN, by column; `"*"` stands for all other columns that can hold
    them.
    """
    allow_nan: bool = True
    """Whether NaN and infinities are values like any others."""


@dataclass(frozen=True)
class PaddedRankBatch:
    """One batch of this rank, rows first; the first `valid` rows count, later ones repeat
    others.
    """

    columns: Mapping[str, Any]
    count: int
    """Rows that there are."""
    valid: int
    step: int = 0
    """Its number in the epoch."""


@dataclass(frozen=True)
class EpochPosition:
    """The position of all processes together in an epoch.

    Attributes:
        steps: steps of the epoch that are done, independent of the number of processes.
        rows: rows of these steps.
        number: number of the pass in progress; `None` is the epoch's first.
        row: first row of this pass that is not read yet.
    """

    steps: int = 0
    rows: int = 0
    number: int | None = None
    row: int = 0


class BatchSource:
    """One rank's batches of a data set.

    Args:
        url: URL of the data set.
        columns: columns to read, and the type to which the reader converts each of them; `None`
            leaves the type.
        batch_size: rows of one batch of this process, at most.
        rank: this process.
        size: processes.
        step_rows: rows of a step of all processes together, at least `size`; `None` is `size *
            batch_size`. A process then reads the quotient, rounded up, at once.
        seed: seed of the order.
        shuffle: whether each pass has another order.
        threads: reading threads.
        in_memory: whether the rows of this process stay in memory after the first pass; their order
            is then drawn from them alone. If the memory is too small, each pass reads the rows of
            the first one again, in their order, because other processes may keep theirs. With
            `moves` they stay in memory that processes of a host share, and keep their order.
        transformation: makes other columns of each batch.
        augmentation: changes the columns of each batch after that, in each pass: a function of
            the columns, the seed, and the number of the pass. Rows in memory are not changed yet.
        least: rows of a batch at least, by repeats that do not count, where `batch_size` allows it.
        missing: treatment of nulls, NaN and infinities.
        moves: whether an epoch may continue with another number of processes.
        ragged: columns of lists of different lengths.
        fixed: whether these are padded to their largest length in every batch.

    Raises:
        OSError: the data cannot be read; also raised while batches are read. The message is from
            `explain_unreadable_data`.
    """

    def __init__(
        self,
        url: str,
        columns: Mapping[str, str | None],
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        step_rows: int | None = None,
        seed: int = 0,
        shuffle: bool = False,
        threads: int = 2,
        in_memory: bool = False,
        transformation: Callable[[Arrays], Arrays] | None = None,
        augmentation: Callable[[Arrays, int, int], Arrays] | None = None,
        least: int = 1,
        missing: MissingValuePolicy | None = None,
        moves: bool = False,
        ragged: Mapping[str, RaggedColumn] | None = None,
        fixed: bool = False,
    ) -> None:
        missing = missing or MissingValuePolicy()
        self._ragged = {name: one for name, one in (ragged or {}).items() if name in columns}
        self._nested = [name for name, one in self._ragged.items() if one.nested]
        if step_rows is not None:
            batch_size = -(-step_rows // size)
        self._step_rows = size * batch_size if step_rows is None else step_rows
        self.deals_equally = self._step_rows % size == 0
        """Whether processes have equally many rows in every step but the last of a pass."""
        # Batches of a process are joined and cut unless all have as many rows as the reader's.
        fixed = fixed or (in_memory and not moves) or not self.deals_equally
        with explain_unreadable_data(url):
            dataset = Dataset.open_url(url)
            self._reader = Reader(
                dataset,
                columns=list(columns),
                batch_size=batch_size,
                rank=rank,
                size=size,
                seed=seed,
                shuffle=shuffle,
                byte_budget=default_byte_budget(),
                threads=threads,
                tail="pad",
                cast={
                    name: to
                    for name, to in columns.items()
                    if to is not None and name not in self._ragged
                },
                fill=dict(missing.fill) or None,
                allow_nan=missing.allow_nan,
                pad={
                    name: column.native_padding_argument(fixed=fixed)
                    for name, column in self._ragged.items()
                }
                or None,
                cache=choose_cache_directory(dataset, list(columns))
                if in_memory and moves
                else None,
            )
        if self._nested and transformation is not None:
            raise ValueError(
                f"a transformation_fn takes no nested columns: {', '.join(self._nested)}"
            )
        self._fields = [one for one in self._reader.columns if one.name not in self._ragged]
        texts = [one.name for one in self._fields if one.dtype in VARIABLE_WIDTH_DTYPES]
        if texts and transformation is None:
            raise ValueError(
                "tensors cannot hold strings: a transformation_fn can make numbers of "
                f"{', '.join(texts)}"
            )
        self.total = dataset.rows
        self.steps = self._pass_step_count(0)
        self.own = max(0, -(-(dataset.rows - rank) // size))
        """Rows of this process in a pass."""
        self._url = url
        self._size = size
        self._names = list(columns)
        self._transformation = transformation
        self._augmentation = augmentation
        self._min_rows = min(least, batch_size)
        self._rank = rank
        self._seed = (seed, rank)
        self._shuffle = shuffle
        self._in_memory = in_memory and not moves
        self._cached_batches: list[PaddedRankBatch] = []
        self._reservation: MemoryReservation | None = None
        self._repeated_pass: int | None = None
        """The pass whose rows this process has in all passes, if it cannot keep them."""
        self._start_position = EpochPosition()

    @property
    def own_step_count(self) -> int:
        """Batches in which this process has rows, one at least."""
        last_row = (self.own - 1) * self._size + self._rank
        return last_row // self._step_rows + 1 if self.own else 1

    @property
    def has_equal_rows_on_ranks(self) -> bool:
        """Whether every process has as many rows as the others in every step."""
        return (
            self.deals_equally
            and self.total % self._size == 0
            and (self.total - self._start_position.row) % self._size == 0
        )

    @property
    def has_idle_ranks(self) -> bool:
        """Whether some processes have no row in the last step of a pass."""
        ends = {self.total, self.total - self._start_position.row}
        return any((rows - 1) % self._step_rows + 1 < self._size for rows in ends)

    def idle_steps(self, steps: int) -> list[int]:
        """Returns the steps of an epoch of so many in which this process has no row: ends of
        passes, if any.
        """
        first = self.steps_until_end() - 1
        is_idle = self._is_idle_at_end(self.total - self._start_position.row)
        found = [first] if is_idle and first < steps else []
        if self._is_idle_at_end(self.total):
            found += range(first + self.steps, steps, self.steps)
        return found

    def _is_idle_at_end(self, rows: int) -> bool:
        """Returns whether this process has no row in the last step of so many rows."""
        begin = (rows - 1) // self._step_rows * self._step_rows
        before, after = (own_row_count(edge, self._rank, self._size) for edge in (begin, rows))
        return before == after

    def _pass_step_count(self, row: int) -> int:
        """Returns the steps of a pass from a row on."""
        return -(-(self.total - row) // self._step_rows)

    def set_epoch_start(self, position: EpochPosition) -> None:
        """Sets the position at which epochs begin or continue, until the next call.

        Args:
            position: the beginning, or a result of `position_after_steps` from any number of
                processes.
        """
        self._start_position = position

    def steps_until_end(self) -> int:
        """Returns the steps of an epoch of one pass, including the steps before the position where
        this epoch continues.
        """
        position = self._start_position
        return position.steps + max(1, self._pass_step_count(position.row))

    def position_after_steps(self, number: int, steps: int) -> EpochPosition:
        """Returns the position of all processes after some steps of an epoch.

        Args:
            number: number of the epoch.
            steps: number of steps that are done.
        """
        begun, done = self._start_position, steps - self._start_position.steps
        rows = self._row_count_until_step(steps)
        passes, row = divmod(begun.row + rows, self.total) if done else (0, begun.row)
        return EpochPosition(
            steps, begun.rows + rows, self._first_pass_number(number, steps) + passes, row
        )

    def row_count_in_steps(self, first: int, last: int) -> int:
        """Returns the rows of all processes in the steps from `first` up to, not including,
        `last` of an epoch.
        """
        return self._row_count_until_step(last) - self._row_count_until_step(first)

    def loss_factor(self, rows: PaddedRankBatch) -> float:
        """Returns the factor of the mean loss over a batch, before gradients are averaged over
        processes.
        """
        return rows.valid * self._size / self.row_count_in_steps(rows.step, rows.step + 1)

    def iterate_epoch_batches(self, number: int, steps: int) -> Generator[PaddedRankBatch]:
        """Yields the batches of an epoch, or of the rest of an epoch.

        Args:
            number: number of the epoch, which gives its order.
            steps: number of batches, including those before the place where it continues.
        """
        current, step, row = (
            self._first_pass_number(number, steps),
            self._start_position.steps,
            self._start_position.row,
        )
        while step < steps and self.total:
            with closing(self._pass_batches(current, row)) as batches:
                for rows in batches:
                    if step == steps:
                        return
                    yield replace(rows, step=step, columns=self._augment_columns(rows, current))
                    step += 1
            current, row = current + 1, 0

    def _augment_columns(self, rows: PaddedRankBatch, number: int) -> Mapping[str, Any]:
        """Returns the columns of a batch as the training of a pass gets them."""
        if self._augmentation is None:
            return rows.columns
        return self._augmentation(dict(rows.columns), self._seed[0], number)

    def _first_pass_number(self, number: int, steps: int) -> int:
        """Returns the number of the pass that an epoch of so many steps begins with, or
        continues with.
        """
        if self._start_position.number is not None:
            return self._start_position.number
        return number * max(1, math.ceil(steps / max(self.steps, 1)))

    def _row_count_until_step(self, steps: int) -> int:
        """Returns the rows of all processes in the steps from the place where the epoch
        continues up to `steps`.
        """
        whole, remaining_rows = self._step_rows, self.total - self._start_position.row
        done, first = (
            steps - self._start_position.steps,
            self._pass_step_count(self._start_position.row),
        )
        if done <= first:
            return min(done * whole, remaining_rows)
        passes, rest = divmod(done - first, self.steps)
        return remaining_rows + passes * self.total + min(rest * whole, self.total)

    def _pass_batches(self, number: int, row: int) -> Generator[PaddedRankBatch]:
        if len(self._cached_batches) == self.steps:
            yield from self._batches_from_memory(number)
            return
        self._cached_batches, self._reservation = [], None
        if self._repeated_pass is not None:
            number = self._repeated_pass
        keeps, count = self._in_memory and self._repeated_pass is None, self._pass_step_count(row)
        with closing(self._read_pass(number, row)) as batches:
            for step, rows in enumerate(batches if self.deals_equally else self._cut(batches, row)):
                if keeps and step == 0:
                    keeps = self._reserve_memory(rows, count)
                if keeps:
                    self._cache_batch_in_memory(rows)
                yield rows
        if self._in_memory and not keeps and count == self.steps:
            self._repeated_pass = number

    def _read_pass(self, number: int, row: int) -> Generator[PaddedRankBatch]:
        """Yields the reader's batches of a pass, or of the rest of one, after the transformation.
        A transformation that is marked with `reads_ahead` makes the next batch in a thread
        meanwhile.
        """

        def make_next_batch() -> PaddedRankBatch:
            with explain_unreadable_data(self._url):
                batch = next(batches)
            return self._convert_batch(batch)

        count = self._reader.step_count(row)
        with closing(self._reader.read_epoch(number, row)) as batches:
            if not getattr(self._transformation, "reads_ahead", False):
                for _ in range(count):
                    yield make_next_batch()
                return
            with ThreadPoolExecutor(1, "farandole-batches") as pool:
                coming = pool.submit(make_next_batch)
                for step in range(count):
                    rows = coming.result()
                    if step + 1 < count:
                        coming = pool.submit(make_next_batch)
                    yield rows

    def _cut(self, batches: Iterator[PaddedRankBatch], row: int) -> Generator[PaddedRankBatch]:
        """Yields the batches of a pass with the rows that this process has in each step, from
        batches that all have equally many rows.
        """
        first = next(batches)
        last = first.columns
        """The last columns with a row that can be repeated."""
        counted = ((rows.columns, rows.valid) for rows in itertools.chain([first], batches))
        counts = list(step_row_counts(self.total - row, self._step_rows, self._rank, self._size))
        for valid, cut in zip(counts, recut_batches(counted, counts, np.concatenate), strict=True):
            columns, count = cut, max(self._min_rows, valid)
            last = cut if valid else last
            if valid < count:
                chosen = np.minimum(np.arange(count), max(0, valid - 1))
                columns = {name: values[chosen] for name, values in last.items()}
            yield PaddedRankBatch(columns, count, valid)

    def _reserve_memory(self, rows: PaddedRankBatch, count: int) -> bool:
        """Reserves memory for all batches of a pass; returns whether there is enough."""
        # To shuffle them, a pass copies all rows.
        copies = 2 if self._shuffle else 1
        self._reservation = reserve_memory(copies * count * _column_bytes(rows))
        return self._reservation is not None

    def _cache_batch_in_memory(self, rows: PaddedRankBatch) -> None:
        self._cached_batches.append(rows)
        if self._reservation is not None:
            self._reservation.filled += _column_bytes(rows)

    def _convert_batch(self, batch: Batch) -> PaddedRankBatch:
        count = max(self._min_rows, batch.valid_rows)
        columns = _batch_to_arrays(batch, self._fields, None)
        columns |= {name: one.read_padded(batch, name) for name, one in self._ragged.items()}
        arrays = {name: columns[name][:count] for name in self._names}
        for name in self._nested:
            arrays[lengths_column_name(name)] = self._ragged[name].row_lengths(batch, name)[:count]
        if self._transformation is not None:
            arrays = self._transformation(arrays)
        return PaddedRankBatch(arrays, count, batch.valid_rows)

    def _batches_from_memory(self, number: int) -> Generator[PaddedRankBatch]:
        if not self._shuffle:
            yield from self._cached_batches
            return
        whole = {
            name: np.concatenate(
                [rows.columns[name][: rows.valid] for rows in self._cached_batches]
            )
            for name in self._cached_batches[0].columns
        }
        count = sum(rows.valid for rows in self._cached_batches)
        order = np.random.default_rng((*self._seed, number)).permutation(count)
        start = 0
        for rows in self._cached_batches:
            if rows.valid == 0:
                yield rows
                continue
            chosen = order[start : start + rows.valid]
            start += rows.valid
            chosen = np.concatenate([chosen, np.repeat(chosen[:1], rows.count - rows.valid)])
            yield replace(rows, columns={name: values[chosen] for name, values in whole.items()})


def sample_rows(
    url: str,
    columns: Sequence[str],
    rows: int,
    transformation: Callable[[Arrays], Arrays] | None,
    missing: MissingValuePolicy | None = None,
    ragged: Mapping[str, RaggedColumn] | None = None,
    *,
    spread: bool = False,
) -> Arrays:
    """Returns rows of a data set, as a training process would get them.

    Args:
        url: URL of the data set.
        columns: columns to read.
        rows: number of rows; a smaller data set repeats itself.
        transformation: as in `BatchSource`.
        missing: as in `BatchSource`.
        ragged: as in `BatchSource`.
        spread: whether rows come from all parts of the data set, not from its beginning. A shuffled
            batch has a few runs of rows, so they are drawn from several batches.
    """
    casts: dict[str, str | None] = dict.fromkeys(columns)
    source = BatchSource(
        url, casts, batch_size=rows, threads=1, transformation=transformation, least=rows,
        missing=missing, ragged=ragged, fixed=True, shuffle=spread,
    )  # fmt: skip
    count = min(_SAMPLED_BATCHES, max(1, source.total // rows)) if spread else 1
    # An epoch with one step more would transform one batch more, too.
    with closing(source.iterate_epoch_batches(0, count)) as batches:
        parts = [
            {name: values[first::count].copy() for name, values in batch.columns.items()}
            for first, batch in enumerate(islice(batches, count))
        ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _column_bytes(rows: PaddedRankBatch) -> int:
    return sum(values.nbytes for values in rows.columns.values())
