# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches by column for Lightning: dicts of tensors, read by native threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.data.batch_source import EpochPosition
from farandole.spark.torch.columns.model_calls import inputs_by_key
from farandole.spark.torch.columns.tensors import check_finite_inputs, input_tensor, label_tensor
from farandole.spark.torch.training.step_counts import StepLossDivisors, batches_with_step_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.lightning.job import LightningTrainingJob
    from farandole.spark.torch.training.process_setup import BatchedSource
    from farandole.spark.torch.training.step_counts import LabelCounter

_REMEMBERED_BATCHES = 8
"""Batches that a loader remembers; Lightning reads one or two ahead."""


@dataclass(frozen=True)
class YieldedBatchRecord:
    """A batch that a loader has yielded.

    Attributes:
        valid: rows that count; 0 for a batch of padding.
        counts: divisors of the losses of its step on all ranks, if labels are counted.
        own: divisors of the losses of this batch, if labels are counted.
    """

    valid: int
    counts: StepLossDivisors | None = None
    own: tuple[float, ...] = ()


class LightningLoader:
    """One rank's batches: every iteration is the next epoch, of equally many steps on every rank.

    A batch has a tensor per input, by its argument or else its column (or `"[a, b]"` for columns
    listed together), one per label, the sample weights, and the other columns that a transformation
    makes for a `LightningModule`. On a rank that has no row left for the last step it repeats one.

    Args:
        source: source of the rows.
        job: says what columns become.
        steps: number of steps of one epoch; `None` takes one pass.
        epoch: the first.
        position: position at which the first epoch continues.
        size: ranks.
        passes: batches that make one step of the optimizer.
        counter: counts the labels of training batches, for a module whose losses are known.
    """

    def __init__(
        self,
        source: BatchedSource,
        job: LightningTrainingJob,
        steps: int | None,
        epoch: int,
        position: EpochPosition | None = None,
        *,
        size: int = 1,
        passes: int = 1,
        counter: LabelCounter | None = None,
        of_all: bool = True,
    ) -> None:
        self._source = source
        self._job = job
        self._steps = steps
        self._epoch = epoch
        self._position = position or EpochPosition()
        self._size = size
        self._passes = passes
        self._counter = counter
        self._of_all = of_all
        self._read: dict[int, YieldedBatchRecord] = {}
        source.set_epoch_start(self._position)
        self.checked = False

    def __len__(self) -> int:
        """Steps that are left of the next epoch, or of the one in progress were it to begin
        again.
        """
        return self._epoch_step_count() - self._position.steps

    def position_after_steps(self, epoch: int, steps: int) -> EpochPosition:
        """Returns the position of all processes.

        Args:
            epoch: epoch in progress.
            steps: steps of this epoch that this loader has yielded.
        """
        return self._source.position_after_steps(epoch, self._position.steps + steps)

    def yielded_batch_record(self, index: int) -> YieldedBatchRecord:
        """Returns the record of a batch that this loader has yielded.

        Args:
            index: number of the batch in the epoch, counted by this loader.
        """
        return self._read[index]

    def global_row_count(self, first: int, last: int) -> int:
        """Returns the rows of all ranks in the batches from `first` up to, not including, `last`.

        Args:
            first: number of a batch of this loader.
            last: number of a later batch.
        """
        found = self._source.row_count_in_steps(
            self._position.steps + first, self._position.steps + last
        )
        return max(1, found or 0)

    def nonempty_batch_count(self, first: int, last: int) -> int:
        """Returns how many batches of all ranks have rows.

        Args:
            first: number of a batch of this loader.
            last: number of a later batch.
        """
        return sum(
            min(self._size, self.global_row_count(index, index + 1)) for index in range(first, last)
        )

    def rewind_to_start(self) -> None:
        """Lets the next epoch begin at its first row."""
        self._position = EpochPosition()
        self._source.set_epoch_start(self._position)

    def _epoch_step_count(self) -> int:
        return self._source.steps_until_end() if self._steps is None else self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the batches of the next epoch."""
        epoch = self._epoch
        self._epoch += 1
        host, allow_nan = torch.device("cpu"), self._job.data.missing.allow_nan
        steps, index = self._epoch_step_count(), -1
        self._read = {}
        for rows, counts in self._batches_with_counts(epoch, steps):
            index += 1
            own = () if self._counter is None else tuple(self._counter.count_batch(rows))
            self._read[index] = YieldedBatchRecord(rows.valid, counts, own)
            self._read.pop(index - _REMEMBERED_BATCHES, None)
            count = rows.valid or 1
            if not (self.checked or allow_nan):
                for spec in self._job.inputs:
                    check_finite_inputs(rows.columns, spec, count)
            tensors = [input_tensor(rows.columns, one, count, host) for one in self._job.inputs]
            batch: dict[str, Any] = inputs_by_key(self._job.inputs, tensors)
            for spec in self._job.labels:
                label = label_tensor(
                    rows, spec, count, host, checked=not self.checked, allow_nan=allow_nan
                )
                batch[spec.column.name] = label if spec.shape is None else label.reshape(spec.shape)
            if self._job.weight is not None:
                batch[self._job.weight] = rows.columns[self._job.weight][:count].float().reshape(-1)
            batch |= {name: rows.columns[name][:count] for name in self._job.more_columns}
            yield batch
        self.checked = True

    def _batches_with_counts(
        self, epoch: int, steps: int
    ) -> Iterator[tuple[PaddedRankBatch, StepLossDivisors | None]]:
        batches = self._source.iterate_epoch_batches(epoch, steps)
        if self._counter is None:
            return ((rows, None) for rows in batches)
        return batches_with_step_counts(
            batches,
            self._source,
            self._counter,
            self._size,
            step=self._position.steps,
            steps=steps,
            passes=self._passes,
            of_all=self._of_all,
        )
