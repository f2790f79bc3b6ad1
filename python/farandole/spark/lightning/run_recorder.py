# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The callback of a Lightning run: history, progress, checkpoints in the store, early stopping.

The history contains every value that the module logs, as a mean over the rows of all processes.
Names that start with `val_` are of validation, a leading `train_` is removed, and `train` always
has a `loss`.
"""

from __future__ import annotations

import contextlib
import io
import time
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.numpy.plain_value_exchange import allgather_plain
from farandole.spark.common.runs.finite_loss import check_finite_loss
from farandole.spark.common.show.epoch_reports import (
    EpochReporter,
    write_epoch_checkpoints,
    write_history,
)
from farandole.spark.common.show.step_meter import StepMeter
from farandole.spark.lightning.padding_logs import LoggedValuesBeforePadding
from farandole.stores import durable_writes
from farandole.stores.pickle_policy import resolve_pickle_decision
from farandole.torch.sync_batch_norm import exclude_padding_rows

if TYPE_CHECKING:
    from pathlib import Path

    from farandole.spark.common.runs.stop_request import StopCheck
    from farandole.spark.lightning.job import LightningTrainingJob
    from farandole.spark.lightning.lightning_loader import LightningLoader

_CHECKPOINT_SUFFIX = ".ckpt"
"""Suffix of the files of Lightning's checkpoint callbacks."""


