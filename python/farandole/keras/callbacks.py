# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Callbacks for `model.fit` on several ranks."""

from farandole._keras import callbacks
from farandole._keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """Keeps the best model; the Spark estimator says where.

    Args:
        monitor: The metric.
        verbose: As in Keras.
        mode: As in Keras.
        save_freq: As in Keras.
        save_weights_only: Whether only weights are kept.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq)
