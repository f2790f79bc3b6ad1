# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The counts that divide the losses of a step, summed over processes before gradients are computed.

The number of rows is known from the position in the data. Counts of labels are not: each process
counts the labels of the batches of its next step, and one allreduce of a number per label, which
runs during the forward pass, adds the counts of all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.torch.columns.loss_terms import LabelLoss, LossTerm
    from farandole.spark.torch.job import TorchLabel
    from farandole.spark.torch.training.process_setup import BatchedSource


_ALLREDUCES_AT_ONCE = 4
"""Numbers in the names of allreduces; a loader that reads ahead has two of them under way."""


class LabelCounter:
    """Counts the labels of batches.

    Args:
        losses: one per label.
        labels: the labels.
    """

    def __init__(self, losses: Sequence[LabelLoss], labels: Sequence[TorchLabel]) -> None:
        self._pairs = list(zip(losses, labels, strict=True))

    def __len__(self) -> int:
        """Returns the number of labels."""
        return len(self._pairs)

    @property
    def counts_more_than_rows(self) -> bool:
        """Whether a count is more than the number of rows."""
        return any(loss.counts_more_than_rows for loss, _ in self._pairs)

    def count_batch(self, rows: PaddedRankBatch) -> list[float]:
        """Returns what the losses of a batch are divided by, one number per label.

        Args:
            rows: the batch, in host memory, where counting does not wait for a GPU.
        """
        counts: list[float] = []
        for loss, one in self._pairs:
            label = rows.columns[one.column.name][: rows.valid]
            counts.append(loss.loss_divisor(label.to(getattr(torch, one.dtype)), rows.valid))
        return counts


class StepLossDivisors:
    """The counts of all processes in the batches of one step of the optimizer.

    Args:
        counts: one per label, of all processes, or of this process if they are added up.
        size: processes.
        adds_up: whether the counts of all processes are to be added up; a collective call.
        step: number of the step.
    """

    def __init__(self, counts: Sequence[float], size: int, *, adds_up: bool, step: int = 0) -> None:
        self._counts = list(counts)
        self._size = size
        self._handle: Any = None
        if adds_up and size > 1:
            self._handle = hvd.allreduce_async(
                torch.tensor(self._counts, dtype=torch.float64),
                op=hvd.Sum,
                name=f"farandole.counts.{step % _ALLREDUCES_AT_ONCE}",
            )

    def step_loss(self, terms: Sequence[LossTerm]) -> torch.Tensor:
        """Returns the part of a batch in the step's loss, before gradients are averaged over
        processes.

        Args:
            terms: losses of the labels.
        """
        counts = self.wait()
        parts = [
            one.step_loss_part(count, self._size) for one, count in zip(terms, counts, strict=True)
        ]
        return torch.stack(parts).sum()

    def wait(self) -> list[float]:
        """Returns the counts of all processes."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._counts = hvd.synchronize(handle).tolist()
        return self._counts


def batches_with_step_counts(
    rows: Iterable[PaddedRankBatch],
    source: BatchedSource,
    counter: LabelCounter,
    size: int,
    *,
    step: int,
    steps: int,
    passes: int,
    of_all: bool = True,
) -> Generator[tuple[PaddedRankBatch, StepLossDivisors]]:
    """Yields batches with the counts of the steps that they belong to.

    If counts depend on labels, the batches of one step of the optimizer are read before the first
    of them is yielded.

    Args:
        rows: batches of the rest of an epoch.
        source: where they come from.
        counter: counts the labels of batches.
        size: processes.
        step: number of the first batch in the epoch.
        steps: batches of the epoch.
        passes: batches that make one step of the optimizer.
        of_all: whether a step has the batches of all processes, not of this process alone.
    """
    counts_labels = counter.counts_more_than_rows
    waiting: list[PaddedRankBatch] = []
    counts: StepLossDivisors | None = None
    for one in rows:
        first = step - step % passes
        last = min(first + passes, steps)
        step += 1
        everywhere = source.row_count_in_steps(first, last)
        if of_all and not counts_labels and everywhere is not None:
            if counts is None or step - 1 == first:
                counts = StepLossDivisors([everywhere] * len(counter), size, adds_up=False)
            yield one, counts
            continue
        waiting.append(one)
        if step == last:
            found = [counter.count_batch(each) for each in waiting]
            sums = [sum(each) for each in zip(*found, strict=True)]
            counts = StepLossDivisors(
                sums, size if of_all else 1, adds_up=of_all, step=first // passes
            )
            for each in waiting:
                yield each, counts
            waiting = []
