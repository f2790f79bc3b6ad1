# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One rank's part of a run: Keras's own `fit` on this rank's rows, with a distributed optimizer.

If a run has a checkpoint, it continues after the last complete epoch, up to `epochs` in total.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np

import farandole.keras as hvd
import farandole.numpy as arrays
from farandole._keras.callbacks import LearningRateScheduleCallback
from farandole._keras.value_collectives import broadcast_variables, to_numpy_array
from farandole.common import basics, scratch_directories
from farandole.common.termination_notices import is_elastic_worker
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.spark import task
from farandole.spark.common.data.batch_source import BatchSource, EpochPosition
from farandole.spark.common.runs.elastic_run import ProgressAcrossWorlds
from farandole.spark.common.runs.stop_request import StopCheck
from farandole.spark.keras.job import KerasTrainingResult
from farandole.spark.keras.keras_inputs import reader_casts, zero_batch
from farandole.spark.keras.model_compilation import restore_compiled_loss
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.training.batch_feed import (
    BatchFeed,
    DataModuleFeed,
    ValidationDataset,
    prefetch_batches,
    scale_steps_by_share,
)
from farandole.spark.keras.training.elastic import (
    CommitCallback,
    KerasRunProgress,
    OncePerMomentCallbacks,
    PartialFitCallbackList,
)
from farandole.spark.keras.training.learning_rate import ScaledLearningRate
from farandole.spark.keras.training.local_steps import AverageWeightsCallback
from farandole.spark.keras.training.loss_counts import compute_losses_as_parts
from farandole.spark.keras.training.run_publisher import (
    RunPublisher,
    StepTimingCallback,
    UserCheckpointCallback,
)
from farandole.spark.keras.training.scores import (
    AgreedStopCallback,
    FiniteLossCallback,
    GlobalScoresCallback,
    UndoEmptyStepsCallback,
)

if TYPE_CHECKING:
    from pathlib import Path

    from farandole.spark.keras.job import KerasTrainingJob, KerasUserObjects

_SEED_STATE_NAME = "seed_generator_state"


