# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training loop, as it runs in every process of a job.

The learning rate is multiplied by the number of processes, on a fresh and on a resumed run alike: checkpoints hold
the rate of one process. A run whose checkpoint exists goes on after the last complete epoch, up to `epochs` of them
all together, so that a repeated run costs only what was lost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark import task
from farandole.spark.torch import payload
from farandole.spark.torch.batches import Batches, UserMinibatch
from farandole.spark.torch.callbacks import Callbacks, TrainingState
from farandole.spark.torch.checkpoints import Checkpoints
from farandole.spark.torch.losses import constructed, share
from farandole.spark.torch.scores import Scores
from farandole.spark.torch.setup import device_of, on_device, prepare_process, sources
from farandole.spark.torch.steps import Stepper

if TYPE_CHECKING:
    from farandole.spark.common.source import Rows
    from farandole.spark.torch.job import Job, Objects, Trained
    from farandole.spark.torch.setup import Batched

_REPORT_SECONDS = 0.2


def train(job: Job) -> Trained | None:
    """Trains one rank's part of a run.

    Args:
        job: what to do, the same on every rank.

    Returns:
        What rank 0 brings back; `None` from the others.
    """
    hvd.init()
    try:
        return _Trainer(job).run()
    finally:
        hvd.shutdown()


class _Trainer:
    def __init__(self, job: Job) -> None:
        self.job, self.loop = job, job.loop
        self.size, self.rank = hvd.size(), hvd.rank()
        prepare_process(job.loop, self.rank)
        self.device = device_of(job.loop.use_gpu)
        objects: Objects = payload.unpack(job.objects)
        self.model: torch.nn.Module = objects.model.to(self.device)
        self.metrics = objects.metrics
        self.history: list[dict[str, Any]] = []
        self.checkpoints = Checkpoints(job, self.rank)
        found = self.checkpoints.resume(self.model, objects.optimizer)
        self.history = found.get("history", [])
        for group in objects.optimizer.param_groups:
            group["lr"] = group["lr"] * self.size
        self.optimizer: Any = hvd.DistributedOptimizer(
            objects.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=objects.compression or hvd.Compression.none,
            backward_passes_per_step=job.loop.backward_passes,
        )
        self.stepper = Stepper(self.optimizer, objects.scheduler, job.loop, self.device, self.size)
        self.stepper.load(found)
        losses = constructed(objects, model=self.model, optimizer=self.optimizer, rank=self.rank, size=self.size)
        callable_model = torch.compile(self.model) if job.loop.compile else self.model
        self.batches = Batches(
            callable_model, [on_device(one, self.device) for one in losses], job, self.device, self.size
        )
        self.minibatch = (
            UserMinibatch(objects.train_minibatch, self.batches, self.stepper) if objects.train_minibatch else None
        )
        self.train_source, self.val_source, self.module = sources(
            job, objects.transformation, objects.data_module, self.rank, self.size
        )
        state = TrainingState(self.model, self.optimizer, self.rank, self.size, job.loop.epochs, history=self.history)
        self.callbacks = Callbacks(objects.callbacks, state)
        self.started = self.reported = time.monotonic()
        self.over: str | None = None

    def run(self) -> Trained | None:
        self.stepper.taken = sum(entry.get("steps", 0) for entry in self.history)
        self.callbacks.call("on_train_begin")
        with self.module:
            for epoch in range(len(self.history), self.loop.epochs):
                if self._is_over():
                    break
                self._epoch(epoch)
        self.callbacks.call("on_train_end")
        return self.checkpoints.result(self._checkpoint, self.history)

    def _epoch(self, epoch: int) -> None:
        state = self.callbacks.state
        state.epoch, state.step = epoch, 0
        self.callbacks.call("on_epoch_begin")
        started, steps_before = time.monotonic(), self.stepper.taken
        scores, steps = self._train_epoch(epoch)
        entry: dict[str, Any] = {"epoch": epoch, "train": scores}
        seconds = time.monotonic() - started
        if self.val_source is not None:
            entry["validation"] = self._validate(self.val_source, epoch)
        rows = self._rows(self.train_source, 0, steps)
        entry |= {"seconds": time.monotonic() - started, "rows": rows, "steps": self.stepper.taken - steps_before}
        self.history.append(entry)
        self._check_weights()
        self.batches.first_pass = False
        if self.loop.scheduler_interval == "epoch":
            self.stepper.schedule(entry.get("validation", entry["train"])["loss"])
        self.callbacks.call("on_epoch_end")
        self.checkpoints.publish(self._checkpoint, self.history)
        if self.rank == 0:
            told = {
                "entry": entry,
                "epochs": self.loop.epochs,
                "steps": steps,
                "rows_per_second": rows / max(seconds, 1e-9),
            }
            task.report({"kind": "epoch", **told})

    def _train_epoch(self, epoch: int) -> tuple[dict[str, Any], int]:
        self.model.train()
        scores = Scores(self.metrics, self.job.labels)
        steps, state = self._steps(self.train_source, self.job.data.train_steps), self.callbacks.state
        started, step = time.monotonic(), 0
        for step, rows in enumerate(self.train_source.epoch(epoch, steps), start=1):
            outputs, labels, loss = self._train_batch(rows, step - 1, steps)
            scores.add(outputs, labels, loss, rows.valid)
            if self.callbacks.has("on_batch_end"):
                state.step, state.loss = step, scores.loss()
                self.callbacks.call("on_batch_end")
            if self._is_cut():
                break
            self._tell(epoch, step, steps, started, scores)
        if self.minibatch is not None:
            self.minibatch.end()
        return scores.everywhere(), step

    def _train_batch(
        self, rows: Rows, step: int, steps: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        passes = self.loop.backward_passes
        first = step - step % passes
        last = min(first + passes, steps)
        everywhere = self.train_source.rows_in(first, last)
        if self.minibatch is not None:
            return self.minibatch(rows, step, passes, everywhere)
        if step == first:
            self.optimizer.zero_grad()
        with self.stepper.autocast():
            outputs, labels, loss = self.batches.forward(rows, self.model)
        factor = 1.0 / (last - first) if everywhere is None else share(rows.valid, self.size, everywhere)
        self.stepper.backward(loss * factor)
        if step == last - 1:
            self.stepper.step()
            if self.loop.scheduler_interval == "step":
                self.stepper.schedule(None)
        return outputs, labels, loss

    def _validate(self, source: Batched, epoch: int) -> dict[str, Any]:
        self.model.eval()
        scores = Scores(self.metrics, self.job.labels)
        with torch.no_grad(), self.stepper.autocast():
            for rows in source.epoch(epoch, self._steps(source, self.job.data.val_steps)):
                if rows.valid:
                    scores.add(*self.batches.forward(rows, self.model), rows.valid)
        return scores.everywhere()

    def _is_over(self) -> bool:
        """Whether the run ends before its last epoch; every rank comes to the same answer."""
        if self.over is not None or self._has_enough_steps():
            return True
        if self.loop.early_stopping is not None and self.loop.early_stopping.is_over(self.history):
            return True
        stopping = float(self.callbacks.state.stopping)
        if self.callbacks:
            stopping = float(hvd.allreduce(torch.tensor([stopping]), op=hvd.Max, name="farandole.stopping"))
        return stopping > 0

    def _is_cut(self) -> bool:
        """Whether the run ends here, within an epoch."""
        if self._has_enough_steps():
            self.over = "max_steps"
        elif self.loop.max_time is not None:
            # The clock of rank 0 counts for all.
            late = float(self.rank == 0 and time.monotonic() - self.started > self.loop.max_time)
            if float(hvd.allreduce(torch.tensor([late]), op=hvd.Max, name="farandole.time")) > 0:
                self.over = "max_time"
        return self.over is not None

    def _has_enough_steps(self) -> bool:
        return self.loop.max_steps is not None and self.stepper.taken >= self.loop.max_steps

    def _check_weights(self) -> None:
        if self.job.weight is None or not self.batches.first_pass:
            return
        seen = float(hvd.allreduce(torch.tensor([self.batches.weight_seen]), op=hvd.Sum, name="farandole.weights"))
        if not seen > 0:
            raise ValueError(
                f"the weights in column {self.job.weight!r} add up to {seen:g}: nothing can be learned from such rows"
            )

    def _checkpoint(self) -> dict[str, Any]:
        optimizer = payload.optimizer_state(self.optimizer, self.size)
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "history": self.history,
        } | self.stepper.state()

    def _tell(self, epoch: int, step: int, steps: int, started: float, scores: Scores) -> None:
        now = time.monotonic()
        if self.rank != 0 or now - self.reported < _REPORT_SECONDS:
            return
        self.reported = now
        speed = self._rows(self.train_source, 0, step) / max(now - started, 1e-9)
        place = {"epoch": epoch, "epochs": self.loop.epochs, "step": step, "steps": steps}
        task.report({"kind": "step", **place, "rows_per_second": speed, "loss": scores.loss()})

    def _rows(self, source: Batched, first: int, last: int) -> int:
        known = source.rows_in(first, last)
        return (last - first) * self.size * self.job.data.batch_size if known is None else known

    def _steps(self, source: Batched, asked: int | None) -> int:
        return source.steps if asked is None else asked
