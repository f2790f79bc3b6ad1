# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator` of Lightning: a `LightningModule` fitted data-parallel on a DataFrame."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch

from farandole.data.columns import check_shapes_fit
from farandole.runner.backend import max_processes
from farandole.spark.common.data.reading import (
    create_transformation,
    missing_value_policy,
    training_data_spec,
)
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.model.outputs import ModelOutput
from farandole.spark.common.model.signature import input_signature
from farandole.spark.common.runs.digests import class_name, value_digest
from farandole.spark.common.runs.fingerprint import FingerprintPart
from farandole.spark.common.runs.trackers import create_trackers
from farandole.spark.lightning.job import LightningTrainingJob, LightningUserObjects
from farandole.spark.lightning.model import TorchModel
from farandole.spark.lightning.module_wrapper import wrap_module
from farandole.spark.lightning.params import LightningParams
from farandole.spark.lightning.remote import compression_hook_arguments, train_rank
from farandole.spark.lightning.step_probe import check_training_step
from farandole.spark.torch import mapping
from farandole.spark.torch.columns.losses import construct_losses, loss_output_form
from farandole.spark.torch.columns.tensors import create_torch_inputs
from farandole.spark.torch.fingerprint_parts import model_parts
from farandole.spark.torch.job import (
    TorchLabel,
    TorchTrainingJob,
    TorchUserObjects,
    TrainingLoopOptions,
)
from farandole.spark.torch.loss_probe import check_loss_forms
from farandole.spark.torch.saving import payload
from farandole.spark.torch.saving.persistence import (
    TorchEstimatorParamsReadable,
    TorchEstimatorParamsReader,  # noqa: F401 - Horovod has it here
    TorchEstimatorParamsWritable,
    TorchEstimatorParamsWriter,  # noqa: F401 - as above
)

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.common.runs.tracking import ModelExample
    from farandole.spark.common.show.progress import ProgressDisplay
    from farandole.spark.torch.job import TorchTrainingResult

_LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


MIN_PL_VERSION = "2.4.0"
"""The first version of Lightning that this works with."""


