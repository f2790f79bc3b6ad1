# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The training loop, as it runs in every process of a job.

The learning rate is multiplied by the number of processes, in new and in resumed runs; checkpoints
contain the rate of one process. With a global batch, the rate stays as the user set it, and a step
is the same on any number of processes: each puts its rows through the model in as many parts as its
memory needs. If a run is resumed with other rows of a step on each process, its
rate is multiplied by their ratio, so steps of equally many rows in all keep their rate. If a run
has a checkpoint, it continues after the last complete epoch, up to `epochs` in total, so a repeated
run repeats only the lost steps.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import farandole.torch as hvd
from farandole.spark import task
from farandole.spark.common.data.batch_source import EpochPosition
from farandole.spark.common.runs.elastic_run import COMMIT_INTERVAL_STEPS, ProgressAcrossWorlds
from farandole.spark.common.runs.stop_request import StopCheck
from farandole.spark.common.show.epoch_reports import EpochReporter
from farandole.spark.torch.callbacks import CallbackGroup, TrainingState
from farandole.spark.torch.columns.loss_terms import mean_batch_loss
from farandole.spark.torch.columns.losses import construct_losses
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.training.averaged_weights import AveragedWeights
from farandole.spark.torch.training.batch_evaluator import BatchEvaluator, UserMinibatchFunction
from farandole.spark.torch.training.batch_norm import (
    average_moving_statistics,
    min_batch_rows_for_norms,
)
from farandole.spark.torch.training.checkpoints import RunCheckpoints
from farandole.spark.torch.training.elastic import TorchRunProgress
from farandole.spark.torch.training.finite_loss import FiniteLossCheck
from farandole.spark.torch.training.micro_batches import (
    micro_batch_count,
    split_into_micro_batches,
)
from farandole.spark.torch.training.optimizer_stepper import OptimizerStepper, gradient_operation
from farandole.spark.torch.training.process_setup import (
    choose_rank_device,
    create_sources,
    move_loss_to_device,
    prepare_process,
)
from farandole.spark.torch.training.scores import ScoreSums
from farandole.spark.torch.training.step_counts import batches_with_step_counts

if TYPE_CHECKING:
    from farandole.spark.common.data.batch_source import PaddedRankBatch
    from farandole.spark.torch.columns.loss_terms import LossTerm
    from farandole.spark.torch.job import (
        TorchTrainingJob,
        TorchTrainingResult,
        TorchUserObjects,
        TrainingLoopOptions,
    )
    from farandole.spark.torch.sharding.sharded_run import ShardedRun
    from farandole.spark.torch.training.process_setup import BatchedSource
    from farandole.spark.torch.training.step_counts import StepLossDivisors


def train_rank(job: TorchTrainingJob) -> TorchTrainingResult | None:
    """Trains one rank's part of a run.

    Args:
        job: what to do, the same on every rank.

    Returns:
        What rank 0 brings back; `None` from the others.

    Raises:
        MemoryError: this process has no memory for a tensor.
    """
    hvd.init()
    try:
        if job.sharded is None:
            return _TorchTrainer(job).run()
        from farandole.spark.torch.sharding.sharded_run import (  # noqa: PLC0415 - FSDP is imported where it is used
            ShardedRun,
            hold_process_group,
        )

        with hold_process_group():
            device = choose_rank_device(job.loop.use_gpu)
            try:
                return _TorchTrainer(job, ShardedRun(job, job.sharded, device)).run()
            except RuntimeError as error:
                if "DTensor" in str(error):
                    error.add_note(UNGATHERED_WEIGHT_HINT)
                raise
    except RuntimeError as error:
        if _NO_HOST_MEMORY not in str(error):
            raise
        hint = "" if job.sharded else ': strategy="fsdp" divides the model among processes'
        raise MemoryError(f"rank {hvd.rank()} has no memory for a tensor{hint}: {error}") from error
    finally:
        hvd.shutdown()


_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Words of torch's error, which is a plain `RuntimeError`."""

UNGATHERED_WEIGHT_HINT = (
    "The model uses the weights of a module without calling the module, so they are not gathered: "
    "name the modules that it calls by fsdp_modules; with [], all weights are gathered together"
)


def _distribute_optimizer(
    loop: TrainingLoopOptions, objects: TorchUserObjects, model: torch.nn.Module
) -> Any:
    """Wraps the user's optimizer for the processes of the job."""
    if loop.shards_model:
        return objects.optimizer  # FSDP averages gradients
    if loop.takes_local_steps:
        return hvd.LocalSGD(objects.optimizer, model.named_parameters(), sync_every=loop.sync_every)
    return hvd.DistributedOptimizer(
        objects.optimizer,
        named_parameters=model.named_parameters(),
        compression=objects.compression or hvd.Compression.none,
        backward_passes_per_step=loop.backward_passes_per_step,
        shard_states=loop.shard_optimizer,
        op=hvd.Average if objects.train_minibatch else gradient_operation(loop),
    )


