# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The progress of a torch run, which `ProgressAcrossWorlds` commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farandole.spark.common.data.batch_source import EpochPosition


@dataclass(frozen=True)
class TorchRunProgress:
    """The progress of a run, the same on every rank.

    Attributes:
        begun: whether the run has its first state: a fresh state, or the state of a checkpoint.
        first_epoch: epoch with which this job began.
        history: entries of complete epochs.
        place: position in the data of the epoch in progress.
        totals: sums of the scores of this epoch; `None` before its first step.
        scores: training scores of this epoch, after its last step.
        seconds: duration of this epoch so far.
        taken: steps of the optimizer in all.
        taken_before: steps of the optimizer before this epoch.
        stepper: state of schedule and precision, with the factor of the learning rates.
        best: the best checkpoint so far, if the best checkpoint is kept.
        rate_rows: rows of a step on one process for which checkpoints contain the learning rate.
    """

    begun: bool = False
    first_epoch: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    place: EpochPosition = field(default_factory=EpochPosition)
    totals: list[float] | None = None
    scores: dict[str, Any] | None = None
    seconds: float = 0.0
    taken: int = 0
    taken_before: int = 0
    stepper: dict[str, Any] = field(default_factory=dict)
    best: bytes | None = None
    rate_rows: int = 0
