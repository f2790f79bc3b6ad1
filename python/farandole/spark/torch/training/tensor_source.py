# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches as tensors, from the native reader or from the user's data module."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farandole.spark.common.data.batch_source import BatchSource, EpochPosition, PaddedRankBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping


class TensorSource(BatchSource):
    """Prepared data, or Parquet of any program, through the native reader."""

    keeps_place = True
    """Whether another process can continue an epoch in the middle."""

    def iterate_epoch_batches(self, number: int, steps: int) -> Generator[PaddedRankBatch]:
        """Like `BatchSource.epoch`."""
        with closing(super().iterate_epoch_batches(number, steps)) as batches:
            for rows in batches:
                yield replace(rows, columns=to_tensors(rows.columns))


class DataModuleSource:
    """Batches of a user's data module, whose rows all count.

    Args:
        loader: makes an iterable of batches, each a mapping or a named tuple of columns.
        steps: of one epoch.
    """

    keeps_place = False

    def __init__(self, loader: Callable[[], Iterable[Any]], steps: int) -> None:
        self.steps = max(steps, 1)
        self._loader = loader
        self._batch_iterator: Iterator[Any] | None = None

    def row_count_in_steps(self, _first: int, _last: int) -> None:
        """Rows of all processes in some steps, which are unknown."""
        return

    def set_epoch_start(self, place: EpochPosition) -> None:
        """Does nothing: epochs begin at their first row."""
        del place

    def steps_until_end(self) -> int:
        """Steps of an epoch."""
        return self.steps

    def position_after_steps(self, _number: int, steps: int) -> EpochPosition:
        """Returns the number of steps that are done. No other position is known.

        Args:
            steps: that are done.
        """
        return EpochPosition(steps)

    def iterate_epoch_batches(self, _number: int, steps: int) -> Generator[PaddedRankBatch]:
        """Yields the batches of an epoch. An infinite loader continues at its position, a finite
        loader starts again.

        Args:
            steps: how many batches.
        """
        for _ in range(steps):
            tensors = to_tensors(self._next_batch())
            count = len(next(iter(tensors.values())))
            yield PaddedRankBatch(tensors, count, count)

    def _next_batch(self) -> Mapping[str, Any]:
        for left in (self._batch_iterator, None):
            self._batch_iterator = iter(self._loader()) if left is None else left
            batch = next(self._batch_iterator, None)
            if batch is not None:
                return batch if isinstance(batch, dict) else batch._asdict()
        raise ValueError("the data module has no batches")


def to_tensors(columns: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the columns of NumPy or torch as tensors, except columns of a type that is no number.

    Args:
        columns: columns by name, rows first.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, values in columns.items():
        if isinstance(values, torch.Tensor):
            tensors[name] = values
        elif np.asarray(values).dtype.kind in "biuf":
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors
