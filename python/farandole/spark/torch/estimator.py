# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator`: a PyTorch model fitted data-parallel on a DataFrame."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from farandole.common.counted_noun import format_counted_noun
from farandole.spark.common.datamodule import resolve_data_module_class
from farandole.spark.common.global_batch import learning_rate_factor, require_row_for_each_process
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.common.training_plan import FrameworkTrainingJob
from farandole.spark.torch import callbacks, driver_checks, rate_range
from farandole.spark.torch.columns.loss_terms import check_weighable, find_loss_reduction
from farandole.spark.torch.columns.losses import construct_losses
from farandole.spark.torch.columns.tensors import describe_output_with_label
from farandole.spark.torch.estimator_base import TorchEstimatorBase
from farandole.spark.torch.fingerprint_parts import model_parts, total_learning_rate_digest
from farandole.spark.torch.job import TorchLabel, TorchTrainingJob, TorchUserObjects
from farandole.spark.torch.loss_probe import try_unknown_losses
from farandole.spark.torch.model import TorchModel
from farandole.spark.torch.model_trial import try_model_call
from farandole.spark.torch.parameter_groups import split_parameter_groups
from farandole.spark.torch.rate_schedules import RateSchedule, warmup_share
from farandole.spark.torch.remote import train_rank
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReadable,  # noqa: F401 - Horovod has these here
    TorchEstimatorParamsReader,  # noqa: F401
    TorchEstimatorParamsWritable,  # noqa: F401
    TorchEstimatorParamsWriter,  # noqa: F401
)
from farandole.spark.torch.sharding import driver_state
from farandole.spark.torch.training.averaged_weights import fitted_weights
from farandole.spark.torch.training.micro_batches import micro_batch_count
from farandole.torch.optimizer import require_elementwise_optimizer

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.data.training_data import TrainingDataSpec
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.torch.estimator_base import SampledColumns
    from farandole.spark.torch.job import TorchTrainingResult


class TrialFindings(NamedTuple):
    """Findings of the trial run for the user.

    Attributes:
        messages: decisions about inputs.
        output_form: form of the output that the model's own loss shows, if there is one.
    """

    messages: tuple[str, ...]
    output_form: str | None


