# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loss that is NaN or infinite ends training, because all weights would be NaN one step later."""

from __future__ import annotations

import math
from typing import Final

NOT_FINITE_HINT: Final = (
    "Training ends, with the checkpoint of the epoch before. A smaller learning rate, gradients "
    "that are clipped and features of similar size help; terminate_on_nan=False trains on"
)


class NotFiniteError(ValueError):
    """The loss of a step is NaN or infinite."""


def check_finite_loss(loss: float, epoch: int, step: int, rank: int) -> None:
    """Refuses a loss that is no finite number.

    The rank with such a loss leaves its world. That ends the job on all ranks, without a wait.

    Args:
        loss: of one step, or a mean over the steps of an epoch so far.
        epoch: counted from 0.
        step: of the epoch, counted from 0.
        rank: of this process.

    Raises:
        NotFiniteError: naming epoch and step, counted from 1 as the progress counts them, and the
            rank.
    """
    if not math.isfinite(loss):
        told = "infinite" if math.isinf(loss) else "not a number (NaN)"
        raise NotFiniteError(
            f"the loss is {told} in epoch {epoch + 1}, step {step + 1}, on rank {rank}. "
            f"{NOT_FINITE_HINT}"
        )
