# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training loop, as it runs in every process of a job.

The learning rate is multiplied by the number of processes, in new and in resumed runs; checkpoints
contain the rate of one process. If a run has a checkpoint, it continues after the last complete
epoch, up to `epochs` in total, so a repeated run repeats only the lost steps.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark import task
from farandole.spark.common.data.source import Place
from farandole.spark.common.runs.halting import Halt
from farandole.spark.torch.callbacks import Callbacks, TrainingState
from farandole.spark.torch.columns.losses import constructed, share
from farandole.spark.torch.saving import payload
from farandole.spark.torch.training.batches import Batches, UserMinibatch
from farandole.spark.torch.training.checkpoints import Checkpoints
from farandole.spark.torch.training.elastic import EVERY, Course, Reached
from farandole.spark.torch.training.finite import LossWatch
from farandole.spark.torch.training.scores import Scores
from farandole.spark.torch.training.setup import (
    agree_on_device,
    device_of,
    on_device,
    prepare_process,
    sources,
)
from farandole.spark.torch.training.steps import Stepper

if TYPE_CHECKING:
    from farandole.spark.common.data.source import Rows
    from farandole.spark.torch.job import Job, Objects, Trained
    from farandole.spark.torch.training.setup import Batched

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
    stepper: Stepper
    """Made when the state that it begins with is known."""

    def __init__(self, job: Job) -> None:
        self.job, self.loop = job, job.loop
        self.size, self.rank = hvd.size(), hvd.rank()
        prepare_process(job.loop, self.rank)
        self.device = device_of(job.loop.use_gpu)
        self.objects: Objects = payload.unpack(job.objects)
        objects = self.objects
        self.model: torch.nn.Module = objects.model.to(self.device)
        self.history: list[dict[str, Any]] = []
        self.optimizer: Any = hvd.DistributedOptimizer(
            objects.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=objects.compression or hvd.Compression.none,
            backward_passes_per_step=job.loop.backward_passes,
        )
        self.course = Course(self.model, self.optimizer)
        self.checkpoints = Checkpoints(job, self.rank, moves=self.course.moves)
        losses = constructed(
            objects, model=self.model, optimizer=self.optimizer, rank=self.rank, size=self.size
        )
        callable_model = torch.compile(self.model) if job.loop.compile else self.model
        self.batches = Batches(
            callable_model,
            [on_device(one, self.device) for one in losses],
            job,
            self.device,
            self.size,
        )
        own = objects.train_minibatch
        self.minibatch = UserMinibatch(own, self.batches, self.optimizer) if own else None
        state = TrainingState(
            self.model, self.optimizer, self.rank, self.size, job.loop.epochs, history=self.history
        )
        self.callbacks = Callbacks(objects.callbacks, state)
        self.started = self.reported = time.monotonic()
        self.over: str | None = None
        self.losses = LossWatch(wanted=job.loop.terminate_on_nan, rank=self.rank)
        self.halt = Halt(job.store)
        self.has_entered = False
        self.told_epoch: int | None = None
        """The epoch whose beginning was passed to callbacks."""

    def run(self) -> Trained | None:
        with contextlib.closing(self.halt):
            self.course.through(self._train)
        return self.checkpoints.result(self._checkpoint, self.history)

    def _train(self) -> None:
        """Trains from the progress so far to the end, in one world."""
        self._enter()
        train_source, val_source, module = sources(
            self.job,
            self.objects.transformation,
            self.objects.data_module,
            self.rank,
            self.size,
            moves=self.course.moves,
        )
        with module:
            for epoch in range(len(self.history), self.loop.epochs):
                if self._is_over():
                    break
                self._epoch(epoch, train_source, val_source)
        self.callbacks.call("on_train_end")

    def _enter(self) -> None:
        """Loads the progress so far into this process, in a world that may differ from the one
        before.
        """
        agree_on_device(self.device)
        self.size = self.batches.size = self.callbacks.state.size = hvd.size()
        self.rank = self.checkpoints.rank = self.callbacks.state.rank = hvd.rank()
        self.over = None
        if not self.course.reached.begun:
            self._begin()
        reached = self.course.reached
        if not self.has_entered:
            self._prepare(reached)
        self.history[:] = reached.history
        self.checkpoints.best = reached.best
        self.stepper.go_on(reached.stepper, self.size)
        self.stepper.taken = reached.taken
        if self.minibatch is not None:
            self.minibatch.enter(self.stepper)
        if not self.has_entered:
            self.has_entered = True
            self.callbacks.call("on_train_begin")
        self.course.reaches(begun=True, stepper=self.stepper.kept())

    def _begin(self) -> None:
        """Begins the run in the job's first world, fresh or from its checkpoint."""
        found = self.checkpoints.resume(self.model, self.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.size
        history = found.get("history", [])
        taken = sum(entry.get("steps", 0) for entry in history)
        self._prepare(Reached(stepper=found | {"size": self.size}))
        self.course.reached = Reached(
            first_epoch=len(history),
            history=history,
            taken=taken,
            taken_before=taken,
            stepper=self.stepper.kept(),
        )

    def _prepare(self, reached: Reached) -> None:
        """Makes what needs the optimizer as it is when this process begins."""
        self.stepper = Stepper(
            self.optimizer, self.objects.scheduler, self.loop, self.device, reached.stepper["size"]
        )
        self.stepper.load(reached.stepper)

    def _epoch(self, epoch: int, train_source: Batched, val_source: Batched | None) -> None:
        state, taken_before = self.callbacks.state, self.course.reached.taken_before
        state.epoch, state.step = epoch, self.course.reached.place.steps
        if self.told_epoch != epoch:
            self.told_epoch = epoch
            self.callbacks.call("on_epoch_begin")
        if self.course.reached.scores is None:
            self._train_epoch(epoch, train_source)
        reached, started = self.course.reached, time.monotonic()
        entry: dict[str, Any] = {"epoch": epoch, "train": reached.scores}
        if val_source is not None:
            entry["validation"] = self._validate(val_source, epoch)
        rows, taken = self._rows(train_source, reached.place), self.stepper.taken
        entry |= {
            "seconds": reached.seconds + time.monotonic() - started,
            "rows": rows,
            "steps": taken - taken_before,
        }
        self.history.append(entry)
        self._check_weights(epoch)
        self.batches.first_pass = False
        if self.loop.scheduler_interval == "epoch":
            self.stepper.schedule(entry.get("validation", entry["train"])["loss"])
        self.callbacks.call("on_epoch_end")
        self.checkpoints.publish(self._checkpoint, self.history)
        if self.rank == 0:
            told = {
                "entry": entry,
                "epochs": self.loop.epochs,
                "steps": reached.place.steps,
                "rows_per_second": rows / max(reached.seconds, 1e-9),
            }
            task.report({"kind": "epoch", **told})
        self.course.reaches(
            history=list(self.history),
            place=Place(),
            totals=None,
            scores=None,
            seconds=0.0,
            taken=taken,
            taken_before=taken,
            stepper=self.stepper.kept(),
            best=self.checkpoints.best,
        )

    def _train_epoch(self, epoch: int, source: Batched) -> None:
        self.model.train()
        begun, asked, state = self.course.reached, self.job.data.train_steps, self.callbacks.state
        scores = Scores(self.objects.metrics, self.job.labels, begun.totals)
        source.begin_at(begun.place)
        steps = source.steps_until_end() if asked is None else asked
        started, step = time.monotonic(), begun.place.steps

        def reached() -> dict[str, Any]:
            seconds = begun.seconds + time.monotonic() - started
            kept = {"taken": self.stepper.taken, "stepper": self.stepper.kept()}
            return {"place": source.place_after(epoch, step), "seconds": seconds, **kept}

        self.losses.begin(epoch)
        self.halt.begins()
        meter = self.stepper.meter
        meter.epoch_begins()
        for rows in source.epoch(epoch, steps):
            meter.batch_begins()
            step += 1
            outputs, labels, loss = self._train_batch(source, rows, step - 1, steps)
            scores.add(outputs, labels, loss, rows.valid)
            if self.callbacks.has("on_batch_end"):
                state.step, state.loss = step, scores.loss()
                self.callbacks.call("on_batch_end")
            meter.batch_ends(rows.valid)
            if self._is_cut():
                break
            self._tell(epoch, step, steps, source, begun, started, scores)
            if step < steps and self._may_commit(source, step):
                self.course.reaches(**reached(), totals=scores.totals())
        meter.tell()
        if self.minibatch is not None:
            self.minibatch.end()
        self.losses.read()
        self.course.reaches(**reached(), scores=scores.everywhere())

    def _may_commit(self, source: Batched, step: int) -> bool:
        """Returns whether the state may be committed after this step: no gradients wait and the
        interval is over.
        """
        is_due = (
            self.course.moves
            and source.keeps_place
            and step % (self.loop.backward_passes * EVERY) == 0
        )
        return is_due and (self.minibatch is None or self.minibatch.is_between_steps)

    def _train_batch(
        self, source: Batched, rows: Rows, step: int, steps: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        passes = self.loop.backward_passes
        first = step - step % passes
        last = min(first + passes, steps)
        everywhere = source.rows_in(first, last)
        if self.minibatch is not None:
            outputs, labels, loss = self.minibatch(rows, step, passes, everywhere)
            self._look(rows, loss, step)
            return outputs, labels, loss
        if step == first:
            self.optimizer.zero_grad()
        with self.stepper.meter.phase("forward"), self.stepper.autocast():
            outputs, labels, loss = self.batches.forward(rows, self.model)
        self._look(rows, loss, step)  # before any gradient is computed from it
        factor = (
            1.0 / (last - first) if everywhere is None else share(rows.valid, self.size, everywhere)
        )
        self.stepper.backward(loss * factor)
        if step == last - 1:
            self.stepper.step()
            if self.loop.scheduler_interval == "step":
                self.stepper.schedule(None)
        return outputs, labels, loss

    def _look(self, rows: Rows, loss: torch.Tensor, step: int) -> None:
        """Ends training at a loss that is not finite; one of padding alone does not count."""
        if rows.valid:
            self.losses.look(loss, step)

    def _validate(self, source: Batched, epoch: int) -> dict[str, Any]:
        self.model.eval()
        scores = Scores(self.objects.metrics, self.job.labels)
        with torch.no_grad(), self.stepper.autocast():
            for rows in source.epoch(epoch, self._steps(source, self.job.data.val_steps)):
                if rows.valid:
                    scores.add(*self.batches.forward(rows, self.model), rows.valid)
        return scores.everywhere()

    def _is_over(self) -> bool:
        """Returns whether the run ends before its last epoch; the answer is the same on every
        rank.
        """
        if self.over is not None or self._has_enough_steps():
            return True
        if self.loop.early_stopping is not None and self.loop.early_stopping.is_over(self.history):
            return True
        if self.history and self.halt.after_epoch(self.rank):
            return True
        stopping = float(self.callbacks.state.stopping)
        if self.callbacks:
            stopping = float(
                hvd.allreduce(torch.tensor([stopping]), op=hvd.Max, name="farandole.stopping")
            )
        return stopping > 0

    def _is_cut(self) -> bool:
        """Returns whether the run ends here, within an epoch."""
        if self._has_enough_steps():
            self.over = "max_steps"
        elif self.loop.max_time is not None:
            # The clock of rank 0 counts for all.
            late = float(self.rank == 0 and time.monotonic() - self.started > self.loop.max_time)
            if float(hvd.allreduce(torch.tensor([late]), op=hvd.Max, name="farandole.time")) > 0:
                self.over = "max_time"
        if self.over is None and self.halt.after_step(self.rank):
            self.over = "stop"
        return self.over is not None

    def _has_enough_steps(self) -> bool:
        return self.loop.max_steps is not None and self.stepper.taken >= self.loop.max_steps

    def _check_weights(self, epoch: int) -> None:
        if self.job.weight is None or epoch != self.course.reached.first_epoch:
            return
        seen = float(
            hvd.allreduce(
                torch.tensor([self.batches.weight_seen]), op=hvd.Sum, name="farandole.weights"
            )
        )
        if not seen > 0:
            raise ValueError(
                f"the weights in column {self.job.weight!r} add up to {seen:g}: nothing can be "
                "learned from such rows"
            )

    def _checkpoint(self) -> dict[str, Any]:
        optimizer = payload.optimizer_state(self.optimizer, self.size)
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "history": self.history,
        } | self.stepper.state()

    def _tell(
        self,
        epoch: int,
        step: int,
        steps: int,
        source: Batched,
        begun: Reached,
        started: float,
        scores: Scores,
    ) -> None:
        now = time.monotonic()
        if self.rank != 0 or now - self.reported < _REPORT_SECONDS:
            return
        self.reported = now
        speed = self._rows(source, source.place_after(epoch, step)) / max(
            begun.seconds + now - started, 1e-9
        )
        place = {"epoch": epoch, "epochs": self.loop.epochs, "step": step, "steps": steps}
        task.report({"kind": "step", **place, "rows_per_second": speed, "loss": scores.loss()})

    def _rows(self, source: Batched, place: Place) -> int:
        """Returns the rows of all processes in the epoch so far; a data module does not tell."""
        return (
            place.rows if source.keeps_place else place.steps * self.size * self.job.data.batch_size
        )

    def _steps(self, source: Batched, asked: int | None) -> int:
        return source.steps if asked is None else asked
