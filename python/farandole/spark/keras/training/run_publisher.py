# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files and reports that rank 0 writes during a run, see
`farandole.spark.common.show.epoch_reports`. A checkpoint is a `.keras` file; `checkpoint.best` is
the one that `checkpoint_callback` kept.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from farandole._keras.callbacks import write_jax_state_to_model
from farandole.runner.show.history import entries_from_keras
from farandole.spark.common.show.epoch_reports import EpochReporter, write_history
from farandole.spark.common.show.step_meter import StepMeter
from farandole.spark.keras.saving import model_bytes
from farandole.stores import durable_writes

if TYPE_CHECKING:
    from pathlib import Path

    from farandole.spark.keras.job import KerasTrainingJob
    from farandole.spark.keras.training.learning_rate import ScaledLearningRate

_SECONDS, _ROWS = "seconds", "rows"


class StepTimingCallback(keras.callbacks.Callback):
    """A callback that measures the parts of this rank's time; Keras's own step contains the
    reduction.
    """

    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        # On TensorFlow and JAX, Keras reads the rows of a step inside of the step.
        self._meter = StepMeter(sees_data=keras.backend.backend() == "torch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        del epoch, logs
        self._meter.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the rows are read."""
        del batch, logs
        self._meter.mark_rows_read()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the end of a step."""
        del batch, logs
        self._meter.end_batch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the measured times."""
        del epoch, logs
        self._meter.report_remaining_means()


class UserCheckpointCallback(keras.callbacks.Callback):
    """The user's `checkpoint_callback`, writing where the run wants it, with the learning rate of
    one process.

    Args:
        inner: a `ModelCheckpoint`.
        path: a local file.
        rate: of the optimizer.
    """

    def __init__(self, inner: Any, path: Path, rate: ScaledLearningRate) -> None:
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
            write_jax_state_to_model(self.model)
            with self._rate.single_process_rate():
                self.inner.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Hands on."""
        with self._rate.single_process_rate():
            self.inner.on_epoch_end(epoch, logs)


class RunPublisher(keras.callbacks.Callback):
    """A callback that keeps history and checkpoints, and reports progress. It runs on rank 0, after
    all other callbacks.

    Args:
        job: the run.
        rate: learning rate of the optimizer.
        note: note of a checkpoint about the epochs before this run.
        steps: batches of an epoch.
        rows: rows of all processes in an epoch.
        kept: the user's checkpoint callback.
        board: local directory of the user's TensorBoard callback.
        model: model in training.
        writes: whether this process writes files and reports. Otherwise the process only collects
            the data, so that it can write later.
    """

    async_safe = True

    def __init__(
        self,
        job: KerasTrainingJob,
        rate: ScaledLearningRate,
        note: dict[str, Any],
        steps: int,
        rows: int,
        kept: UserCheckpointCallback | None,
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
        self._tensorboard_directory = board
        self._written_versions: dict[str, tuple[int, int]] = {}
        self.history: dict[str, list[Any]] = note.get("history", {})
        self.timing: list[dict[str, float]] = note.get("timing", [])
        self.last: bytes | None = None
        self._epoch = 0
        self._epoch_start = 0.0
        self._reporter = EpochReporter(job.epochs)
        self._training_seconds: float | None = None

    def set_epoch_size(self, steps: int, rows: int) -> None:
        """Takes note of another world.

        Args:
            steps: batches of an epoch.
            rows: of all processes in an epoch.
        """
        self._steps, self._rows = steps, rows

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        del logs
        self._epoch, self._epoch_start, self._training_seconds = epoch, time.monotonic(), None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports now and then."""
        if not self._writes or not self._reporter.is_step_report_due():
            return
        done, loss = batch + 1, float((logs or {}).get("loss", float("nan")))
        seconds = max(time.monotonic() - self._epoch_start, 1e-9)
        speed = self._rows * done / self._steps / seconds
        self._reporter.report_step(self._epoch, done, self._steps, speed, loss)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes how long training took, without validation."""
        del logs
        self._training_seconds = time.monotonic() - self._epoch_start

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Publishes the epoch."""
        del epoch
        seconds = time.monotonic() - self._epoch_start
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(np.asarray(value).tolist())
        self.timing.append({_SECONDS: seconds, _ROWS: self._rows})
        self.last = None
        if not self._writes:
            return
        if self._job.store.saving_runs:
            self._write_files(self.current_checkpoint())
        entry = entries_from_keras(self.history, self.timing)[-1]
        speed = self._rows / max(self._training_seconds or seconds, 1e-9)
        self._reporter.report_epoch(entry, self._steps, speed)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Publishes once more: other callbacks may have changed the model, as
        `restore_best_weights` does.
        """
        del logs
        if self.timing:
            self.last = None
            if self._writes and self._job.store.saving_runs:
                self._write_files(self.current_checkpoint())

    def current_checkpoint(self) -> bytes:
        """Returns the model as it is now, with the history of the run."""
        if self.last is None:
            with self._rate.single_process_rate():
                self.last = model_bytes.add_metadata_note(
                    model_bytes.pack_model(self.model), self.create_history_note()
                )
        return self.last

    def create_history_note(self) -> dict[str, Any]:
        """Returns the history of the epochs in a checkpoint."""
        best = None if self.kept is None else getattr(self.kept.inner, "best", None)
        return {
            "history": self.history,
            "timing": self.timing,
            "best": None if best is None else float(best),
            "rate_rows": self._job.step_rows,
        }

    def result_model(self) -> bytes:
        """Returns the model that `fit` returns: the one that the user's callback kept, else the
        last.
        """
        if self.kept is not None and durable_writes.is_path_present(self.kept.path):
            return self.kept.path.read_bytes()
        return self.current_checkpoint()

    def _write_files(self, checkpoint: bytes) -> None:
        store = self._job.store
        if self.kept is not None and self._has_checkpoint_file_changed(self.kept.path):
            store.write_checkpoint(f"{store.checkpoint_filename}.best", self.kept.path.read_bytes())
        store.write_checkpoint(store.checkpoint_filename, checkpoint)
        told = entries_from_keras(self.history, self.timing)
        write_history(store, told, events=self._tensorboard_directory is None)
        if self._tensorboard_directory is None:
            return
        for path in sorted(self._tensorboard_directory.rglob("*")):
            if durable_writes.is_present_file(path) and self._has_checkpoint_file_changed(path):
                name = path.relative_to(self._tensorboard_directory).as_posix()
                if not store.write_log(f"{store.logs_subdir}/{name}", path.read_bytes()):
                    del self._written_versions[str(path)]  # the next epoch writes it

    def _has_checkpoint_file_changed(self, path: Path) -> bool:
        if not durable_writes.is_path_present(path):
            return False
        found = path.stat()
        mark = (found.st_mtime_ns, found.st_size)
        known, self._written_versions[str(path)] = self._written_versions.get(str(path)), mark
        return mark != known
