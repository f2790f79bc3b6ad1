# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Batches by column for Lightning: dicts of tensors, read by native threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farandole.spark.common.data.source import EpochPosition
from farandole.spark.torch.columns.tensors import check_finite_inputs, input_tensor, label_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.spark.torch.job import TorchTrainingJob
    from farandole.spark.torch.training.setup import BatchedSource


class LightningLoader:
    """One rank's batches: every iteration is the next epoch, of equally many steps on every rank.

    A batch has a tensor per input, by its column (or `"[a, b]"` for columns listed together), one
    per label, and the sample weights. On a rank that has no row left for the last step it repeats
    one.

    Args:
        source: of the rows.
        job: says what columns become.
        steps: of one epoch; `None` takes one pass.
        epoch: the first.
        place: where the first continues.
    """

    def __init__(
        self,
        source: BatchedSource,
        job: TorchTrainingJob,
        steps: int | None,
        epoch: int,
        place: EpochPosition | None = None,
    ) -> None:
        self._source = source
        self._job = job
        self._steps = steps
        self._epoch = epoch
        self._place = place or EpochPosition()
        source.set_epoch_start(self._place)
        self.checked = False

    def __len__(self) -> int:
        """Steps that are left of the next epoch, or of the one in progress were it to begin
        again.
        """
        return self._epoch_step_count() - self._place.steps

    def position_after_steps(self, epoch: int, steps: int) -> EpochPosition:
        """Returns the position of all processes.

        Args:
            epoch: epoch in progress.
            steps: steps of this epoch that this loader has yielded.
        """
        return self._source.position_after_steps(epoch, self._place.steps + steps)

    def rewind_to_start(self) -> None:
        """Lets the next epoch begin at its first row."""
        self._place = EpochPosition()
        self._source.set_epoch_start(self._place)

    def _epoch_step_count(self) -> int:
        return self._source.steps_until_end() if self._steps is None else self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the batches of the next epoch."""
        epoch = self._epoch
        self._epoch += 1
        host, allow_nan = torch.device("cpu"), self._job.data.missing.allow_nan
        for rows in self._source.epoch(epoch, self._epoch_step_count()):
            count = rows.valid or 1
            if not (self.checked or allow_nan):
                for one in self._job.inputs:
                    check_finite_inputs(rows.columns, one, count)
            batch: dict[str, Any] = {
                one.name: input_tensor(rows.columns, one, count, host) for one in self._job.inputs
            }
            for one in self._job.labels:
                label = label_tensor(
                    rows, one, count, host, checked=not self.checked, allow_nan=allow_nan
                )
                batch[one.column.name] = label if one.shape is None else label.reshape(one.shape)
            if self._job.weight is not None:
                batch[self._job.weight] = rows.columns[self._job.weight][:count].float().reshape(-1)
            yield batch
        self.checked = True
