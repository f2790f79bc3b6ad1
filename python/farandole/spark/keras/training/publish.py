# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files and reports that rank 0 writes during a run.

<runs>/<run_id>/checkpoint          after the last complete epoch, a `.keras` file; a repeated run
                                    continues from it
<runs>/<run_id>/checkpoint.previous the one before, which is used if the last one is damaged
<runs>/<run_id>/checkpoint.best     what `checkpoint_callback` kept, another
<runs>/<run_id>/logs/               history, and scalars for TensorBoard
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole._keras.callbacks import in_step
from farandole.runner.show.history import entries
from farandole.spark import task
from farandole.spark.common.show.events import scalars
from farandole.spark.common.show.meter import Meter
from farandole.spark.keras.saving import payload

if TYPE_CHECKING:
    from pathlib import Path

    from farandole.spark.common.runs.halting import Halt
    from farandole.spark.keras.job import Job
    from farandole.spark.keras.training.rate import Rate

_REPORT_SECONDS = 0.2
_SECONDS, _ROWS = "seconds", "rows"


class Metered(keras.callbacks.Callback):
    """Measures the parts of this rank's time; Keras's own step contains the reduction."""

    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        # On TensorFlow and JAX, Keras reads the rows of a step inside of the step.
        self._meter = Meter(sees_data=keras.backend.backend() == "torch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        del epoch, logs
        self._meter.epoch_begins()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """The rows are there."""
        del batch, logs
        self._meter.batch_begins()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """A step is done."""
        del batch, logs
        self._meter.batch_ends()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the measured times."""
        del epoch, logs
        self._meter.tell()


class Halted(keras.callbacks.Callback):
    """Ends the run on all ranks after an epoch in which the fit was stopped.

    Not within an epoch: some backends call callbacks of steps from another thread, later than the
    step.

    Args:
        halt: Tells whether the fit was stopped.
        rank: of this process.
    """

    def __init__(self, halt: Halt, rank: int) -> None:
        super().__init__()
        self._halt = halt
        self._rank = rank

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks."""
        del epoch, logs
        if self._halt.after_epoch(self._rank):
            model: Any = self.model
            model.stop_training = True


class Kept(keras.callbacks.Callback):
    """The user's `checkpoint_callback`, writing where the run wants it, with the learning rate of
    one process.

    Args:
        inner: a `ModelCheckpoint`.
        path: a local file.
        rate: of the optimizer.
    """

    def __init__(self, inner: Any, path: Path, rate: Rate) -> None:
        super().__init__()
        self.inner = inner
        self.path = path
        self._rate = rate
        inner.filepath = str(path)
        inner.save_weights_only = False  # the file is a whole model, whatever was asked for
        self.async_safe = inner.save_freq == "epoch"

    def set_params(self, params: dict[str, Any]) -> None:
        """Hands on."""
        super().set_params(params)
        self.inner.set_params(params)

    def set_model(self, model: Any) -> None:
        """Hands on."""
        super().set_model(model)
        self.inner.set_model(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Hands on."""
        self.inner.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Hands on, where it may save."""
        if self.inner.save_freq != "epoch":
            in_step(self.model)
            with self._rate.of_one_process():
                self.inner.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Hands on."""
        with self._rate.of_one_process():
            self.inner.on_epoch_end(epoch, logs)


class Publisher(keras.callbacks.Callback):
    """Keeps history and checkpoints, and reports progress; on rank 0, after all other callbacks.

    Args:
        job: the run.
        rate: of the optimizer.
        note: what a checkpoint said of the epochs before this run.
        steps: batches of an epoch.
        rows: of all processes in an epoch.
        kept: the user's checkpoint callback.
        board: local directory of the user's TensorBoard callback.
        model: that is trained.
        writes: whether this process writes and tells, and does not only keep what it needs to do so
            later.
    """

    async_safe = True

    def __init__(
        self,
        job: Job,
        rate: Rate,
        note: dict[str, Any],
        steps: int,
        rows: int,
        kept: Kept | None,
        board: Path | None,
        model: Any,
        *,
        writes: bool = True,
    ) -> None:
        super().__init__()
        self._writes = writes
        self.set_model(model)
        self._job = job
        self._rate = rate
        self._steps = steps
        self._rows = rows
        self.kept = kept
        self._board = board
        self._sent: dict[str, tuple[int, int]] = {}
        self.history: dict[str, list[Any]] = note.get("history", {})
        self.timing: list[dict[str, float]] = note.get("timing", [])
        self.last: bytes | None = None
        self._epoch = 0
        self._started = self._reported = 0.0
        self._trained: float | None = None

    def follow(self, steps: int, rows: int) -> None:
        """Takes note of another world.

        Args:
            steps: batches of an epoch.
            rows: of all processes in an epoch.
        """
        self._steps, self._rows = steps, rows

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        del logs
        self._epoch, self._started, self._trained = epoch, time.monotonic(), None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports now and then."""
        now = time.monotonic()
        if not self._writes or now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        done = batch + 1
        speed = self._rows * done / self._steps / max(now - self._started, 1e-9)
        place = {
            "epoch": self._epoch,
            "epochs": self._job.epochs,
            "step": done,
            "steps": self._steps,
        }
        loss = (logs or {}).get("loss", float("nan"))
        task.report({"kind": "step", **place, "rows_per_second": speed, "loss": float(loss)})

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes how long training took, without validation."""
        del logs
        self._trained = time.monotonic() - self._started

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Publishes the epoch."""
        del epoch
        seconds = time.monotonic() - self._started
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(np.asarray(value).tolist())
        self.timing.append({_SECONDS: seconds, _ROWS: self._rows})
        self.last = None
        if not self._writes:
            return
        if self._job.store.saving_runs:
            self._write(self.checkpoint())
        entry = entries(self.history, self.timing)[-1]
        speed = self._rows / max(self._trained or seconds, 1e-9)
        task.report(
            {
                "kind": "epoch",
                "entry": entry,
                "epochs": self._job.epochs,
                "steps": self._steps,
                "rows_per_second": speed,
            }
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Publishes once more: other callbacks may have changed the model, as
        `restore_best_weights` does.
        """
        del logs
        if self.timing:
            self.last = None
            if self._writes and self._job.store.saving_runs:
                self._write(self.checkpoint())

    def checkpoint(self) -> bytes:
        """Returns the model as it is now, with the history of the run."""
        if self.last is None:
            with self._rate.of_one_process():
                self.last = payload.annotate(payload.pack(self.model), self.note())
        return self.last

    def note(self) -> dict[str, Any]:
        """Returns the history of the epochs in a checkpoint."""
        best = None if self.kept is None else getattr(self.kept.inner, "best", None)
        return {
            "history": self.history,
            "timing": self.timing,
            "best": None if best is None else float(best),
        }

    def result(self) -> bytes:
        """Returns the model that `fit` returns: the one that the user's callback kept, else the
        last.
        """
        if self.kept is not None and self.kept.path.exists():
            return self.kept.path.read_bytes()
        return self.checkpoint()

    def _write(self, checkpoint: bytes) -> None:
        store = self._job.store
        if self.kept is not None and self._changed(self.kept.path):
            store.write_checkpoint(f"{store.checkpoint_filename}.best", self.kept.path.read_bytes())
        store.write_checkpoint(store.checkpoint_filename, checkpoint)
        told = entries(self.history, self.timing)
        store.write(
            f"{store.logs_subdir}/history.jsonl",
            "".join(json.dumps(one) + "\n" for one in told).encode(),
        )
        if self._board is None:
            store.write(f"{store.logs_subdir}/events.out.tfevents.farandole", scalars(told))
            return
        for path in sorted(self._board.rglob("*")):
            if path.is_file() and self._changed(path):
                store.write(
                    f"{store.logs_subdir}/{path.relative_to(self._board).as_posix()}",
                    path.read_bytes(),
                )

    def _changed(self, path: Path) -> bool:
        if not path.exists():
            return False
        found = path.stat()
        mark = (found.st_mtime_ns, found.st_size)
        known, self._sent[str(path)] = self._sent.get(str(path)), mark
        return mark != known