class TorchEstimator(TorchEstimatorBase):
    """An estimator that fits a PyTorch model on a DataFrame, on several processes at once.

    Columns become tensors as follows. Every feature column is one float32 tensor and one argument
    of the model, `(rows, n)` for vectors and arrays of length n, `(rows, 1)` for numbers, unless
    `input_shapes` or `input_dtypes` say otherwise; columns listed together, `feature_cols=[["a",
    "b"], "image"]`, are one tensor, side by side. A label is int64 if its loss takes class indices
    (`CrossEntropyLoss`, `NLLLoss`, ...), or if the loss is your own and the column holds integers,
    else float32. The first rows are tried on the driver and the mapping is printed.

    Training: gradients are averaged over processes. The learning rate is multiplied by their
    number, in new and in resumed runs. Each row of a step has the same weight. Every process takes
    the same number of steps, and each row is seen once per epoch. With `random_seed`, the split,
    the order, and torch on each rank are seeded.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete
    epoch, up to `epochs` in total. It continues with the data, model, loss, optimizer and
    parameters that it was started with. Otherwise `fit` raises an error that lists the differences.
    Each fit of a tuner or with a map of parameters has its own run.
    """

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_optimizer()
        self._refuse_options_of_schedules()
        if not self._makes_network:
            self._split_optimizer()
        losses = self._label_losses()
        self._refuse_options_of_losses()
        self._refuse_options_of_distribution()
        self._refuse_options_of_micro_batches()
        if self.getLossConstructors() is None:
            for loss in losses:
                find_loss_reduction(loss, self.getLossReduction())
                if self.getSampleWeightCol() is not None or self.getClassWeight() is not None:
                    check_weighable(loss)
        callbacks.check_callbacks(self.getCallbacks())
        if not callable(resolve_data_module_class(self.getDataModule()) or type):
            raise TypeError(f"data_module must be a class: {self.getDataModule()!r}")

    def _refuse_options_of_schedules(self) -> None:
        """Refuses options of learning rates that would have no effect."""
        scheduler = self.getLrScheduler()
        if self.getWarmupSteps() is not None and not isinstance(scheduler, str):
            raise ValueError(
                "warmup_steps needs lr_scheduler by name, such as "
                'lr_scheduler="constant": other schedulers have their own warm-up'
            )
        if self._has_groups_by_name() and hasattr(scheduler, "optimizer"):
            raise ValueError(
                "parameter_groups and layer_decay cannot be combined with a scheduler that knows "
                "the optimizer's groups already: set lr_scheduler to a function that creates it"
            )

    _makes_network: ClassVar[bool] = False
    """Whether the network is made in a fit, so that its parameters have no names before."""

    def _has_groups_by_name(self) -> bool:
        return bool(self.getParameterGroups()) or self.getLayerDecay() is not None

    def _split_optimizer(self) -> Any:
        """Returns the optimizer with the groups that the user described by names.

        Raises:
            ValueError: a name matches nothing, or the model has no layers.
        """
        if not self._has_groups_by_name():
            return self.getOptimizer()
        return split_parameter_groups(
            self.getModel(),
            self.getOptimizer(),
            self.getParameterGroups() or {},
            self.getLayerDecay(),
        )

    def _resolve_scheduler(self, data: TrainingDataSpec, processes: int) -> Any:
        """Returns the scheduler, or the function that creates it in a training process."""
        scheduler = self.getLrScheduler()
        if not isinstance(scheduler, str):
            return scheduler
        batches = data.train_steps or -(
            -data.train_rows // (data.step_rows or data.batch_size * processes)
        )
        steps = -(-batches // self.getBackwardPassesPerStep()) * self.getEpochs()
        warmup = self.getWarmupSteps() or 0
        share = warmup_share(warmup, min(steps, self.getMaxSteps() or steps))
        return RateSchedule(scheduler, share)

    def _refuse_options_of_distribution(self) -> None:
        """Refuses options that need all gradients on each process, in each step."""
        distributed_by = {
            f"sync_every={self.getSyncEvery()}": self.getSyncEvery() > 1,
            "shard_optimizer=True": self.getShardOptimizer(),
            'strategy="fsdp"': self.getStrategy() == "fsdp",
        }
        if self.getEmaDecay() is not None and self.getTrainMinibatchFn() is not None:
            raise ValueError("ema_decay cannot be combined with train_minibatch_fn, which steps")
        if self.getFsdpModules() is not None and self.getStrategy() != "fsdp":
            raise ValueError('fsdp_modules needs strategy="fsdp"')
        chosen = [name for name, given in distributed_by.items() if given]
        if not chosen:
            return
        refused = {
            'precision="fp16", whose scaler looks at all gradients': self.getPrecision() == "fp16",
            "train_minibatch_fn": self.getTrainMinibatchFn() is not None,
            "gradient_compression": self.getGradientCompression() is not None,
            chosen[-1]: len(chosen) > 1,
        }
        for option, given in refused.items():
            if given:
                raise ValueError(f"{chosen[0]} cannot be combined with {option}")
        if self.getSyncEvery() > 1 and self.getEmaDecay() is not None:
            raise ValueError(
                f"sync_every={self.getSyncEvery()} cannot be combined with ema_decay: processes "
                "would average different weights"
            )
        if self.getShardOptimizer() or self.getStrategy() == "fsdp":
            require_elementwise_optimizer(self.getOptimizer())
        if self.getStrategy() == "fsdp":
            self._refuse_options_of_divided_models()

    def _refuse_options_of_divided_models(self) -> None:
        """Refuses options and models that FSDP cannot train."""
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if version < driver_state.MIN_FSDP_TORCH:
            least = ".".join(map(str, driver_state.MIN_FSDP_TORCH))
            raise ValueError(
                f'strategy="fsdp" needs torch {least} or newer, and this is {torch.__version__}'
            )
        if not self._store_as_filesystem().saving_runs():
            raise ValueError(
                'strategy="fsdp" keeps the parts of the model in the directory of the run, so the '
                "store must save runs"
            )
        if self.getEmaDecay() is not None:
            raise ValueError(
                'strategy="fsdp" cannot be combined with ema_decay, whose average is a whole model'
            )
        if self.getCompile():
            raise ValueError(
                'strategy="fsdp" cannot be combined with compile=True: units are gathered by hooks'
            )
        model = self.getModel()
        driver_checks.refuse_max_norm_embeddings(model, 2)
        driver_state.check_shardable(model, self.getFsdpModules())

    def _refuse_options_of_micro_batches(self) -> None:
        """Refuses options that do not go with a global batch, or with parts of it."""
        rows = self.getGlobalBatchSize()
        if rows is None:
            return
        if self.getSyncEvery() > 1:
            raise ValueError(
                f"global_batch_size={rows} cannot be combined with sync_every="
                f"{self.getSyncEvery()}: each process takes steps of its own rows"
            )
        if not self.isSet("batch_size"):
            return
        for name, layer in self.getModel().named_modules():
            # All batch norms have this class, and also those over all ranks.
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
                raise ValueError(
                    f"global_batch_size={rows} with batch_size={self.getBatchSize()} divides the "
                    f"rows of a process, and the batch norm layer {name!r} would have the mean of "
                    "each part: leave out batch_size, or use GroupNorm"
                )
        refused = {
            f"backward_passes_per_step={self.getBackwardPassesPerStep()}": (
                self.getBackwardPassesPerStep() > 1
            ),
            "train_minibatch_fn": self.getTrainMinibatchFn() is not None,
        }
        for option, given in refused.items():
            if given:
                raise ValueError(
                    f"global_batch_size={rows} with batch_size={self.getBatchSize()}, which limits "
                    f"the rows of a backward pass, cannot be combined with {option}"
                )

    def get_model_class(self) -> type[TorchModel]:
        """Returns the class of the fitted model."""
        return TorchModel

    def lr_range_test(
        self, dataset: Any = None, *, min_lr: float = 1e-6, max_lr: float = 1.0, steps: int = 100
    ) -> rate_range.LearningRateCurve:
        """Returns the losses of a short run whose learning rate rises from step to step, and a
        rate that they suggest (Smith 2017). The estimator and its model stay as they are. The run
        is in the store, as other runs.

        Args:
            dataset: rows to train with, as for `fit`; `None` trains on the prepared rows in the
                store, as `fit_on_parquet` does.
            min_lr: learning rate of the first step, of one process. Groups with smaller rates
                keep their ratio to the largest rate.
            max_lr: learning rate of the last step.
            steps: steps of the optimizer.

        Raises:
            ValueError: there is no such range, the loss diverges from the beginning, or a
                parameter does not fit.
        """
        rates = rate_range.rising_rates(min_lr, max_lr, steps)
        tested = self.copy()
        tested.setParams(
            **rate_range.CLEARED_PARAMS,
            lr_scheduler=partial(rate_range.create_range_scheduler, rates),
            callbacks=[rate_range.RangeLossRecorder()],
            epochs=steps,
            max_steps=steps,
            backward_passes_per_step=1,
        )
        fitted = tested.fit_on_parquet() if dataset is None else tested.fit(dataset)
        return rate_range.curve_of_history(fitted.getHistory(), rates)

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        processes = backend.num_processes()
        sampled = self._sample_columns(prepared, backend)
        # Local steps have the learning rate of one process.
        factor = 1 if self.getSyncEvery() > 1 else learning_rate_factor(self, processes)
        totals = total_learning_rate_digest(self._split_optimizer(), factor)
        fingerprint = self._fit_fingerprint(prepared, processes, totals)
        most = backend.max_processes()
        require_row_for_each_process(self, most)
        self._require_fixed_processes(backend.min_processes(), most)
        job, objects, losses, words = self._create_job(prepared, fingerprint, sampled, most)
        outputs = driver_checks.try_model(job, objects, losses, sampled.rows)
        if self.getDataModule() is None:
            driver_checks.check_batch_norms(job, objects.model, sampled.rows, processes)
        apart = job.loop.takes_local_steps  # then each process has losses of its own
        parts = 1 if apart else max(most, micro_batch_count(job.data, 1))
        try_unknown_losses(job, losses, objects.model, objects.transformation, processes=parts)

        def load_result(trained: TorchTrainingResult) -> torch.nn.Module:
            state = state_bytes.unpack_state(trained.checkpoint)
            if job.sharded is not None:
                driver_state.load_trained_state(state, job, objects)
                return objects.model
            objects.model.load_state_dict(fitted_weights(state))
            objects.optimizer.load_state_dict(state["optimizer"])
            return objects.model

        return FrameworkTrainingJob(
            job=job,
            fingerprint=fingerprint,
            train=train_rank,
            inputs=job.inputs,
            output_sizes=[output[0].numel() for output in outputs],
            load_result=load_result,
            create_example=lambda _model: driver_checks.model_example(job, sampled.rows, outputs),
            messages=words.messages,
            hold_inputs=(
                contextlib.nullcontext
                if job.sharded is None
                else partial(driver_state.hold_first_state, objects=objects)
            ),
            output_words=[
                describe_output_with_label(*one)
                for one in zip(
                    job.labels,
                    outputs,
                    losses,
                    job.call.fields or [""] * len(losses),
                    strict=True,
                )
            ],
            create_model_kwargs=lambda model, history, run_id, metadata: self._get_model_kwargs(
                model, history, objects.optimizer, run_id, metadata
            ),
            model_params=self._model_params(job.call, job.inputs, words.output_form),
        )

    def _require_fixed_processes(self, least: int, most: int) -> None:
        """Refuses elastic backends where the loss of a process is the loss of its part."""
        divided = {
            "shard_optimizer=True": self.getShardOptimizer(),
            'strategy="fsdp"': self.getStrategy() == "fsdp",
        }
        for option, given in divided.items():
            if given and most != least:
                raise ValueError(
                    f"{option} needs a fixed number of processes: when one is lost, its part of "
                    f"the state is lost; the backend has {least} to {most}"
                )

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        what = "loss" if self.getLossConstructors() is None else "loss_constructors"
        own = FingerprintPart.from_value(what, self._label_losses())
        parts = [*model_parts(self.getModel(), self._split_optimizer()), own]
        scheduler = self.getLrScheduler()
        if isinstance(scheduler, str):
            # A longer run has other rates from its first step on.
            lengths = self.getEpochs(), self.getMaxSteps()
            words = ", ".join(
                f"{name}={length}"
                for name, length in zip(("epochs", "max_steps"), lengths, strict=True)
                if length is not None
            )
            part = f"the length of lr_scheduler={scheduler!r}"
            parts.append(FingerprintPart.from_value(part, lengths, words))
        return parts

    def _create_job(
        self, prepared: Prepared, fingerprint: Fingerprint, sampled: SampledColumns, processes: int
    ) -> tuple[TorchTrainingJob, TorchUserObjects, list[Any], TrialFindings]:
        """Returns the run's description, an own copy of the user's objects, its losses, and the
        findings for the user.
        """
        fields = self._job_fields(prepared, fingerprint)
        objects = TorchUserObjects(
            model=self.getModel(),
            optimizer=self._split_optimizer(),
            losses=self._label_losses(),
            constructed=self.getLossConstructors() is not None,
            metrics=self._functions_by_metric(),
            compression=self.getGradientCompression(),
            scheduler=self._resolve_scheduler(fields["data"], processes),
            train_minibatch=self.getTrainMinibatchFn(),
            transformation=sampled.transformation,
            callbacks=tuple(self.getCallbacks()),
            data_module=resolve_data_module_class(self.getDataModule()),
        )
        packed = state_bytes.pickle_job_objects(
            objects,
            losses="loss" if self.getLossConstructors() is None else "loss_constructors",
            compression="gradient_compression",
            scheduler="lr_scheduler",
            train_minibatch="train_minibatch_fn",
            transformation="transformation_fn",
        )
        mine = state_bytes.unpickle_on_cpu(packed)
        sharded = None
        if self.getStrategy() == "fsdp":
            sharded = driver_state.shard_objects(mine, self.getFsdpModules())
            packed = b""  # the weights in it are as large as the model
        losses = construct_losses(mine, model=mine.model, optimizer=mine.optimizer, rank=0, size=1)
        tried = try_model_call(
            self._model_call(sampled.inputs),
            sampled.inputs,
            mine.model,
            sampled.rows,
            has_dtypes=self.getInputDtypes() is not None,
        )
        # These may put other labels in place of those of the data.
        replaced = sampled.transformation or objects.data_module or self.getFill()
        ranges = {} if replaced else driver_checks.combined_column_ranges(prepared)
        names, shapes = self.getLabelCols(), self.getLabelShapes()
        labels = [
            TorchLabel(*one, ranges.get(one[0].name))
            for one in driver_checks.map_labels(names, sampled.columns, losses, shapes)
        ]
        own, form = None, None
        if self._has_own_loss():
            parts = max(processes, micro_batch_count(fields["data"], 1))
            trial, own = self._try_own_loss(
                tried, labels, mine.model, sampled, fields["data"], parts
            )
            labels, form, losses = list(trial.labels), trial.output_form, [own] * len(names)
        weights = self.getLossWeights() or [1.0 / len(names)] * len(names)
        if own is not None:  # the loss of the model is that of all labels together
            weights = [1.0, *[0.0] * (len(names) - 1)]
        job = TorchTrainingJob(
            **fields,
            objects=packed,
            sharded=sharded,
            inputs=tried.inputs,
            call=tried.call,
            labels=driver_checks.mark_class_index_lists(
                tried.call, labels, losses, tried.inputs, mine.model, sampled.rows
            ),
            loss_weights=tuple(weights),
            own_loss=own,
            class_weights=self._class_weights(prepared, fields["data"], labels[0], losses[0]),
        )
        messages = tried.messages
        if sharded is not None:
            count = format_counted_noun(len(sharded.units) + 1, "part")
            messages = (*messages, f"the model is gathered in {count} (fsdp_modules)")
        return job, mine, losses, TrialFindings(messages, form)