class LightningRunRecorder:
    """One rank's view of a run, by the hooks of Lightning's callbacks; see `recorder_class`.

    Args:
        job: the run.
        scratch: local directory.
        history: history of earlier epochs.
        rank: rank of this process.
        size: processes.
        halt: check whether the user has stopped the fit.
        begun: rows of the epoch in progress that were counted in other worlds, and the sum of their
            losses.
        moves: whether another process may become rank 0: then all keep the best.
    """

    def __init__(
        self,
        job: LightningTrainingJob,
        scratch: Path,
        history: list[dict[str, Any]],
        rank: int,
        size: int,
        halt: StopCheck,
        begun: tuple[int, float] = (0, 0.0),
        *,
        moves: bool = False,
    ) -> None:
        self._earlier_totals = begun
        self._moves = moves
        self.job, self.store = job, job.store
        self.scratch = scratch
        self.history = history
        self.rank, self.size = rank, size
        self.best: dict[str, Any] | None = None
        self.started = time.monotonic()
        self.reporter = EpochReporter(job.loop.epochs)
        self.rows = 0
        self.val_rows = 0
        self.total = 0.0
        self.meter = StepMeter()
        self.halt = halt
        self._batch_index = 0
        self._loaders: dict[str, LightningLoader | None] = {"train": None, "val": None}
        self._padding_logs: LoggedValuesBeforePadding | None = None
        self._padding_scope = contextlib.ExitStack()
        halt.begin_epoch()

    def use_loaders(self, train: LightningLoader | None, val: LightningLoader | None) -> None:
        """Takes the loaders, which know the rows of their batches.

        Args:
            train: loader of training batches; `None` if a data module reads them.
            val: loader of validation batches; `None` if there are none, or a data module reads
                them.
        """
        self._loaders = {"train": train, "val": val}

    def scale_loss(self, loss: torch.Tensor, trainer: Any) -> torch.Tensor:
        """Returns the part of the batch in progress in the step's loss, before DDP averages
        gradients over ranks.

        Lightning divides the loss of a batch by `accumulate_grad_batches`, and DDP averages
        gradients over ranks, so every batch would weigh the same. Here each batch weighs by its
        rows, and a batch of padding weighs 0.

        Args:
            loss: loss of the batch, divided by `accumulate_grad_batches` if Lightning steps the
                optimizer.
            trainer: Lightning's.
        """
        module, loader, index = trainer.lightning_module, self._loaders["train"], self._batch_index
        passes = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        own = getattr(module, "take_step_loss", None)
        prepared = None if own is None else own()
        if prepared is not None:
            return prepared
        if loader is None:
            return loss
        rows = loader.yielded_batch_record(index).valid
        if self.job.loop.takes_local_steps:
            return loss * (1.0 if rows else 0.0)
        if self.job.loss_reduction == "sum":
            return loss * float(passes * self.size if rows else 0)
        first = index - index % passes
        last = min(first + passes, int(trainer.num_training_batches))
        if self.job.loss_reduction == "per_batch":
            batches = loader.nonempty_batch_count(first, last)
            return loss * (passes * self.size / batches if rows else 0.0)
        return loss * (rows * passes * self.size / loader.global_row_count(first, last))

    def _begin_batch(self, trainer: Any, stage: str, index: int) -> None:
        """Notes the batch in progress."""
        if stage == "train":
            self._batch_index = index
        loader = self._loaders[stage]
        if loader is not None and not loader.yielded_batch_record(index).valid:
            self._padding_logs = LoggedValuesBeforePadding(trainer)
            self._padding_scope.enter_context(exclude_padding_rows(0, 1))

    def on_exception(self, *_: Any) -> None:
        """Lets the next batch count, also if this one has failed."""
        self._padding_scope.close()

    def _end_batch(self, batch: Any, stage: str, index: int) -> int:
        """Returns the rows of a batch that count, and removes the values that were logged for
        padding.
        """
        self._padding_scope.close()
        if self._padding_logs is not None:
            self._padding_logs.restore()
            self._padding_logs = None
        loader = self._loaders[stage]
        return (
            _batch_row_count(batch) if loader is None else loader.yielded_batch_record(index).valid
        )

    def on_train_epoch_start(self, *_: Any) -> None:
        """Resets the counts."""
        self.started = time.monotonic()
        self.rows, self.val_rows, self.total = 0, 0, 0.0
        self.meter.begin_epoch()
        self.halt.begin_epoch()

    def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, index: int) -> None:
        """Notes the batch in progress.

        Raises:
            ValueError: A callback has changed the passes by which a global batch is divided.
        """
        passes = self.job.loop.backward_passes_per_step
        if self.job.data.step_rows is not None and trainer.accumulate_grad_batches != passes:
            raise ValueError(
                f"global_batch_size is divided by backward_passes_per_step={passes}, and a "
                f"callback has set accumulate_grad_batches: {trainer.accumulate_grad_batches}"
            )
        self.meter.mark_rows_read()
        self._begin_batch(trainer, "train", index)

    def on_train_batch_end(
        self, trainer: Any, _module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Counts a batch, and sends a report to the driver at intervals.

        Raises:
            NotFiniteError: the loss is NaN or infinite, and such a loss must end the run.
        """
        rows = self._end_batch(batch, "train", index)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.rows += rows
        self.meter.end_batch(rows)
        if isinstance(loss, torch.Tensor) and rows:
            value = float(loss.detach())
            if self.job.loop.terminate_on_nan:
                check_finite_loss(value, trainer.current_epoch, index, self.rank)
            self.total += value * rows
        if self.halt.should_stop_after_step(self.rank):
            trainer.should_stop = True
        if self.rank != 0 or not self.reporter.is_step_report_due():
            return
        speed = self.rows * self.size / max(time.monotonic() - self.started, 1e-9)
        steps, loss = int(trainer.num_training_batches), self.total / max(self.rows, 1)
        self.reporter.report_step(trainer.current_epoch, index + 1, steps, speed, loss)

    def on_validation_batch_start(
        self, trainer: Any, _module: Any, _batch: Any, index: int, *_: Any
    ) -> None:
        """Notes the batch in progress."""
        self._begin_batch(trainer, "val", index)

    def on_validation_batch_end(
        self, _trainer: Any, _module: Any, _outputs: Any, batch: Any, index: int, *_: Any
    ) -> None:
        """Counts a batch."""
        self.val_rows += self._end_batch(batch, "val", index)

    def on_save_checkpoint(self, _trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the history."""
        checkpoint["farandole_history"] = self.history

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Writes the history's entry and the checkpoint; a collective call."""
        self.meter.report_remaining_means()
        seconds = time.monotonic() - self.started
        logged = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1
        }
        records = allgather_plain(
            (logged, self.rows, self.val_rows, self.total, self._take_plain_loss_sums(module))
        )
        rows = sum(record[1] for record in records)
        before, loss_before = self._earlier_totals
        self._earlier_totals = (0, 0.0)
        parts: dict[str, dict[str, float]] = {"train": {}, "validation": {}}
        for name in logged:
            is_val = name.startswith("val_")
            weights = [record[2] if is_val else record[1] for record in records]
            total = sum(
                record[0].get(name, 0.0) * weight
                for record, weight in zip(records, weights, strict=True)
                if weight
            )
            parts["validation" if is_val else "train"][
                name.removeprefix("val_").removeprefix("train_")
            ] = total / max(sum(weights), 1)
        rows += before
        parts["train"].setdefault(
            "loss", (loss_before + sum(record[3] for record in records)) / max(rows, 1)
        )
        if not before:
            for part, loss in _global_plain_losses([record[4] for record in records]).items():
                parts[part]["loss"] = loss
        entry: dict[str, Any] = {"epoch": len(self.history)}
        for part, numbers in parts.items():
            if numbers:
                loss = numbers.pop("loss", None)
                metrics = [{name: value} for name, value in numbers.items()]
                entry[part] = {"loss": loss, "all_metrics": metrics}
        entry |= {"seconds": seconds, "rows": rows}
        self.history.append(entry)
        self._publish_epoch(trainer)
        if self.rank == 0:
            steps = int(trainer.num_training_batches)
            self.reporter.report_epoch(entry, steps, rows / max(seconds, 1e-9))
        stopping = self.job.loop.early_stopping
        if (
            stopping is not None and stopping.is_patience_exhausted(self.history)
        ) or self.halt.should_stop_after_epoch(self.rank):
            trainer.should_stop = True

    def _take_plain_loss_sums(self, module: Any) -> dict[str, Any]:
        """Returns the sums and counts of the losses of a plain module, and begins new ones."""
        found = getattr(module, "loss_sums", None)
        if found is None:
            return {}
        module.reset_loss_sums()
        return {
            stage: ([float(one) for one in sums], counts) for stage, (sums, counts) in found.items()
        }

    def global_loss_total(self) -> float:
        """Returns the sum of the losses of the epoch so far, over the rows of all processes; a
        collective call.
        """
        total = hvd.allreduce(
            torch.tensor([self.total], dtype=torch.float64), op=hvd.Sum, name="farandole.total"
        )
        return self._earlier_totals[1] + float(total)

    def _publish_epoch(self, trainer: Any) -> None:
        best, every = self.job.loop.best_checkpoint, self.job.loop.checkpoint_every
        is_best = best is not None and best.best_index(self.history) == len(self.history) - 1
        if is_best and (self._moves or self.rank == 0):
            self.best = {
                name: value.detach().cpu().clone()
                for name, value in trainer.lightning_module.state_dict().items()
            }
        if not self.store.saving_runs:
            return
        path = self.scratch / "checkpoint"
        trainer.save_checkpoint(str(path))  # all ranks take part
        if self.rank != 0:
            return
        count = len(self.history)
        write_epoch_checkpoints(self.store, path.read_bytes(), count, is_best=is_best, every=every)
        write_history(self.store, self.history)
        self.on_fit_end()

    def on_fit_end(self, *_: Any) -> None:
        """Copies the files of loggers and checkpoint callbacks to the store; Lightning writes its
        own checkpoint of the last epoch after the end of the epoch. A log that cannot be written is
        a warning, a checkpoint an error.
        """
        if self.rank != 0 or not self.store.saving_runs:
            return
        run = self.scratch / "run"
        for file in sorted(run.rglob("*")):
            if durable_writes.is_present_file(file):
                is_checkpoint = file.suffix == _CHECKPOINT_SUFFIX
                write = self.store.write if is_checkpoint else self.store.write_log
                write(file.relative_to(run).as_posix(), file.read_bytes())

    def result_weights(self, trainer: Any, module: Any) -> dict[str, torch.Tensor]:
        """Returns the resulting weights of the run: the best weights if they were requested, else
        the last ones.

        Args:
            trainer: the trainer, after the fit.
            module: the trained module.
        """
        if self.best is not None:
            return self.best
        found = (
            self.store.read_checkpoint(f"{self.store.checkpoint_filename}.best")
            if self.job.loop.best_checkpoint
            else None
        )
        chosen = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if found is None and chosen:
            with open(chosen, "rb") as file:  # noqa: PTH123 - Lightning's own path
                found = file.read()
        if found is not None:
            trusted = resolve_pickle_decision(self.job.allow_pickle)
            return torch.load(io.BytesIO(found), map_location="cpu", weights_only=not trusted)[
                "state_dict"
            ]
        return {name: value.detach().cpu() for name, value in module.state_dict().items()}


@cache
def recorder_class(package: str) -> type[Any]:
    """Returns the recorder that is a callback of one of Lightning's packages.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    base = import_module(package).Callback
    return type("FarandoleRunRecorder", (LightningRunRecorder, base), {"__module__": __name__})


def _global_plain_losses(sums_by_stage: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the losses of a plain module over the rows of all ranks, by part of the history.

    Args:
        sums_by_stage: sums and counts by stage, one per rank.
    """
    found: dict[str, float] = {}
    for stage, part in (("train", "train"), ("val", "validation")):
        ranks = [one[stage] for one in sums_by_stage if stage in one]
        sums = [sum(each) for each in zip(*(one[0] for one in ranks), strict=True)]
        counts = [sum(each) for each in zip(*(one[1] for one in ranks), strict=True)]
        if any(counts):
            found[part] = sum(
                total / count for total, count in zip(sums, counts, strict=True) if count
            )
    return found


def _batch_row_count(batch: Any) -> int:
    values = (
        list(batch.values())
        if isinstance(batch, dict)
        else list(batch)
        if isinstance(batch, list | tuple)
        else [batch]
    )
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return 1 if first is None or first.dim() == 0 else len(first)