class KerasTrainer:
    """One rank of a run.

    Args:
        job: what to do, the same on every rank.
    """

    def __init__(self, job: KerasTrainingJob) -> None:
        self.job = job
        self.size, self.rank = basics.size(), basics.rank()
        keras.config.set_floatx(job.floatx)
        if keras.config.dtype_policy().name != job.policy:
            keras.config.set_dtype_policy(job.policy)
        if job.random_seed is not None:
            _seed_generators((job.random_seed + self.rank) % 2**32)
        self.objects: KerasUserObjects = cloudpickle.loads(job.objects)
        self.moves = is_elastic_worker()
        """Whether the world may change."""
        self.halt = StopCheck(job.store)
        self.module: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.train, self.val = self._create_feeds()
        self.note: dict[str, Any] = {}
        self.best: bytes | None = None
        self.done = 0
        self.once_per_moment = OncePerMomentCallbacks(self.objects.callbacks)
        self.has_entered = False
        self.first_best = getattr(self.objects.checkpoint_callback, "best", None)
        self.model = self._load_model()
        self.elastic_run = ProgressAcrossWorlds(
            KerasRunProgress(), hvd.elastic.run, partial(hvd.elastic.KerasState, self.model)
        )

    def run(self) -> KerasTrainingResult | None:
        """Trains up to the last epoch."""
        with scratch_directories.temporary_directory() as folder, contextlib.closing(self.halt):
            self.elastic_run.run_in_each_world(lambda: self._train_in_world(folder))
            publisher = self.publisher
            return (
                KerasTrainingResult(publisher.result_model(), publisher.history)
                if self.rank == 0
                else None
            )

    def _train_in_world(self, folder: Path) -> None:
        """Trains from the progress so far to the last epoch, in one world."""
        self.size, self.rank = basics.size(), basics.rank()
        course, model = self.elastic_run, self.model
        # Functions that were compiled for another world may contain that world's numbers.
        model.train_function = model.test_function = None
        if course.reached.begun:
            self.note, self.best = copy.deepcopy(course.reached.note), course.reached.best
            self._scale_learning_rate(course.reached.size)
        else:
            self._load_checkpoint()
            self._scale_learning_rate(1)
            course.reached = replace(
                course.reached, epoch=self.done, note=copy.deepcopy(self.note), best=self.best
            )
        if not self.has_entered:
            self.has_entered = True
            self._set_seed_states()
        self.publisher = self._create_publisher(folder)
        course.commit_progress(begun=True, size=self.size)
        if course.reached.place.steps:
            self._fit_from_progress(course.reached.epoch + 1)
        if not course.reached.stopped and course.reached.epoch < self.job.epochs:
            self._fit_from_progress(self.job.epochs)

    def _fit_from_progress(self, last: int) -> None:
        """Trains from the progress so far to an epoch."""
        reached = self.elastic_run.reached
        if self.moves:
            self.train, self.val = self._create_feeds(reached.place)
            self.publisher.set_epoch_size(self.train.steps, self.train.rows)
        with self.module:
            self._fit_epochs(reached.epoch, last, reached.place)

    def _fit_epochs(self, first: int, last: int, place: EpochPosition) -> None:
        model, train, val = self.model, self.train, self.val
        batches = train.batches_of_epochs(first, last)
        validation = None if val is None else val.validation_batches()
        verbose = 2 if self.job.verbose > 1 and self.rank == 0 else 0
        callbacks: Any = self._create_callbacks(self.publisher)
        if self.moves:
            callbacks = PartialFitCallbackList(
                [*callbacks, CommitCallback(self.elastic_run, train, self.publisher)],
                self.once_per_moment,
                place.steps,
                self.job.epochs,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=self.job.epochs,
                steps=train.steps,
                model=model,
            )
        try:
            model.fit(
                prefetch_batches(batches, self.job.prefetch),
                steps_per_epoch=train.steps - place.steps,
                epochs=last,
                initial_epoch=first,
                shuffle=False,  # the reader does
                validation_data=validation,
                validation_steps=None if val is None else val.steps,
                verbose=verbose,
                callbacks=callbacks,
            )
        finally:
            for source in (batches, validation):
                # Keras's prefetching thread may be in it; it ends with the process then.
                with contextlib.suppress(ValueError):
                    if inspect.isgenerator(source) or isinstance(source, ValidationDataset):
                        source.close()

    def _load_model(self) -> Any:
        job, objects = self.job, self.objects
        # the driver's own
        model = model_bytes.unpack_model(job.model, objects.custom_objects, safe_mode=False)
        restore_compiled_loss(model, objects.loss)
        x, y = zero_batch(job.shape, job.labels, job.data.batch_size)
        weights = None if job.weight is None else np.ones(job.data.batch_size, np.float32)
        _build_before_first_batch(model, (x, y) if weights is None else (x, y, weights))
        self.first_rate = ScaledLearningRate(model.optimizer, 1).initial_rate()
        compression = objects.compression or hvd.Compression.none
        if not job.takes_local_steps:
            model.optimizer = hvd.DistributedOptimizer(model.optimizer, compression=compression)
        model.jit_compile = model.jit_compile  # asked again, now that the optimizer is another one
        self.rate = ScaledLearningRate(model.optimizer, 1)
        share = scale_steps_by_share(
            model,
            shares=self.train.shares,
            is_sum=job.loss_reduction == "sum",
            validation_shares=self.val is not None and self.val.shares,
            passes=job.passes,
        )
        if job.counts_losses:
            compute_losses_as_parts(model, share, job.added_losses, sums_outputs=job.sums_outputs)
        if job.takes_local_steps:
            model.steps_per_execution = 1
        if self.train.leaves_out or self.moves or (self.val is not None and self.val.leaves_out):
            model.steps_per_execution = 1
        return model

    def _load_checkpoint(self) -> None:
        """Loads the run's checkpoint into the model, equal on all ranks; a collective call."""
        job, model, store = self.job, self.model, self.job.store
        done = np.zeros(1, np.int64)
        if self.rank == 0:
            found = store.read_checkpoint_to_resume()
            if found is not None:
                try:
                    model_bytes.load_weights_and_optimizer(model, found)
                except (ValueError, KeyError) as error:
                    raise ValueError(
                        f"the checkpoint of run {self.job.run_id!r} belongs to another model or "
                        "optimizer: choose another "
                        f"run_id, or move {store.run_path} elsewhere: {error}"
                    ) from error
                self.note = model_bytes.read_metadata_note(found)
                # The file has the rate for the rows that a process had in a step.
                rows = job.step_rows
                self.rate.multiply_rate(rows / self.note.get("rate_rows", rows))
                self.best = store.read_checkpoint(f"{store.checkpoint_filename}.best")
                done[0] = len(self.note.get("timing", []))
        self.done = int(arrays.broadcast(done, 0, name="farandole.keras.done")[0])
        if self.moves:
            self.note, self.best = broadcast_plain((self.note, self.best), 0)
        broadcast_variables([*model.weights, *model.optimizer.variables], 0)

    def _scale_learning_rate(self, before: int) -> None:
        """Takes the learning rate from one number of processes to this world's."""
        factor = self.job.learning_rate_factor(self.size)
        self.rate.rescale_for_world(self.job.learning_rate_factor(before), factor)
        for callback in self.objects.callbacks:
            if isinstance(callback, LearningRateScheduleCallback) and self.first_rate is not None:
                callback.initial_lr = self.first_rate * factor

    def _set_seed_states(self) -> None:
        """Seeds random layers, so that they draw different numbers on each rank, and the same
        numbers in every run with one seed.
        """
        for index, variable in enumerate(
            one for one in self.model.non_trainable_variables if _SEED_STATE_NAME in one.name
        ):
            state = np.array(to_numpy_array(variable))
            if self.job.random_seed is not None and self.done == 0:
                state[0] = (self.job.random_seed + index) % 2**31
            state[1] = (int(state[1]) + self.rank * 1_000_003) % 2**31
            variable.assign(state)

    def _create_callbacks(self, publisher: RunPublisher) -> list[Any]:
        callbacks: list[Any] = [
            GlobalScoresCallback(validates=self.val is None or self.val.validates)
        ]
        if self.job.takes_local_steps:
            callbacks.insert(0, AverageWeightsCallback(self.job.sync_every))
        if self.job.terminate_on_nan and not any(
            _is_nan_terminator(one) for one in self.objects.callbacks
        ):
            callbacks.append(FiniteLossCallback(self.rank))
        uncounted = self.train.uncounted, [] if self.val is None else self.val.uncounted
        if any(uncounted):
            callbacks.append(UndoEmptyStepsCallback(*uncounted))
        if task.has_rank_display():
            callbacks.append(StepTimingCallback())
        boards = [
            one for one in self.objects.callbacks if isinstance(one, keras.callbacks.TensorBoard)
        ]
        callbacks += [one for one in self.objects.callbacks if one not in boards]
        if self.rank == 0:
            callbacks += boards
        if self.rank == 0 or self.moves:
            callbacks += [*([] if publisher.kept is None else [publisher.kept]), publisher]
        return [*callbacks, AgreedStopCallback(self.halt, self.rank)]

    def _create_publisher(self, directory: Path) -> RunPublisher:
        kept = None
        if self.objects.checkpoint_callback is not None:
            kept = UserCheckpointCallback(
                self.objects.checkpoint_callback, directory / "best.keras", self.rate
            )
            kept.inner.best = self.first_best
            kept.path.unlink(missing_ok=True)
            if self.best is not None:
                kept.path.write_bytes(self.best)
                kept.inner.best = self.note.get("best", kept.inner.best)
        board = None
        for callback in self.objects.callbacks:
            if isinstance(callback, keras.callbacks.TensorBoard):
                board = directory / "logs"
                callback.log_dir = str(board)
        arguments = (
            self.job,
            self.rate,
            self.note,
            self.train.steps,
            self.train.rows,
            kept,
            board,
            self.model,
        )
        return RunPublisher(*arguments, writes=self.rank == 0)

    def _create_feeds(
        self, place: EpochPosition | None = None
    ) -> tuple[BatchFeed | DataModuleFeed, BatchFeed | DataModuleFeed | None]:
        """Returns the feeds of training, from a position in an epoch on, and of validation."""
        if self.objects.data_module is not None:
            return self._create_module_feeds()
        job, data, objects = self.job, self.job.data, self.objects
        casts: dict[str, str | None] = dict.fromkeys(data.columns)
        if objects.transformation is None:
            casts = reader_casts(job.shape, job.labels, job.weight)
        train, source = data.open_sources(
            BatchSource,
            casts,
            rank=self.rank,
            size=self.size,
            transformation=objects.transformation,
            moves=self.moves,
            fixed=True,  # Keras asks for one shape
        )
        val = None
        if source is not None:
            # Processes that add up counts have the same number of steps.
            most = source.steps_until_end() if job.counts_losses else source.own_step_count
            steps = min(most, data.val_steps or most)
            val = BatchFeed(source, job, steps, trains=False, moves=self.moves)
        train.set_epoch_start(place or EpochPosition())
        return BatchFeed(
            train, job, data.train_steps or train.steps_until_end(), trains=True, moves=self.moves
        ), val

    def _create_module_feeds(self) -> tuple[DataModuleFeed, DataModuleFeed | None]:
        job, data, size = self.job, self.job.data, self.size
        train_steps = data.train_steps or -(-data.train_rows // (data.batch_size * size))
        val_steps = data.val_steps or max(1, -(-data.val_rows // (data.val_batch_size * size)))
        module = data.create_data_module(
            self.objects.data_module,
            epochs=job.epochs,
            transformation=self.objects.transformation,
            rank=self.rank,
            size=size,
            steps=(train_steps, val_steps),
        )
        self.module = module
        train = DataModuleFeed(module.train_data, train_steps, train_steps * data.batch_size * size)
        if data.val_url is None:
            return train, None
        return train, DataModuleFeed(
            module.val_data, val_steps, val_steps * data.val_batch_size * size
        )


def _is_nan_terminator(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def _seed_generators(seed: int) -> None:
    """Seeds the random generators of Keras and of users. `keras.utils.set_random_seed` would import
    every installed backend.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the state that others draw from
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415 - the backend

        tf.random.set_seed(seed)
    elif backend == "torch":
        import torch  # noqa: PLC0415 - the backend

        torch.manual_seed(seed)


def _build_before_first_batch(model: Any, example: tuple[Any, ...]) -> None:
    """Builds what Keras would build from the first batch, which would then be lost on some
    backends.
    """
    model._symbolic_build(data_batch=example)  # noqa: SLF001 - what fit begins with
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
