# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`LogCallback`: the epochs of a Keras fit in the output of the driver."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import keras

from sparkdl.horovod import log_to_driver

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LogCallback"]


class LogCallback(keras.callbacks.Callback):
    """Sends the epochs of a fit, and their losses and metrics, to the driver by `log_to_driver`.

    Each rank that has the callback sends its own values: give it to rank 0 alone, after the
    callback that averages metrics.

    Args:
        per_batch_log: Whether to send the values of every batch, too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log
        self._epoch_began = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Sends the number of the epoch."""
        del logs
        self._epoch_began = time.monotonic()
        self._send(f"Epoch {epoch + 1} begins")

    def on_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Sends the values of a batch, if `per_batch_log` is set."""
        if self.per_batch_log:
            self._send(f"Batch {batch + 1}: {_format_values(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Sends the values of an epoch and its seconds."""
        seconds = time.monotonic() - self._epoch_began
        self._send(f"Epoch {epoch + 1} took {seconds:.1f} s: {_format_values(logs)}")

    def _send(self, text: str) -> None:
        log_to_driver(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _format_values(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {float(value):.4g}" for name, value in (logs or {}).items())
