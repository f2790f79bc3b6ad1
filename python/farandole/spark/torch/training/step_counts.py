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

    from farandole.spark.common.data.source import SourceBatch
    from farandole.spark.torch.columns.loss_terms import LossTerm
    from farandole.spark.torch.training.batches import BatchEvaluator
    from farandole.spark.torch.training.setup import BatchedSource


class StepCounts:
    """The counts of all processes in the batches of one step of the optimizer.

    Args:
        counts: one per label, of all processes, or of this process if they are added up.
        size: processes.
        adds_up: whether the counts of all processes are to be added up; a collective call.
    """

    def __init__(self, counts: Sequence[float], size: int, *, adds_up: bool) -> None:
        self._counts = list(counts)
        self._size = size
        self._handle: Any = None
        if adds_up and size > 1:
            self._handle = hvd.allreduce_async(
                torch.tensor(self._counts, dtype=torch.float64), op=hvd.Sum, name="farandole.counts"
            )

    def step_loss(self, terms: Sequence[LossTerm]) -> torch.Tensor:
        """Returns the part of a batch in the step's loss, before gradients are averaged over
        processes.

        Args:
            terms: losses of the labels.
        """
        counts = self.wait()
        parts = [one.step_part(count, self._size) for one, count in zip(terms, counts, strict=True)]
        return torch.stack(parts).sum()

    def wait(self) -> list[float]:
        """Returns the counts of all processes."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._counts = hvd.synchronize(handle).tolist()
        return self._counts


def count_steps(
    rows: Iterable[SourceBatch],
    source: BatchedSource,
    batches: BatchEvaluator,
    step: int,
    steps: int,
    passes: int,
) -> Generator[tuple[SourceBatch, StepCounts]]:
    """Yields batches with the counts of the steps that they belong to.

    If counts depend on labels, the batches of one step of the optimizer are read before the first
    of them is yielded.

    Args:
        rows: batches of the rest of an epoch.
        source: where they come from.
        batches: what turns rows into losses.
        step: number of the first batch in the epoch.
        steps: batches of the epoch.
        passes: batches that make one step of the optimizer.
    """
    labels = len(batches.label_losses)
    counts_labels = any(one.counts_labels for one in batches.label_losses)
    waiting: list[SourceBatch] = []
    counts: StepCounts | None = None
    for one in rows:
        first = step - step % passes
        last = min(first + passes, steps)
        step += 1
        everywhere = source.rows_in(first, last)
        if not counts_labels and everywhere is not None:
            if counts is None or step - 1 == first:
                counts = StepCounts([everywhere] * labels, batches.size, adds_up=False)
            yield one, counts
            continue
        waiting.append(one)
        if step == last:
            found = [batches.label_counts(each) for each in waiting]
            counts = StepCounts(
                [sum(each) for each in zip(*found, strict=True)], batches.size, adds_up=True
            )
            for each in waiting:
                yield each, counts
            waiting = []
