# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The reports and files about steps and epochs that rank 0 writes, for all frameworks.

<runs>/<run_id>/checkpoint               after the last complete epoch; a repeated run continues
from it
<runs>/<run_id>/checkpoint.previous      after the epoch before, which is used if the last one
is damaged
<runs>/<run_id>/checkpoint.best          after the best epoch, with `best_checkpoint`
<runs>/<run_id>/checkpoint.epoch-0010    after the tenth epoch, with `checkpoint_every=10`
<runs>/<run_id>/logs/                    history, and scalars for TensorBoard
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from farandole.runner.show.tensorboard_event_file import encode_scalar_events
from farandole.spark import task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farandole.stores.remote_store import RemoteStore

_STEP_REPORT_SECONDS = 0.2
"""Seconds between two reports about steps."""


class EpochReporter:
    """Reports of rank 0 to the driver.

    Args:
        epochs: number of the run's epochs.
    """

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._last_report_time = time.monotonic()

    def is_step_report_due(self) -> bool:
        """Returns whether it is time for the next report about a step."""
        return time.monotonic() - self._last_report_time >= _STEP_REPORT_SECONDS

    def report_step(
        self, epoch: int, step: int, steps: int, rows_per_second: float, loss: float
    ) -> None:
        """Reports a step.

        Args:
            epoch: number of the epoch.
            step: steps of the epoch so far.
            steps: steps of the whole epoch.
            rows_per_second: rows of all processes in a second.
            loss: mean loss of the epoch so far.
        """
        self._last_report_time = time.monotonic()
        position = {"epoch": epoch, "epochs": self._epochs, "step": step, "steps": steps}
        speed = {"rows_per_second": rows_per_second, "loss": loss}
        task.report({"kind": "step", **position, **speed})

    def report_epoch(self, entry: dict[str, Any], steps: int, rows_per_second: float) -> None:
        """Reports a complete epoch.

        Args:
            entry: the epoch's entry of the history.
            steps: steps of the epoch.
            rows_per_second: rows of all processes in a second, without validation.
        """
        record = {"entry": entry, "epochs": self._epochs, "steps": steps}
        task.report({"kind": "epoch", **record, "rows_per_second": rows_per_second})


def write_epoch_checkpoints(
    store: RemoteStore, data: bytes, epochs: int, *, is_best: bool, every: int | None
) -> None:
    """Writes the checkpoint of an epoch under its names; the name from which a run continues last.

    Args:
        store: store of the run.
        data: the checkpoint.
        epochs: complete epochs.
        is_best: whether it is the best epoch so far.
        every: interval in epochs at which a checkpoint is kept.
    """
    name = store.checkpoint_filename
    if is_best:
        store.write_checkpoint(f"{name}.best", data)
    if every is not None and epochs % every == 0:
        store.write_checkpoint(f"{name}.epoch-{epochs:04d}", data)
    store.write_checkpoint(name, data)


def write_history(
    store: RemoteStore, history: Sequence[dict[str, Any]], *, events: bool = True
) -> None:
    """Writes the history of a run to its logs.

    Args:
        store: store of the run.
        history: entries of all complete epochs.
        events: whether to write scalars for TensorBoard, too.
    """
    logs = store.logs_subdir
    lines = "".join(json.dumps(one) + "\n" for one in history)
    store.write_log(f"{logs}/history.jsonl", lines.encode())
    if events:
        store.write_log(
            f"{logs}/events.out.tfevents.farandole", encode_scalar_events(list(history))
        )