class _TorchTrainer:
    stepper: OptimizerStepper
    """Made when the state that it begins with is known."""

    def __init__(self, job: TorchTrainingJob, sharding: ShardedRun | None = None) -> None:
        self.job, self.loop, self.sharding = job, job.loop, sharding
        self.size, self.rank = hvd.size(), hvd.rank()
        prepare_process(job.loop, self.rank)
        self.device = choose_rank_device(job.loop.use_gpu)
        if self.sharding is None:
            self.objects: TorchUserObjects = state_bytes.unpickle_on_cpu(job.objects)
            self.objects.model.to(self.device)
        else:
            self.objects = self.sharding.objects
        objects = self.objects
        self.model: torch.nn.Module = objects.model
        self.history: list[dict[str, Any]] = []
        self.optimizer: Any = _distribute_optimizer(job.loop, objects, self.model)
        decay = job.loop.ema_decay
        self.average = None if decay is None else AveragedWeights(self.model, decay)
        averaged = {} if self.average is None else {"averaged": self.average.averaged}
        self.elastic_run = ProgressAcrossWorlds(
            TorchRunProgress(),
            hvd.elastic.run,
            partial(hvd.elastic.TorchState, self.model, self.optimizer, **averaged),
        )
        self.checkpoints = RunCheckpoints(job, self.rank, moves=self.elastic_run.moves)
        losses = (
            construct_losses(
                objects, model=self.model, optimizer=self.optimizer, rank=self.rank, size=self.size
            )
            if job.own_loss is None
            else [job.own_loss] * len(job.labels)
        )
        callable_model = torch.compile(self.model) if job.loop.compile else self.model
        self.batches = BatchEvaluator(
            callable_model,
            self.model,
            [move_loss_to_device(one, self.device) for one in losses],
            job,
            self.device,
            self.size,
        )
        own = objects.train_minibatch
        self.minibatch = UserMinibatchFunction(own, self.batches, self.optimizer) if own else None
        state = TrainingState(
            self.model, self.optimizer, self.rank, self.size, job.loop.epochs, history=self.history
        )
        self.callbacks = CallbackGroup(objects.callbacks, state)
        self.started = time.monotonic()
        self.reporter = EpochReporter(job.loop.epochs)
        self.end_reason: str | None = None
        self.losses = FiniteLossCheck(wanted=job.loop.terminate_on_nan, rank=self.rank)
        self.halt = StopCheck(job.store)
        self.has_entered = False
        self.collected_at: int | None = None
        """Steps after which divided states were gathered or written."""
        self.announced_epoch: int | None = None
        """The epoch whose beginning was passed to callbacks."""

    def run(self) -> TorchTrainingResult | None:
        with contextlib.closing(self.halt):
            self.elastic_run.run_in_each_world(self._train_in_world)
        self._collect_divided_states()
        return self.checkpoints.training_result(self._checkpoint_state, self.history)

    def _train_in_world(self) -> None:
        """Trains from the progress so far to the end, in one world."""
        self._restore_progress_in_world()
        train_source, val_source, module = create_sources(
            self.job,
            self.objects.transformation,
            self.objects.data_module,
            self.rank,
            self.size,
            moves=self.elastic_run.moves,
            least_rows=self.batch_rows_at_least,
        )
        with module:
            for epoch in range(len(self.history), self.loop.epochs):
                if self._should_end_run():
                    break
                self._run_epoch(epoch, train_source, val_source)
        self.callbacks.call_callbacks("on_train_end")

    def _restore_progress_in_world(self) -> None:
        """Loads the progress so far into this process, in a world that may differ from the one
        before.
        """
        task.check_gpu_agreement(self.device.type == "cuda")
        self.size = self.batches.size = self.callbacks.state.size = hvd.size()
        self._divide_steps()
        self.rank = self.checkpoints.rank = self.callbacks.state.rank = hvd.rank()
        self.end_reason = None
        if not self.elastic_run.reached.begun:
            self._begin_run()
        reached = self.elastic_run.reached
        if not self.has_entered:
            self._create_stepper(reached)
        self.history[:] = reached.history
        self.checkpoints.best = reached.best
        self.stepper.restore_state(reached.stepper, self._rate_factor(reached.rate_rows))
        self.stepper.taken = reached.taken
        if self.minibatch is not None:
            self.minibatch.enter_world(self.stepper)
        if not self.has_entered:
            self.has_entered = True
            self.callbacks.call_callbacks("on_train_begin")
        self.elastic_run.commit_progress(begun=True, stepper=self.stepper.snapshot_state())

    def _divide_steps(self) -> None:
        """Divides the rows of a step among the processes of this world."""
        self.parts = micro_batch_count(self.job.data, self.size)
        self.batch_rows_at_least = min_batch_rows_for_norms(self.model)
        if self.job.data.step_rows is not None and not self.loop.shards_model:
            self.optimizer.set_backward_passes_per_step(
                self.parts * self.loop.backward_passes_per_step
            )

    def _begin_run(self) -> None:
        """Begins the run in the job's first world, fresh or from its checkpoint."""
        found = self._load_checkpoint()
        if self.average is not None:
            self.average.load_checkpoint_state(found)
        rate_rows = found.get("rate_rows", self._step_rows())
        factor = self._rate_factor(rate_rows)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        history = found.get("history", [])
        taken = sum(entry.get("steps", 0) for entry in history)
        self._create_stepper(TorchRunProgress(stepper=found | {"factor": factor}))
        self.elastic_run.reached = TorchRunProgress(
            first_epoch=len(history),
            history=history,
            taken=taken,
            taken_before=taken,
            stepper=self.stepper.snapshot_state(),
            rate_rows=rate_rows,
        )

    def _load_checkpoint(self) -> dict[str, Any]:
        """Loads the run's checkpoint into model and optimizer; returns the rest of it."""
        if self.sharding is not None:
            return self.sharding.load_state()
        if not self.loop.shard_optimizer:
            return self.checkpoints.load_checkpoint_on_all_ranks(self.model, self.optimizer)
        # Each process needs its part of all states, so all of them get all, for a moment.
        plain = self.objects.optimizer
        found = self.checkpoints.load_checkpoint_on_all_ranks(self.model, plain)
        self.optimizer.load_state_dict(plain.state_dict())
        plain.state.clear()
        return found

    def _collect_divided_states(self) -> None:
        """Writes the divided model, or gathers divided states of the optimizer on rank 0, for a
        checkpoint, once after a step.
        """
        if self.collected_at == self.stepper.taken:
            return
        if self.sharding is not None:
            self.sharding.write_parts()
        elif self.loop.shard_optimizer:
            self.optimizer.consolidate_state_dict(to=0)
        self.collected_at = self.stepper.taken

    def _step_rows(self) -> int:
        """Returns the rows of a step of the optimizer: of a global batch, or of one process."""
        data = self.job.data
        return (data.step_rows or data.batch_size) * self.loop.backward_passes_per_step

    def _rate_factor(self, rate_rows: int) -> float:
        """Returns the factor of the learning rate that checkpoints contain."""
        has_own_rows = self.job.data.step_rows is None and not self.loop.takes_local_steps
        processes = self.size if has_own_rows else 1
        return processes * self._step_rows() / rate_rows

    def _synchronize_local_steps(self) -> None:
        """Averages the parameters of all processes, if each has taken steps of its own. The state
        of the optimizer becomes that of rank 0, which is in checkpoints, so a resumed run equals
        an uninterrupted one.
        """
        if self.loop.takes_local_steps:
            self.optimizer.synchronize()
            hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def _create_stepper(self, reached: TorchRunProgress) -> None:
        """Creates the stepper from the optimizer's initial state in this process."""
        self.stepper = OptimizerStepper(
            self.optimizer,
            self.objects.scheduler,
            self.loop,
            self.device,
            reached.stepper["factor"],
        )
        self.stepper.load_checkpoint_state(reached.stepper)

    def _run_epoch(
        self, epoch: int, train_source: BatchedSource, val_source: BatchedSource | None
    ) -> None:
        state, taken_before = self.callbacks.state, self.elastic_run.reached.taken_before
        state.epoch, state.step = epoch, self.elastic_run.reached.place.steps
        if self.announced_epoch != epoch:
            self.announced_epoch = epoch
            self.callbacks.call_callbacks("on_epoch_begin")
        if self.elastic_run.reached.scores is None:
            self._train_epoch(epoch, train_source)
        reached, started = self.elastic_run.reached, time.monotonic()
        entry: dict[str, Any] = {"epoch": epoch, "train": reached.scores}
        if val_source is not None:
            entry["validation"] = self._validate_epoch(val_source, epoch)
        rows, taken = self._trained_row_count(train_source, reached.place), self.stepper.taken
        entry |= {
            "seconds": reached.seconds + time.monotonic() - started,
            "rows": rows,
            "steps": taken - taken_before,
        }
        self.history.append(entry)
        self._check_weight_sum(epoch)
        self.batches.first_pass = False
        if self.loop.lr_scheduler_interval == "epoch":
            self.stepper.step_scheduler(entry.get("validation", entry["train"])["loss"])
        self.callbacks.call_callbacks("on_epoch_end")
        self._collect_divided_states()
        self.checkpoints.write_epoch_and_keep_best(self._checkpoint_state, self.history)
        if self.sharding is not None:
            self.sharding.delete_unused_parts()
        if self.rank == 0:
            speed = rows / max(reached.seconds, 1e-9)
            self.reporter.report_epoch(entry, reached.place.steps, speed)
        self.elastic_run.commit_progress(
            history=list(self.history),
            place=EpochPosition(),
            totals=None,
            scores=None,
            seconds=0.0,
            taken=taken,
            taken_before=taken,
            stepper=self.stepper.snapshot_state(),
            best=self.checkpoints.best,
        )

    def _train_epoch(self, epoch: int, source: BatchedSource) -> None:
        self.model.train()
        begun, asked, state = (
            self.elastic_run.reached,
            self.job.data.train_steps,
            self.callbacks.state,
        )
        scores = ScoreSums(self.objects.metrics, self.job.labels, begun.totals)
        source.set_epoch_start(begun.place)
        steps = source.steps_until_end() if asked is None else asked
        started, step = time.monotonic(), begun.place.steps

        def current_progress() -> dict[str, Any]:
            seconds = begun.seconds + time.monotonic() - started
            kept = {"taken": self.stepper.taken, "stepper": self.stepper.snapshot_state()}
            return {"place": source.position_after_steps(epoch, step), "seconds": seconds, **kept}

        self.losses.begin_epoch(epoch)
        self.halt.begin_epoch()
        meter = self.stepper.meter
        meter.begin_epoch()
        counted = batches_with_step_counts(
            source.iterate_epoch_batches(epoch, steps),
            source,
            self.batches.counter,
            self.size,
            step=step,
            steps=steps,
            passes=self.loop.backward_passes_per_step,
            of_all=not self.loop.takes_local_steps,
        )
        for rows, counts in counted:
            meter.mark_rows_read()
            step += 1
            self.stepper.run_share = self._share_of_run(source, epoch, step, steps)
            self._train_batch(rows, counts, step - 1, steps, scores)
            if self.callbacks.has_callbacks("on_batch_end"):
                state.step, state.loss = step, scores.mean_loss()
                self.callbacks.call_callbacks("on_batch_end")
            meter.end_batch(rows.valid)
            if self._should_end_after_step():
                break
            if self.rank == 0 and self.reporter.is_step_report_due():
                trained = self._trained_row_count(source, source.position_after_steps(epoch, step))
                speed = trained / max(begun.seconds + time.monotonic() - started, 1e-9)
                self.reporter.report_step(epoch, step, steps, speed, scores.mean_loss())
            if step < steps and self._may_commit(source, step):
                self._synchronize_local_steps()
                self.elastic_run.commit_progress(
                    **current_progress(), totals=scores.global_totals()
                )
        meter.report_remaining_means()
        if self.minibatch is not None:
            self.minibatch.finish_epoch()
        self.losses.check_pending_losses()
        self._synchronize_local_steps()
        average_moving_statistics(self.model)
        if self.average is not None:
            self.average.copy_buffers()
        self.elastic_run.commit_progress(**current_progress(), scores=scores.global_scores())

    def _share_of_run(self, source: BatchedSource, epoch: int, step: int, steps: int) -> float:
        """Returns the share of the run that is done after a step: by rows, where the number of
        steps may change during an epoch.
        """
        share = step / steps
        if self.elastic_run.moves and source.keeps_place and self.job.data.train_steps is None:
            share = source.position_after_steps(epoch, step).rows / self.job.data.train_rows
        return (epoch + min(share, 1.0)) / self.loop.epochs

    def _may_commit(self, source: BatchedSource, step: int) -> bool:
        """Returns whether the state may be committed after this step: no gradients wait and the
        interval is over.
        """
        is_due = (
            self.elastic_run.moves
            and source.keeps_place
            and step % (self.loop.backward_passes_per_step * COMMIT_INTERVAL_STEPS) == 0
        )
        return is_due and (self.minibatch is None or self.minibatch.is_between_steps)

    def _train_batch(
        self,
        rows: PaddedRankBatch,
        counts: StepLossDivisors,
        step: int,
        steps: int,
        scores: ScoreSums,
    ) -> None:
        passes = self.loop.backward_passes_per_step
        if self.minibatch is not None:
            outputs, labels, terms = self.minibatch(rows, step, passes, counts)
            self._check_finite_step_loss(rows, terms, step)
            scores.add_batch(outputs, labels, terms, rows.valid)
            return
        if step % passes == 0:
            self.optimizer.zero_grad()
        for part in split_into_micro_batches(rows, self.parts, self.batch_rows_at_least):
            with self.stepper.meter.trace_phase("forward"), self.stepper.autocast_context():
                outputs, labels, terms = self.batches.forward_with_losses(part)
            # Before any gradient is computed from it.
            self._check_finite_step_loss(part, terms, step)
            self.stepper.backward(counts.step_loss(terms))
            scores.add_batch(outputs, labels, terms, part.valid)
        if (step + 1) % passes == 0 or step == steps - 1:
            self.stepper.take_step()
            if self.average is not None:
                self.average.add_step()
            if self.loop.lr_scheduler_interval == "step":
                self.stepper.step_scheduler(None)

    def _check_finite_step_loss(
        self, rows: PaddedRankBatch, terms: list[LossTerm], step: int
    ) -> None:
        """Ends training at a loss that is not finite; one of padding alone does not count."""
        if rows.valid:
            self.losses.check_step_loss(mean_batch_loss(terms), step)

    def _validate_epoch(self, source: BatchedSource, epoch: int) -> dict[str, Any]:
        self.model.eval()
        scores = ScoreSums(self.objects.metrics, self.job.labels)
        use_average = (
            contextlib.nullcontext()
            if self.average is None
            else self.average.replace_in(self.batches)
        )
        with torch.no_grad(), self.stepper.autocast_context(), use_average:
            for rows in source.iterate_epoch_batches(
                epoch, self.job.data.val_steps or source.steps
            ):
                # Each call of a divided model is a collective call.
                if rows.valid or self.sharding is not None:
                    scores.add_batch(*self.batches.forward_with_losses(rows), rows.valid)
        return scores.global_scores()

    def _should_end_run(self) -> bool:
        """Returns whether the run ends before its last epoch; the answer is the same on every
        rank.
        """
        if self.end_reason is not None or self._has_max_steps():
            return True
        if self.loop.early_stopping is not None and self.loop.early_stopping.is_patience_exhausted(
            self.history
        ):
            return True
        if self.history and self.halt.should_stop_after_epoch(self.rank):
            return True
        stopping = float(self.callbacks.state.stopping)
        if self.callbacks:
            stopping = float(
                hvd.allreduce(torch.tensor([stopping]), op=hvd.Max, name="farandole.stopping")
            )
        return stopping > 0

    def _should_end_after_step(self) -> bool:
        """Returns whether the run ends here, within an epoch."""
        if self._has_max_steps():
            self.end_reason = "max_steps"
        elif self.loop.max_time is not None:
            # The clock of rank 0 counts for all.
            late = float(self.rank == 0 and time.monotonic() - self.started > self.loop.max_time)
            if float(hvd.allreduce(torch.tensor([late]), op=hvd.Max, name="farandole.time")) > 0:
                self.end_reason = "max_time"
        if self.end_reason is None and self.halt.should_stop_after_step(self.rank):
            self.end_reason = "stop"
        return self.end_reason is not None

    def _has_max_steps(self) -> bool:
        return self.loop.max_steps is not None and self.stepper.taken >= self.loop.max_steps

    def _check_weight_sum(self, epoch: int) -> None:
        if self.job.weight is None or epoch != self.elastic_run.reached.first_epoch:
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

    def _checkpoint_state(self) -> dict[str, Any]:
        rate_rows = self.elastic_run.reached.rate_rows
        averaged = {} if self.average is None else self.average.checkpoint_state()
        progress = {"history": self.history, "rate_rows": rate_rows}
        if self.sharding is not None:
            divided = self.sharding.checkpoint_state(self._rate_factor(rate_rows))
            return divided | progress | self.stepper.checkpoint_state()
        optimizer = state_bytes.single_process_optimizer_state(
            self.optimizer, self._rate_factor(rate_rows)
        )
        return (
            {
                "model": self.model.state_dict(),
                "optimizer": optimizer,
            }
            | progress
            | self.stepper.checkpoint_state()
            | averaged
        )

    def _trained_row_count(self, source: BatchedSource, place: EpochPosition) -> int:
        """Returns the rows of all processes in the epoch so far; a data module does not tell."""
        return (
            place.rows if source.keeps_place else place.steps * self.size * self.job.data.batch_size
        )
