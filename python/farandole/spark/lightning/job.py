# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The description of a job for a training process: plain values and one pickle of the user's
objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farandole.spark.torch.job import TorchTrainingJob


@dataclass(frozen=True, kw_only=True)
class LightningTrainingJob(TorchTrainingJob):
    """One run, with `LightningUserObjects`."""

    package: str
    """`lightning.pytorch` or `pytorch_lightning`, whichever the module is of."""
    batches: bool
    """Whether batches are dicts by column, as a user's module takes them."""
    more_columns: tuple[str, ...]
    """Columns of a batch that the transformation makes, besides inputs, labels and weights."""
    log_every: int
    gpus: int | None
    allow_pickle: bool | None
    """Whether the user allows the code in a checkpoint; `None` asks the variable."""


@dataclass
class LightningUserObjects:
    """The user's objects, in one pickle."""

    module: Any
    transformation: Any = None
    data_module: Any = None
    callbacks: tuple[Any, ...] = ()
    logger: Any = None
    profiler: Any = None
    trainer_args: dict[str, Any] = field(default_factory=dict)
    compression: Any = None
