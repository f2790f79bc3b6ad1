# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training loop, as it runs in every process of a job.

The learning rate is multiplied by the number of processes, on a fresh and on a resumed run alike: checkpoints hold
the rate of one process. A run whose checkpoint exists goes on after the last complete epoch, up to `epochs` of them
all together, so that a repeated run costs only what was lost.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole._native.reader import Dataset, Reader
from farandole.spark import task
from farandole.spark.torch import payload
from farandole.spark.torch.job import Job, Objects, Trained
from farandole.spark.torch.losses import shaped, share, weighted
from farandole.spark.torch.scores import Scores
from farandole.spark.torch.tensors import column_tensor, outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native.reader import Batch

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
        self.job = job
        self.size, self.rank = hvd.size(), hvd.rank()
        _share_cores()
        self.device = _device(job.use_gpu)
        if job.random_seed is not None:
            torch.manual_seed(job.random_seed + self.rank)
        objects: Objects = payload.unpack(job.objects)
        self.model: torch.nn.Module = objects.model.to(self.device)
        self.losses = [_on_device(loss, self.device) for loss in objects.losses]
        self.row_losses = [weighted(loss) for loss in self.losses] if job.weight else []
        self.metrics = objects.metrics
        self.history: list[dict[str, Any]] = []
        self._resume(objects.optimizer)
        for group in objects.optimizer.param_groups:
            group["lr"] = group["lr"] * self.size
        self.optimizer: Any = hvd.DistributedOptimizer(
            objects.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=objects.compression or hvd.Compression.none,
            backward_passes_per_step=job.backward_passes,
        )
        self.train_reader = self._reader(job.train_url, job.batch_size, shuffle=job.shuffle)
        self.val_reader = None if job.val_url is None else self._reader(job.val_url, job.val_batch_size, shuffle=True)
        self.reported = 0.0

    def run(self) -> Trained | None:
        for epoch in range(len(self.history), self.job.epochs):
            started = time.monotonic()
            entry: dict[str, Any] = {"epoch": epoch, "train": self._train_epoch(epoch)}
            seconds = time.monotonic() - started
            if self.val_reader is not None:
                entry["validation"] = self._validate(self.val_reader, epoch)
            entry |= {"seconds": time.monotonic() - started, "rows": self._rows_seen(self._train_steps())}
            self.history.append(entry)
            if self.rank == 0:
                self._publish(entry, entry["rows"] / max(seconds, 1e-9))
        return Trained(self._checkpoint(), self.history) if self.rank == 0 else None

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self.model.train()
        scores = Scores(self.metrics, self.job)
        steps, passes = self._train_steps(), self.job.backward_passes
        started = time.monotonic()
        batches = self.train_reader.epoch(epoch)
        for step in range(steps):
            batch = next(batches)
            if step % passes == 0:
                self.optimizer.zero_grad()
            outputs, labels, loss = self._forward(batch)
            first = step - step % passes
            everywhere = self._rows_seen(min(first + passes, steps)) - self._rows_seen(first)
            (loss * share(batch.valid_rows, self.size, everywhere)).backward()
            if step % passes == passes - 1 or step == steps - 1:
                self.optimizer.step()
            scores.add(outputs, labels, loss, batch.valid_rows)
            self._tell(epoch, step + 1, steps, started, scores)
        batches.close()
        return scores.everywhere()

    def _validate(self, reader: Reader, epoch: int) -> dict[str, Any]:
        self.model.eval()
        scores = Scores(self.metrics, self.job)
        batches = reader.epoch(epoch)
        with torch.no_grad():
            for _ in range(_capped(reader.steps(), self.job.val_steps)):
                batch = next(batches)
                if batch.valid_rows:
                    outputs, labels, loss = self._forward(batch)
                    scores.add(outputs, labels, loss, batch.valid_rows)
        batches.close()
        return scores.everywhere()

    def _forward(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Outputs and labels of the rows that count, and their mean loss."""
        valid = batch.valid_rows
        # A batch norm needs two rows to train on, and every rank a backward pass: those steps go through padded.
        rows = valid if valid > 1 else batch.rows
        tensors = [
            column_tensor(batch, one.column.name, self.device)[:rows].reshape(one.shape) for one in self.job.inputs
        ]
        running = [buffer.clone() for buffer in self.model.buffers()] if self.model.training and rows > valid else []
        outputs = outputs_of(self.model(*tensors), len(self.job.labels))
        for buffer, before in zip(self.model.buffers() if running else (), running, strict=True):
            buffer.data.copy_(before)  # padding must not move a batch norm's statistics
        if valid == 0:
            return outputs, outputs, torch.stack([output.sum() for output in outputs]).sum() * 0.0
        outputs = [output[:valid] for output in outputs]
        labels = [
            shaped(column_tensor(batch, one.column.name, self.device)[:valid], output, one.shape)
            for one, output in zip(self.job.labels, outputs, strict=True)
        ]
        parts = zip(self._losses(batch), outputs, labels, self.job.loss_weights, strict=True)
        return outputs, labels, torch.stack([loss(out, label) * weight for loss, out, label, weight in parts]).sum()

    def _losses(self, batch: Batch) -> list[Callable[..., torch.Tensor]]:
        if self.job.weight is None:
            return self.losses
        weights = column_tensor(batch, self.job.weight, self.device)[: batch.valid_rows].reshape(-1)
        return [lambda out, label, one=one: one(out, label, weights) for one in self.row_losses]

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        found = self.job.store.read(self.job.store.checkpoint_filename) if self.rank == 0 else None
        if hvd.broadcast_object(found is not None, root_rank=0):
            if found is not None:
                state = payload.unpack_state(found)
                try:
                    self.model.load_state_dict(state["model"])
                    optimizer.load_state_dict(state["optimizer"])
                except (RuntimeError, ValueError) as error:
                    raise ValueError(
                        f"the checkpoint of run {self.job.run_id!r} is of another model or optimizer: choose another "
                        f"run_id, or delete {self.job.store.run_path}: {error}"
                    ) from error
                self.history = state["history"]
            self.history = hvd.broadcast_object(self.history, root_rank=0)
        optimizer.load_state_dict(optimizer.state_dict())  # moves its tensors to where the parameters are
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def _checkpoint(self) -> bytes:
        optimizer = payload.optimizer_state(self.optimizer, self.size)
        return payload.pack_state({"model": self.model.state_dict(), "optimizer": optimizer, "history": self.history})

    def _publish(self, entry: dict[str, Any], speed: float) -> None:
        store = self.job.store
        if store.saving_runs:
            store.write(store.checkpoint_filename, self._checkpoint())
            lines = "".join(json.dumps(one) + "\n" for one in self.history)
            store.write(f"{store.logs_subdir}/history.jsonl", lines.encode())
        steps = self._train_steps()
        task.report(
            {"kind": "epoch", "entry": entry, "epochs": self.job.epochs, "steps": steps, "rows_per_second": speed}
        )

    def _tell(self, epoch: int, step: int, steps: int, started: float, scores: Scores) -> None:
        now = time.monotonic()
        if self.rank != 0 or now - self.reported < _REPORT_SECONDS:
            return
        self.reported = now
        speed = self._rows_seen(step) / max(now - started, 1e-9)
        place = {"epoch": epoch, "epochs": self.job.epochs, "step": step, "steps": steps}
        task.report({"kind": "step", **place, "rows_per_second": speed, "loss": scores.loss()})

    def _rows_seen(self, steps: int) -> int:
        """Rows of all processes in the first steps of an epoch."""
        return min(steps * self.size * self.job.batch_size, self.train_rows)

    def _train_steps(self) -> int:
        return _capped(self.train_reader.steps(), self.job.train_steps)

    def _reader(self, url: str, batch_size: int, *, shuffle: bool) -> Reader:
        job = self.job
        dataset = Dataset.open(url)
        if url == job.train_url:
            self.train_rows = dataset.rows
        floats = [*(one.column.name for one in job.inputs), *([job.weight] if job.weight else [])]
        cast = {**dict.fromkeys(floats, "float32"), **{one.column.name: one.dtype for one in job.labels}}
        return Reader(
            dataset,
            columns=list(cast),
            batch_size=batch_size,
            rank=self.rank,
            size=self.size,
            seed=job.order_seed,
            shuffle=shuffle,
            tail="pad",
            cast=cast,
        )


def _capped(steps: int, most: int | None) -> int:
    return steps if most is None else min(steps, most)


def _on_device(loss: Any, device: torch.device) -> Any:
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


def _share_cores() -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))


def _device(wanted: bool) -> torch.device:
    """The device of this rank; every rank must come to the same kind."""
    here = wanted and torch.cuda.is_available()
    ranks = int(hvd.allreduce(torch.tensor([int(here)]), op=hvd.Sum, name="farandole.devices"))
    if ranks not in (0, hvd.size()):
        raise RuntimeError(
            f"ranks do not all have a GPU: {ranks} of {hvd.size()} have; set use_gpu=False to train on CPUs"
        )
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if here else torch.device("cpu")
