# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's PyTorch loaders: batches of one size, as dicts of tensors, from a reader of batches of
any size.

A reader is an object that can be iterated repeatedly and returns dicts or named tuples of columns:
a `farandole.data.ParquetLoader`, or a petastorm reader. `ParquetLoader` itself returns shuffled
batches of the right size and does not need these classes. They exist for code that was written for
Horovod.

Example:
    ```python
    reader = ParquetLoader(train_dir, 4096, columns=["features", "label"], framework="torch")
    loader = PytorchAsyncDataLoader(reader=reader, batch_size=64, shuffling_queue_capacity=0, limit_step_per_epoch=100)
    for batch in loader: ...
    ```
"""  # noqa: E501

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Batch = dict[str, torch.Tensor]

_log = logging.getLogger(__name__)

__all__ = [
    "PetastormBatchedDataLoader",
    "PytorchAsyncDataLoader",
    "PytorchDataLoader",
    "PytorchInfiniteAsyncDataLoader",
    "PytorchInfiniteDataLoader",
    "PytorchInmemAsyncDataLoader",
    "PytorchInmemDataLoader",
]


class PytorchDataLoader(BaseDataLoader):
    """Batches of one epoch of a reader."""

    def __init__(
        self,
        reader: Iterable[Any],
        batch_size: int,
        shuffling_queue_capacity: int,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        """Takes a reader.

        Args:
            reader: Returns batches of any size, again in every epoch.
            batch_size: Rows of a batch; the last one of an epoch may have fewer.
            shuffling_queue_capacity: Number of rows from which batches are drawn at random; 0 keeps
                the reader's order.
            name: For log lines.
            limit_step_per_epoch: Batches after which an epoch ends; -1: as many as there are.
            verbose: Whether to log the start of each epoch.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1: {batch_size}")
        self.reader = reader
        self.batch_size = batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self.name = name
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose

    def __len__(self) -> int:
        """Batches of an epoch, 0 if not given."""
        return max(self.limit_step_per_epoch, 0)

    def _log_epoch_start(self) -> None:
        if self.verbose:
            _log.info("%s: an epoch starts, %d batches", self.name or "loader", len(self))

    def _epoch_batches(self) -> Iterator[Batch]:
        reset = getattr(self.reader, "reset", None)
        if reset is not None and getattr(self.reader, "last_row_consumed", False):
            reset()  # a reader of petastorm does not start again without this
        return _rebatch_rows(self.reader, self.batch_size, self.shuffling_queue_capacity)

    def _iterate(self) -> Iterator[Batch]:
        self._log_epoch_start()
        yield from _take_batches(self._epoch_batches(), self.limit_step_per_epoch)


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """`PytorchDataLoader` whose batches are created in a thread."""


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """Batches that continue across the ends of a reader's epochs. An epoch of this loader has
    `limit_step_per_epoch` batches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Like `PytorchDataLoader`; a reader that ends after some epochs is refused."""
        super().__init__(*args, **kwargs)
        epochs = getattr(self.reader, "num_epochs", None)
        if epochs is not None:
            raise ValueError(f"the reader of an endless loader must have num_epochs=None: {epochs}")
        self._batches = self._endless_batches()

    def _endless_batches(self) -> Iterator[Batch]:
        while True:
            rows = 0
            for batch in self._epoch_batches():
                rows += 1
                yield batch
            if rows == 0:
                raise ValueError(f"the reader of {self.name or 'the loader'} gives no rows")

    def _iterate(self) -> Iterator[Batch]:
        self._log_epoch_start()
        yield from _take_batches(self._batches, self.limit_step_per_epoch)


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """`PytorchInfiniteDataLoader` whose batches are made in a thread."""


