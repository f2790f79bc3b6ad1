# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders of torch's tensors from readers."""

from __future__ import annotations

import decimal
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from petastorm.reader import Reader

logger = logging.getLogger(__name__)

_WIDER_DTYPES = {"uint16": np.int32, "uint32": np.int64, "bool": np.uint8}


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """Returns a batch as torch's `default_collate` does, and decimals and strings as lists.

    Args:
        batch: Dicts of rows.
    """
    first = batch[0]
    if isinstance(first, decimal.Decimal | str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {name: decimal_friendly_collate([row[name] for row in batch]) for name in first}
    if isinstance(first, Sequence):
        return [decimal_friendly_collate(values) for values in zip(*batch, strict=True)]
    return default_collate(batch)


class LoaderBase:
    """A loader that can be iterated again after its last batch."""

    def __init__(self, reader: Reader, batch_size: int, shuffling_queue_capacity: int) -> None:
        """Creates a loader.

        Args:
            reader: The reader, which decides the number of epochs.
            batch_size: Rows of a batch; the last one may have less.
            shuffling_queue_capacity: Number of rows among which each row is drawn; 0 keeps the
                order.
        """
        self.reader, self.batch_size = reader, batch_size
        self.shuffling_queue_capacity = shuffling_queue_capacity
        self._is_iterating: bool | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yields batches.

        Raises:
            RuntimeError: Another iteration has not ended, or has failed.
            TypeError: A column that no tensor can hold.
        """
        if self._error is not None:
            raise RuntimeError(
                "Cannot start a new iteration because last time iteration failed with error "
                f"{self._error!r}"
            )
        if self._is_iterating:
            raise RuntimeError(
                "You must finish a full pass of Petastorm DataLoader before making another pass "
                "from the beginning. To start again earlier, make another reader and loader."
            )
        if self._is_iterating is not None:
            self.reader.reset()
        self._is_iterating = True
        try:
            yield from self._iterate()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._is_iterating = False

    def __enter__(self) -> Any:
        """Returns the loader."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops the reader."""
        self.reader.stop()
        self.reader.join()

    def _iterate(self) -> Iterator[Any]:
        queue = _RowQueue(self.batch_size, self.shuffling_queue_capacity)
        for result in self.reader:
            queue.add(self._prepare_columns(_with_types_of_torch(result._asdict())))
            while queue.has_batch():
                yield self._make_batch(queue.take())
        while len(queue):
            yield self._make_batch(queue.take())

    def _prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _make_batch(self, columns: dict[str, Any]) -> Any:
        raise NotImplementedError


class DataLoader(LoaderBase):
    """Batches that a function makes of rows; by default dicts of tensors."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] = decimal_friendly_collate,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        """Creates a loader.

        Args:
            reader: See `LoaderBase`.
            batch_size: See `LoaderBase`.
            collate_fn: Makes a batch of a list of dicts.
            shuffling_queue_capacity: See `LoaderBase`.
        """
        super().__init__(reader, batch_size, shuffling_queue_capacity)
        self.collate_fn = collate_fn

    def _prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        if self.reader.batched_output:
            return values
        row = np.empty(1, object)
        row[0] = values
        return {"": row}

    def _make_batch(self, columns: dict[str, Any]) -> Any:
        if not self.reader.batched_output:
            return self.collate_fn(list(columns[""]))
        if self.collate_fn is decimal_friendly_collate:  # the same tensors, without a loop
            return {name: torch.from_numpy(values) for name, values in columns.items()}
        rows = zip(*columns.values(), strict=True)
        return self.collate_fn([dict(zip(columns, row, strict=True)) for row in rows])


class BatchedDataLoader(LoaderBase):
    """Batches as dicts of tensors, without a function on rows."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        transform_fn: Callable[[Any], torch.Tensor] | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        """Creates a loader.

        Args:
            reader: See `LoaderBase`.
            batch_size: See `LoaderBase`.
            transform_fn: Makes a tensor of a column of several rows; default: `torch.as_tensor`.
            shuffling_queue_capacity: See `LoaderBase`.
        """
        super().__init__(reader, batch_size, shuffling_queue_capacity)
        self.transform_fn = transform_fn or torch.as_tensor

    def _prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self.transform_fn(value if self.reader.batched_output else np.asarray([value]))
            for name, value in values.items()
        }

    def _make_batch(self, columns: dict[str, Any]) -> Any:
        return columns


class _RowQueue:
    """Rows that wait for a batch, as columns; drawn at random if it has a capacity."""

    def __init__(self, batch_size: int, capacity: int) -> None:
        self._batch_size, self._capacity = batch_size, capacity
        self._columns: dict[str, Any] = {}
        self._order: Any = slice(0, 0)
        self._start = self._rows = 0

    def __len__(self) -> int:
        return self._rows - self._start

    def has_batch(self) -> bool:
        """Returns whether there are rows for a batch, and enough others to draw from."""
        return len(self) >= max(self._capacity - 2, 0) + self._batch_size

    def add(self, columns: dict[str, Any]) -> None:
        """Adds rows behind those that are left."""
        if len(self):
            joined = {
                name: _concatenate(self._select(values, self._start, self._rows), columns[name])
                for name, values in self._columns.items()
            }
            self._columns = joined
        else:
            self._columns = columns
        self._start, self._rows = 0, len(next(iter(self._columns.values()), ()))
        self._order = None

    def take(self) -> dict[str, Any]:
        """Removes and returns the rows of a batch."""
        if self._order is None and self._capacity:
            self._order = torch.randperm(self._rows)
        end = min(self._start + self._batch_size, self._rows)
        batch = {
            name: self._select(values, self._start, end) for name, values in self._columns.items()
        }
        self._start = end
        return batch

    def _select(self, values: Any, start: int, end: int) -> Any:
        if self._order is None:
            return values[start:end]
        order = self._order[start:end]
        return values[order] if torch.is_tensor(values) else values[order.numpy()]


def _concatenate(first: Any, second: Any) -> Any:
    return torch.cat([first, second]) if torch.is_tensor(first) else np.concatenate([first, second])


def _with_types_of_torch(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with the types that torch has.

    Raises:
        TypeError: Strings and objects in arrays, and missing values.
    """
    for name, value in values.items():
        if value is None:
            raise TypeError(f"Pytorch does not support nullable fields. Found None in {name}")
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "SUO":
                raise TypeError(
                    "Pytorch does not support arrays of string or object classes. Found in field "
                    f"{name}."
                )
            values[name] = value.astype(
                _WIDER_DTYPES.get(value.dtype.name, value.dtype), copy=False
            )
        elif isinstance(value, np.bool_):
            values[name] = np.uint8(value)
    return values
