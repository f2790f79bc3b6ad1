# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator` of Lightning: a `LightningModule` fitted data-parallel on a DataFrame."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from farandole.spark.common.datamodule import resolve_data_module_class
from farandole.spark.common.global_batch import refuse_row_limit, require_row_for_each_process
from farandole.spark.common.param_checks import feature_arguments
from farandole.spark.common.runs.digests import class_name
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.common.training_plan import FrameworkTrainingJob
from farandole.spark.lightning.job import LightningTrainingJob, LightningUserObjects
from farandole.spark.lightning.local_steps import refuse_options_of_local_steps
from farandole.spark.lightning.model import TorchModel
from farandole.spark.lightning.module_wrapper import wrap_module
from farandole.spark.lightning.params import LightningParams
from farandole.spark.lightning.remote import compression_hook_arguments, train_rank
from farandole.spark.lightning.step_probe import refuse_non_mean_training_step
from farandole.spark.torch import driver_checks
from farandole.spark.torch.columns.losses import construct_losses
from farandole.spark.torch.estimator_base import TorchEstimatorBase
from farandole.spark.torch.job import TorchLabel, TorchUserObjects
from farandole.spark.torch.loss_probe import try_unknown_losses
from farandole.spark.torch.model_trial import TriedModel, model_outputs, try_model_call
from farandole.spark.torch.saving import state_bytes
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReadable,  # noqa: F401 - Horovod has these here
    TorchEstimatorParamsReader,  # noqa: F401
    TorchEstimatorParamsWritable,  # noqa: F401
    TorchEstimatorParamsWriter,  # noqa: F401
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.common.runs.tracking import ModelExample
    from farandole.spark.torch.estimator_base import SampledColumns
    from farandole.spark.torch.job import TorchTrainingResult

_LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


MIN_PL_VERSION = "2.4.0"
"""The first version of Lightning that this works with."""