class PytorchInmemDataLoader(BaseDataLoader):
    """Batches of the first rows of a reader, which stay in memory."""

    def __init__(
        self,
        reader: Iterable[Any],
        batch_size: int,
        num_epochs: int | None,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        """Reads the rows.

        Args:
            reader: Gives batches of any size.
            batch_size: Rows of a batch.
            num_epochs: Epochs until the loader gives nothing more; `None`: no end.
            name: For log lines.
            shuffle: Whether each epoch has another order.
            limit_step_per_epoch: Batches of an epoch: this times `batch_size` rows are kept.
            verbose: Whether to log the start of each epoch.

        Raises:
            ValueError: No limit, or a reader without rows.
        """
        if limit_step_per_epoch < 1:
            raise ValueError(
                f"limit_step_per_epoch must say how many batches to keep: {limit_step_per_epoch}"
            )
        self.batch_size = batch_size
        self.num_epochs = num_epochs
        self.name = name
        self.shuffle = shuffle
        self.limit_step_per_epoch = limit_step_per_epoch
        self.verbose = verbose
        self._epochs_done = 0
        batches = list(
            _take_batches(_rebatch_rows(reader, batch_size * limit_step_per_epoch, 0), 1)
        )
        if not batches:
            raise ValueError(f"the reader of {name or 'the loader'} gives no rows")
        self._resident_rows = batches[0]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[Batch]:
        if self.num_epochs is not None and self._epochs_done >= self.num_epochs:
            return
        self._epochs_done += 1
        if self.verbose:
            _log.info(
                "%s: epoch %d starts, %d batches",
                self.name or "loader",
                self._epochs_done,
                len(self),
            )
        rows = _row_count(self._resident_rows)
        order = torch.randperm(rows) if self.shuffle else torch.arange(rows)
        # If there are too few rows, rows repeat: every epoch has the same number of batches.
        order = order.repeat(-(-self.batch_size * self.limit_step_per_epoch // rows))
        for step in range(self.limit_step_per_epoch):
            taken = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield {name: column[taken] for name, column in self._resident_rows.items()}


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """`PytorchInmemDataLoader` whose batches are made in a thread."""


class PetastormBatchedDataLoader(PytorchDataLoader):
    """`PytorchDataLoader` with the order of arguments that Horovod's loader of this name has."""

    def __init__(
        self,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Takes a reader.

        Args:
            name: For log lines.
            limit_step_per_epoch: As of `PytorchDataLoader`.
            verbose: As of `PytorchDataLoader`.
            *args: Reader, size of a batch, and how many rows batches are drawn out of; 0 of them by
                default.
            **kwargs: The same.
        """
        if len(args) < 3:  # noqa: PLR2004 - the third argument
            kwargs.setdefault("shuffling_queue_capacity", 0)
        more = {"name": name, "limit_step_per_epoch": limit_step_per_epoch, "verbose": verbose}
        super().__init__(*args, **kwargs, **more)


def _take_batches(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yields the given number of batches, or all batches if `count` is negative; reads no batch
    beyond.
    """
    step = 0
    while step != count:
        try:
            batch = next(batches)
        except StopIteration:
            return
        step += 1
        yield batch


def _row_count(batch: Mapping[str, torch.Tensor]) -> int:
    return min((len(column) for column in batch.values()), default=0)


def _batch_tensors(batch: Any) -> Batch:
    """Returns a batch as a dict of tensors; of petastorm's named tuples too."""
    fields = batch._asdict() if hasattr(batch, "_asdict") else batch

    def to_tensor(value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        array = np.asarray(value)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    return {name: to_tensor(value) for name, value in fields.items()}


def _rebatch_rows(reader: Iterable[Any], batch_size: int, capacity: int) -> Iterator[Batch]:
    """Yields batches of one size, with rows drawn at random from `capacity` rows of a reader."""
    pool: list[Batch] = []
    held = 0
    min_rows = max(capacity, batch_size)

    def draw_batches(all_of_it: bool) -> Iterator[Batch]:
        """Yields batches while at least `min_rows` rows are held, or until no row is left."""
        nonlocal held
        if not pool:
            return
        whole = (
            pool[0]
            if len(pool) == 1
            else {name: torch.cat([one[name] for one in pool]) for name in pool[0]}
        )
        if capacity > 0:
            order = torch.randperm(held)
            whole = {name: column[order] for name, column in whole.items()}
        at = 0
        while held > 0 and (all_of_it or held >= min_rows):
            count = min(batch_size, held)
            yield {name: column[at : at + count] for name, column in whole.items()}
            at, held = at + count, held - count
        pool[:] = [{name: column[at:] for name, column in whole.items()}] if held else []

    for batch in reader:
        tensors = _batch_tensors(batch)
        rows = _row_count(tensors)
        if rows == 0:
            continue
        pool.append(tensors)
        held += rows
        # Twice as many as must be held: each round of copies gives many batches.
        if held >= (2 * min_rows if capacity > 0 else min_rows):
            yield from draw_batches(all_of_it=False)
    yield from draw_batches(all_of_it=True)
