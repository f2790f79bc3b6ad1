# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where a training process gets its batches: the native reader, or a data module of the user's.

Every rank has the same number of steps. A pass sees each row once; an epoch of more steps than a pass has goes on
with the next pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole._native.reader import Dataset, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from farandole._native.reader import Batch

    Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Rows:
    """One batch of this rank: tensors on the host, rows first; the first `valid` rows count, the rest is padding."""

    columns: Mapping[str, torch.Tensor]
    rows: int
    valid: int


class Source:
    """Batches of a data set, epoch by epoch.

    Args:
        steps: of one pass.
        size: processes.
        batch_size: rows of one batch of one process.
        total: rows of one pass of all processes; `None` where nobody knows.
    """

    def __init__(self, steps: int, size: int, batch_size: int, total: int | None) -> None:
        self.steps = steps
        self._global = size * batch_size
        self._total = total

    def epoch(self, number: int, steps: int) -> Iterator[Rows]:
        """The batches of an epoch.

        Args:
            number: of the epoch.
            steps: how many batches.
        """
        passes = max(1, math.ceil(steps / max(self.steps, 1)))
        left = steps
        for index in range(passes):
            batches = self._pass(number * passes + index)
            try:
                for batch in batches:
                    if left == 0:
                        return
                    left -= 1
                    yield batch
            finally:
                batches.close()

    def rows_in(self, first: int, last: int) -> int | None:
        """Rows of all processes in the steps from `first` up to, not including, `last` of an epoch."""
        if self._total is None:
            return None
        return self._until(last) - self._until(first)

    def _until(self, steps: int) -> int:
        assert self._total is not None  # noqa: S101 - asked only then
        whole, rest = divmod(steps, self.steps)
        return whole * self._total + min(rest * self._global, self._total)

    def _pass(self, number: int) -> Any:
        raise NotImplementedError


class ParquetSource(Source):
    """Prepared data, or anybody's Parquet, through the native reader.

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
        rank: int,
        size: int,
        seed: int,
        shuffle: bool,
        threads: int,
        in_memory: bool,
        transformation: Callable[[Arrays], Arrays] | None,
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
        super().__init__(self._reader.steps(), size, batch_size, dataset.rows)
        self._names = list(columns)
        self._transformation = transformation
        self._seed = (seed, rank)
        self._shuffle = shuffle
        self._keep = in_memory
        self._kept: list[Rows] = []

    def _pass(self, number: int) -> Iterator[Rows]:
        if len(self._kept) == self.steps:
            yield from self._from_memory(number)
            return
        self._kept = []
        epoch = self._reader.epoch(number)
        try:
            for batch in epoch:
                rows = self._rows(batch)
                if self._keep:
                    self._kept.append(rows)
                yield rows
        finally:
            epoch.close()

    def _rows(self, batch: Batch) -> Rows:
        if self._transformation is None:
            tensors = {name: _tensor(batch, name) for name in self._names}
        else:
            made = self._transformation({name: _array(batch, name) for name in self._names})
            tensors = tensors_of(made)
        return Rows(tensors, batch.rows, batch.valid_rows)

    def _from_memory(self, number: int) -> Iterator[Rows]:
        if not self._shuffle:
            yield from self._kept
            return
        whole = {
            name: torch.cat([rows.columns[name][: rows.valid] for rows in self._kept]) for name in self._kept[0].columns
        }
        count = sum(rows.valid for rows in self._kept)
        order = torch.from_numpy(np.random.default_rng((*self._seed, number)).permutation(count))
        start = 0
        for rows in self._kept:
            if rows.valid == 0:
                yield rows
                continue
            # A batch that needs padding repeats a row of its own.
            chosen = order[start : start + rows.valid]
            start += rows.valid
            padded = torch.cat([chosen, chosen[:1].expand(rows.rows - rows.valid)])
            yield Rows({name: values[padded] for name, values in whole.items()}, rows.rows, rows.valid)


class ModuleSource(Source):
    """Batches of a user's data module, whose rows all count.

    Args:
        loader: makes an iterable of batches, each a mapping or a named tuple of columns.
        steps: of one epoch.
        size: processes.
        batch_size: rows of one batch.
    """

    def __init__(self, loader: Callable[[], Iterable[Any]], steps: int, size: int, batch_size: int) -> None:
        super().__init__(max(steps, 1), size, batch_size, None)
        self._loader = loader
        self._left: Iterator[Any] | None = None

    def _pass(self, number: int) -> Iterator[Rows]:
        del number  # an infinite loader goes on where it was; a finite one starts again
        for _ in range(self.steps):
            yield self._next()

    def _next(self) -> Rows:
        for attempt in range(2):
            if self._left is None:
                self._left = iter(self._loader())
            batch = next(self._left, None)
            if batch is not None:
                columns = batch if isinstance(batch, dict) else batch._asdict()
                tensors = tensors_of(columns)
                rows = len(next(iter(tensors.values())))
                return Rows(tensors, rows, rows)
            self._left = None
            if attempt:
                break
        raise ValueError("the data module has no batches")


def tensors_of(columns: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Columns of NumPy or torch as tensors, without those of no numeric type.

    Args:
        columns: by name, rows first.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, values in columns.items():
        if isinstance(values, torch.Tensor):
            tensors[name] = values
        elif np.asarray(values).dtype.kind in "biuf":
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors


def sample(url: str, columns: Sequence[str], rows: int, transformation: Callable[[Arrays], Arrays] | None) -> Arrays:
    """The first rows of a data set, as a training process would get them.

    Args:
        url: of the data set.
        columns: which.
        rows: how many; a smaller data set repeats itself.
        transformation: as in `ParquetSource`.
    """
    reader = Reader(Dataset.open(url), columns=list(columns), batch_size=rows, shuffle=False, tail="pad", threads=1)
    epoch = reader.epoch(0)
    try:
        batch = next(iter(epoch))
        arrays = {name: _array(batch, name).copy() for name in columns}
    finally:
        epoch.close()
    return arrays if transformation is None else transformation(arrays)


def _tensor(batch: Batch, name: str) -> torch.Tensor:
    column = batch.column(name)
    return torch.frombuffer(column, dtype=getattr(torch, column.dtype)).view(column.shape)


def _array(batch: Batch, name: str) -> np.ndarray[Any, Any]:
    column = batch.column(name)
    return np.frombuffer(memoryview(column), dtype=column.dtype).reshape(column.shape)