class LightningEstimator(LightningParams, TorchEstimatorBase):
    """An estimator that fits a `LightningModule` on a DataFrame, on several processes at once.

    A batch is a dict of tensors by column: features as `farandole.spark.torch.TorchEstimator` makes
    them, labels and sample weights with one number per row. Columns listed together in
    `feature_cols` are under `"[a, b]"`. A plain module works as well. It needs `optimizer` and
    `loss`, which are only for plain modules, as are `loss_constructors`, `loss_weights`, `metrics`
    and `lr_scheduler`.

    The module chooses its learning rate, which is not scaled. Values that the module logs become
    the history, as a mean over rows of all processes. A `run_id` whose checkpoint is in the store
    is resumed after its last complete epoch, optimizers and schedulers included, with the data,
    model and parameters that it was started with.
    """

    def _refuse_options_of_torch_estimator(self) -> None:
        """Refuses options of `TorchEstimator` that Lightning's strategy decides here."""
        if self.getEmaDecay() is not None:
            raise ValueError(
                "ema_decay is for TorchEstimator: give Lightning's callback WeightAveraging"
            )
        if self.getShardOptimizer():
            raise ValueError(
                "shard_optimizer=True is for TorchEstimator: give Lightning's Trainer a strategy "
                "that shards states, by trainer_args"
            )
        if self.getStrategy() == "fsdp":
            raise ValueError(
                'strategy="fsdp" is for TorchEstimator: a LightningModule gives its weights to the '
                "callbacks and checkpoints of Lightning as a whole. A training function for "
                "farandole.spark.run can divide one by Trainer(strategy='farandole_fsdp')"
            )
        by_name = {
            "parameter_groups": self.getParameterGroups(),
            "layer_decay": self.getLayerDecay(),
            "warmup_steps": self.getWarmupSteps(),
            "lr_scheduler": isinstance(self.getLrScheduler(), str) or None,
        }
        for option, given in by_name.items():
            if given is not None:
                raise ValueError(
                    f"{option} by name is for TorchEstimator: give the optimizer its groups, and "
                    "set lr_scheduler to a scheduler or a function that creates it"
                )

    def _refuse_other_passes(self) -> None:
        """Refuses a number of passes for the `Trainer` by which a global batch is not divided."""
        name = "accumulate_grad_batches"
        if self.getGlobalBatchSize() is not None and "strategy" in (self.getTrainerArgs() or {}):
            raise ValueError(
                f"global_batch_size={self.getGlobalBatchSize()} cannot be combined with "
                "trainer_args['strategy']: only the estimator's own strategy weights processes by "
                "their rows"
            )
        passes = self.getBackwardPassesPerStep()
        given = (self.getTrainerArgs() or {}).get(name, passes)
        if self.getGlobalBatchSize() is not None and given != passes:
            raise ValueError(
                f"global_batch_size={self.getGlobalBatchSize()} is divided by "
                f"backward_passes_per_step={passes}: trainer_args cannot have another {name}: "
                f"{given}"
            )
        for callback in self.getCallbacks():
            classes = {kind.__name__ for kind in type(callback).__mro__}
            schedules = "GradientAccumulationScheduler" in classes
            schedule: dict[int, int] = getattr(callback, "scheduling", {}) if schedules else {}
            others = {epoch: count for epoch, count in schedule.items() if count != passes}
            if self.getGlobalBatchSize() is not None and others:
                raise ValueError(
                    f"global_batch_size={self.getGlobalBatchSize()} is divided by "
                    f"backward_passes_per_step={passes}: {type(callback).__name__} cannot have "
                    f"other numbers by epoch: {others}"
                )

    def _check_settings(self) -> None:
        super()._check_settings()
        refuse_row_limit(self)
        self._refuse_other_passes()
        self._refuse_options_of_torch_estimator()
        if self._lightning_package() is None:
            if self.getOptimizer() is None:
                raise ValueError("optimizer is required for a plain module")
            self._check_optimizer()
            self._label_losses()
            self._refuse_options_of_losses()
        else:
            for name in (
                "optimizer",
                "loss",
                "loss_constructors",
                "loss_weights",
                "class_weight",
                "lr_scheduler",
            ):
                if self.getOrDefault(name) is not None:
                    raise ValueError(
                        f"{name} is for plain modules: a LightningModule brings its own"
                    )
            if self.getMetrics():
                raise ValueError("metrics are for plain modules: a LightningModule logs its own")
        taken = {self.getSampleWeightCol(), *self.getLabelCols()}
        both = sorted(
            taken & {path[0] for path in feature_arguments(self.getFeatureCols()) if path}
        )
        if both:
            raise ValueError(
                "a batch contains features by argument, and labels and weights by column: rename "
                f"the column, or list feature_cols without names: {', '.join(both)}"
            )
        for one in self.getCallbacks():
            if not hasattr(one, "on_fit_start"):
                raise TypeError(f"a callback must be a Lightning callback: {one!r}")
        compression_hook_arguments(self.getGradientCompression())

    def _lightning_package(self) -> str | None:
        """Returns the package whose `LightningModule` the model is; `None` for a plain module."""
        imported = [package for package in _LIGHTNING_PACKAGES if package in sys.modules]
        return next(
            (
                one
                for one in imported
                if isinstance(self.getModel(), sys.modules[one].LightningModule)
            ),
            None,
        )

    def get_model_class(self) -> type[TorchModel]:
        """Returns the class of the fitted model."""
        return TorchModel

    def _create_framework_job(self, prepared: Prepared, backend: Backend) -> FrameworkTrainingJob:
        most = backend.max_processes()
        require_row_for_each_process(self, most)
        refuse_options_of_local_steps(self, backend.min_processes(), most)
        sampled = self._sample_columns(prepared, backend)
        fingerprint = self._fit_fingerprint(prepared, backend.num_processes(), {})
        is_plain, losses = self._lightning_package() is None, self._constructed_losses()
        tried = self._try_model(sampled)
        job, objects, form = self._create_job(prepared, fingerprint, sampled, tried, losses, most)
        module, sizes = objects.module, None
        if is_plain:
            found = model_outputs(job.call, job.inputs, module.model, sampled.rows)
            sizes = [output[0].numel() for output in found]
        if isinstance(objects.data_module, type | None):  # else its rows and batches are unknown
            changes = objects.transformation
            if is_plain:
                parts = 1 if job.loop.takes_local_steps else most
                try_unknown_losses(job, losses, module.model, changes, processes=parts)
            else:
                refuse_non_mean_training_step(job, module, changes, processes=most)

        def load_result(trained: TorchTrainingResult) -> torch.nn.Module:
            module.load_state_dict(state_bytes.unpack_state(trained.checkpoint)["model"])
            return module.model if is_plain else module

        return FrameworkTrainingJob(
            job=job,
            fingerprint=fingerprint,
            train=train_rank,
            inputs=job.inputs,
            output_sizes=sizes,
            load_result=load_result,
            create_example=lambda model: self._create_example(job, model, sampled.rows),
            create_model_kwargs=lambda model, history, run_id, metadata: self._get_model_kwargs(
                model, history, None, run_id, metadata
            ),
            messages=tried.messages,
            model_params=self._model_params(job.call, job.inputs, form),
        )

    def _try_model(self, sampled: SampledColumns) -> TriedModel:
        """Returns the types and the outputs of the model. The steps of a `LightningModule` need not
        call its `forward`, so what `forward` does not take stays as the user set it.
        """
        call, has_dtypes = self._model_call(sampled.inputs), self.getInputDtypes() is not None
        try:
            return try_model_call(
                call, sampled.inputs, self.getModel(), sampled.rows, has_dtypes=has_dtypes
            )
        except ValueError:
            if self._lightning_package() is None:
                raise
            return TriedModel(sampled.inputs, call)

    def _label_arguments(self) -> tuple[str, ...]:
        return () if self._lightning_package() is not None else super()._label_arguments()

    def _removed_columns(self) -> frozenset[str]:
        """Returns the columns that a `LightningModule` does not get: its batches have whatever the
        transformation returns.
        """
        if self._lightning_package() is None or self.getTransformationFn() is None:
            return frozenset()
        return frozenset(self.getTransformationRemovedFields() or ())

    def _create_example(
        self, job: LightningTrainingJob, module: torch.nn.Module, rows: dict[str, torch.Tensor]
    ) -> ModelExample | None:
        """Returns some rows for MLflow; `None` if MLflow is not used, or if `forward` does not take
        the columns.
        """
        if not self.getMlflow():
            return None
        try:
            outputs = model_outputs(job.call, job.inputs, module, rows)
        except ValueError:  # the steps of a LightningModule need not call it
            return None
        return driver_checks.model_example(job, rows, outputs)

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        model, parts = self.getModel(), super()._framework_fingerprint_parts()
        if self._lightning_package() is not None:
            parts += [
                FingerprintPart.from_value(
                    name, [function, dict(model.hparams)], f"{class_name(model)}.{name}"
                )
                for name in ("training_step", "configure_optimizers")
                if (function := getattr(type(model), name, None)) is not None
            ]
        return parts

    def _create_job(
        self,
        prepared: Prepared,
        fingerprint: Fingerprint,
        sampled: SampledColumns,
        tried: TriedModel,
        losses: list[Any],
        processes: int,
    ) -> tuple[LightningTrainingJob, LightningUserObjects, str | None]:
        """Returns the run's description, a copy of the user's objects, and the form of the output
        if the model's own loss shows it.
        """
        package, (names, shapes) = self._lightning_package(), self._present_labels()
        mapped = driver_checks.map_labels(names, sampled.columns, losses[: len(names)], shapes)
        labels = tuple(TorchLabel(*one) for one in mapped)
        objects = LightningUserObjects(
            module=self.getModel(),
            transformation=sampled.transformation,
            data_module=resolve_data_module_class(self.getDataModule()),
            callbacks=tuple(self.getCallbacks()),
            logger=self.getLogger(),
            profiler=self.getProfiler(),
            trainer_args=self.getTrainerArgs() or {},
            compression=self.getGradientCompression(),
        )
        installed = next(
            one for one in _LIGHTNING_PACKAGES if find_spec(one.partition(".")[0]) is not None
        )
        fields, own, form = self._job_fields(prepared, fingerprint), None, None
        # The transformation for a LightningModule may remove all labels.
        weights = self.getLossWeights() or [1.0 / max(1, len(names))] * len(names)
        if package is None and self._has_own_loss():
            trial, own = self._try_own_loss(
                tried, labels, self.getModel(), sampled, fields["data"], processes
            )
            labels, form, losses = trial.labels, trial.output_form, [own] * len(names)
            weights = [1.0, *[0.0] * (len(names) - 1)]
        if package is None:
            labels = driver_checks.mark_class_index_lists(
                tried.call, labels, losses, tried.inputs, self.getModel(), sampled.rows
            )
            objects.module = wrap_module(
                installed,
                model=self.getModel(),
                optimizer=self.getOptimizer(),
                scheduler=self.getLrScheduler(),
                interval=self.getLrSchedulerInterval(),
                losses=losses,
                loss_weights=weights,
                metrics=self._functions_by_metric(),
                inputs=tried.inputs,
                call=tried.call,
                labels=labels,
                weight=self.getSampleWeightCol(),
                class_weights=self._class_weights(prepared, fields["data"], labels[0], losses[0]),
                reduction=self.getLossReduction(),
            )
        weight = self.getSampleWeightCol()
        packed = state_bytes.pickle_job_objects(
            objects,
            module="model",
            compression="gradient_compression",
            transformation="transformation_fn",
        )
        job = LightningTrainingJob(
            **fields,
            objects=packed,
            inputs=tried.inputs,
            call=tried.call,
            labels=labels,
            own_loss=own,
            package=package or installed,
            batches=package is not None,
            more_columns=() if package is None else _more_columns(sampled, names, weight),
            log_every=self.getLogEveryNSteps(),
            gpus=self.getNumGpus(),
            allow_pickle=self.getAllowPickle(),
        )
        return job, state_bytes.unpickle_on_cpu(packed), form

    def _constructed_losses(self) -> list[Any]:
        """Returns the losses of a plain module; for a `LightningModule`, placeholders by which
        labels keep their type.
        """
        if self._lightning_package() is not None:
            return [_placeholder_loss] * len(self.getLabelCols())
        model, optimizer, losses = self.getModel(), self.getOptimizer(), self._label_losses()
        constructed = self.getLossConstructors() is not None
        objects = TorchUserObjects(model, optimizer, losses, constructed, [], None)
        return construct_losses(objects, model=model, optimizer=optimizer, rank=0, size=1)


def _more_columns(
    sampled: SampledColumns, labels: Sequence[str], weight: str | None
) -> tuple[str, ...]:
    """Returns the columns that the transformation makes besides inputs, labels and weights."""
    known = {*labels, weight, *(name for one in sampled.inputs for name in one.columns)}
    return tuple(name for name in sampled.columns if name not in known)


def _placeholder_loss(_output: Any, _label: Any) -> None:
    """Stands for the loss that a `LightningModule` computes by itself."""


TorchEstimator = LightningEstimator
"""Horovod's name of it."""