class LightningEstimator(
    LightningParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable
):
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

    def _check_params(self) -> None:
        super()._check_params()
        if not isinstance(self.getModel(), torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(self.getModel()).__name__}")
        if self.getLoss() is not None and self.getLossConstructors() is not None:
            raise ValueError(
                "at most one of parameters loss and loss_constructors may be specified"
            )
        if self._lightning_package() is None:
            self._check_plain_module()
        else:
            for name in ("optimizer", "loss", "loss_constructors", "loss_weights", "lr_scheduler"):
                if self.getOrDefault(name) is not None:
                    raise ValueError(
                        f"{name} is for plain modules: a LightningModule brings its own"
                    )
            if self.getMetrics():
                raise ValueError("metrics are for plain modules: a LightningModule logs its own")
        for one in self.getCallbacks():
            if not hasattr(one, "on_fit_start"):
                raise TypeError(f"a callback must be a Lightning callback: {one!r}")
        compression_hook_arguments(self.getGradientCompression())

    def _check_plain_module(self) -> None:
        optimizer = self.getOptimizer()
        if optimizer is None:
            raise ValueError("optimizer is required for a plain module")
        mapping.check_optimizer(self.getModel(), optimizer)
        mapping.check_scheduler(self.getLrScheduler(), optimizer)
        if self.getLoss() is None and self.getLossConstructors() is None:
            raise ValueError("loss is required for a plain module")

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

    def _train_model(
        self, backend: Backend, prepared: Prepared, shown: ProgressDisplay
    ) -> TorchModel:
        mapping.check_embeddings(self.getModel(), max_processes(backend))
        processes = backend.num_processes()
        step = value_digest(self.getBatchSize() * self.getBackwardPassesPerStep() * processes)
        fingerprint = self._fit_fingerprint(prepared).with_totals(
            {"batch_size": step, "backward_passes_per_step": step}, processes
        )
        job, objects, sizes, tensors = self._create_job(prepared, fingerprint)
        base = job.base
        self._check_losses(
            base,
            objects,
            processes=max_processes(backend),
            names=self._column_roles().stored_columns,
        )
        with (
            self._hold_run(base, fingerprint, shown) as base,
            create_trackers(self, base, prepared, fingerprint) as tracker,
        ):
            job = replace(job, base=base)
            trained = cast(
                "TorchTrainingResult", self._launch_job(backend, train_rank, job, shown, tracker)[0]
            )
            objects.module.load_state_dict(payload.unpack_state(trained.checkpoint)["model"])
            module = objects.module.model if self._lightning_package() is None else objects.module
            tracker.log_model(module, "pytorch", self._model_example(base, module, tensors))
        outputs = None
        if sizes is not None:
            outputs = [
                ModelOutput(one.column.dtype, bool(one.column.shape), size)
                for one, size in zip(base.labels, sizes, strict=True)
            ]
        input_dtypes = (
            [one.dtype for one in base.inputs] if prepared.encoding else self.getInputDtypes()
        )
        return TorchModel(
            history=trained.history,
            model=module,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            input_dtypes=input_dtypes,
            label_columns=self.getLabelCols(),
            run_id=base.run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            signature=input_signature(base.inputs),
            **self._inherited_params(prepared),
            paths=base.file_paths(),
            outputs=outputs,
        )

    def _check_losses(
        self,
        job: TorchTrainingJob,
        objects: LightningUserObjects,
        *,
        processes: int,
        names: list[str],
    ) -> None:
        """Tries losses of an unknown form on parts of real rows."""
        if not isinstance(objects.data_module, type | None):
            return  # its rows and batches are unknown here
        if self._lightning_package() is not None:
            check_training_step(
                job, objects.module, objects.transformation, processes=processes, names=names
            )
            return
        losses = self._label_losses(len(job.labels))
        model = objects.module.model
        check_loss_forms(
            job, losses, model, objects.transformation, processes=processes, names=names
        )

    def _model_example(
        self, job: TorchTrainingJob, module: torch.nn.Module, tensors: dict[str, torch.Tensor]
    ) -> ModelExample | None:
        """Returns some rows for MLflow; `None` if MLflow is not used, or if `forward` does not take
        the columns.
        """
        if not self.getMlflow():
            return None
        try:
            outputs = mapping.model_outputs(job.inputs, job.labels, module, tensors)
        except ValueError:  # the steps of a LightningModule need not call it
            return None
        return mapping.model_example(job, tensors, outputs)

    def _loss_output_form(self) -> str | None:
        loss = self.getLoss()
        return loss_output_form(loss[0] if isinstance(loss, list | tuple) and loss else loss)

    def _framework_fingerprint_parts(self) -> list[FingerprintPart]:
        model = self.getModel()
        parts = model_parts(model, self.getOptimizer())
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
        self, prepared: Prepared, fingerprint: Fingerprint
    ) -> tuple[
        LightningTrainingJob, LightningUserObjects, list[int] | None, dict[str, torch.Tensor]
    ]:
        """Returns the run's description, a copy of the user's objects, known sizes of outputs,
        and some rows.
        """
        transformation = create_transformation(self)
        raw = self._column_roles().stored_columns
        columns, tensors = mapping.transformed_columns(
            prepared, raw, transformation, missing_value_policy(self, prepared)
        )
        inputs, names = self._input_columns(), self.getLabelCols()
        check_shapes_fit(columns, inputs, self.getInputShapes(), "feature")
        check_shapes_fit(columns, [[name] for name in names], self.getLabelShapes(), "label")
        mapping.check_weight_column(prepared, self.getSampleWeightCol())
        package = self._lightning_package()
        losses = self._label_losses(len(names))
        shapes = self.getLabelShapes()
        labels = tuple(
            TorchLabel(*one) for one in mapping.map_labels(names, columns, losses, shapes)
        )
        made = create_torch_inputs(
            inputs, columns, self.getInputShapes(), self.getInputDtypes(), prepared
        )
        if package is None:
            labels = mapping.find_index_lists(labels, losses, made, self.getModel(), tensors)
        objects = LightningUserObjects(
            module=self.getModel(),
            transformation=transformation,
            data_module=check_data_module(self.getDataModule()),
            callbacks=tuple(self.getCallbacks()),
            logger=self.getLogger(),
            profiler=self.getProfiler(),
            trainer_args=self.getTrainerArgs() or {},
            compression=self.getGradientCompression(),
        )
        if package is None:
            objects.module = wrap_module(
                next(
                    one
                    for one in _LIGHTNING_PACKAGES
                    if find_spec(one.partition(".")[0]) is not None
                ),
                model=self.getModel(),
                optimizer=self.getOptimizer(),
                scheduler=self.getLrScheduler(),
                interval=self.getLrSchedulerInterval(),
                losses=losses,
                loss_weights=self.getLossWeights() or [1.0 / len(names)] * len(names),
                metrics=[
                    list(one) if isinstance(one, list | tuple) else [one]
                    for one in self.getMetrics() or []
                ],
                inputs=made,
                labels=labels,
                weight=self.getSampleWeightCol(),
                reduction=self.getLossReduction(),
            )
        packed = payload.pack_objects(
            objects,
            module="model",
            compression="gradient_compression",
            transformation="transformation_fn",
        )
        run_id = self._new_run_id("pytorch", fingerprint)
        base = TorchTrainingJob(
            objects=packed,
            store=self._filesystem_store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=training_data_spec(
                self, prepared, raw, unseeded=0 if self.getDeterministic() else None
            ),
            loop=TrainingLoopOptions.from_estimator(self),
            inputs=made,
            labels=labels,
            weight=self.getSampleWeightCol(),
            loss_weights=(),
            loss_reduction=self.getLossReduction(),
        )
        mine: LightningUserObjects = payload.unpack_pickle(packed)
        job = LightningTrainingJob(
            base=base,
            package=package
            or next(
                one for one in _LIGHTNING_PACKAGES if find_spec(one.partition(".")[0]) is not None
            ),
            batches=package is not None,
            log_every=self.getLogEveryNSteps(),
            gpus=self.getNumGpus(),
            allow_pickle=self.getAllowPickle(),
        )
        sizes = None
        if package is None:
            outputs = mapping.model_outputs(made, labels, mine.module, tensors)
            sizes = [output[1:].numel() for output in outputs]
        return job, mine, sizes, tensors

    def _label_losses(self, count: int) -> list[Any]:
        """Returns the losses of a plain module; for a `LightningModule`, placeholders by which
        labels keep their type.
        """
        given = self.getLoss() or self.getLossConstructors()
        if given is None:
            return [_placeholder_loss] * count
        losses = list(given) if isinstance(given, list | tuple) else [given] * count
        if len(losses) != count:
            raise ValueError(f"loss needs one loss, or one per label column {count}: {len(losses)}")
        if self.getLoss() is not None:
            return losses
        objects = TorchUserObjects(self.getModel(), self.getOptimizer(), losses, True, [], None)
        return construct_losses(
            objects, model=self.getModel(), optimizer=self.getOptimizer(), rank=0, size=1
        )


def _placeholder_loss(_output: Any, _label: Any) -> None:
    """Stands for the loss that a `LightningModule` computes by itself."""


TorchEstimator = LightningEstimator
"""Horovod's name of it."""
