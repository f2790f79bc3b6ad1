# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator` of Lightning: a `LightningModule` fitted data-parallel on a DataFrame."""

# ruff: noqa: PLC0415 - cycle with persistence

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from pyspark.ml.util import MLReadable, MLWritable

from farandole.data.columns import check_sizes
from farandole.spark.common.data.reading import data_of, missing_of, transformation_of
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.model.outputs import Output
from farandole.spark.common.model.signature import signature
from farandole.spark.common.runs.digests import class_name
from farandole.spark.common.runs.fingerprint import Part
from farandole.spark.common.runs.trackers import trackers_of
from farandole.spark.lightning.job import LightningJob, LightningObjects
from farandole.spark.lightning.model import TorchModel
from farandole.spark.lightning.params import LightningParams
from farandole.spark.lightning.remote import compression_hook, train
from farandole.spark.lightning.wrapped import wrap
from farandole.spark.torch import mapping
from farandole.spark.torch.columns.losses import constructed, form_of
from farandole.spark.torch.columns.tensors import inputs_of
from farandole.spark.torch.job import Job, Label, Loop
from farandole.spark.torch.parts import parts_of
from farandole.spark.torch.saving import payload

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.runner.backend import Backend
    from farandole.spark.common.runs.fingerprint import Fingerprint
    from farandole.spark.common.runs.tracking import Example
    from farandole.spark.common.saving.persistence import ParamsReader, ParamsWriter
    from farandole.spark.common.show.progress import Progress
    from farandole.spark.torch.job import Trained

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


MIN_PL_VERSION = "2.4.0"
"""The first version of Lightning that this works with."""


class TorchEstimatorParamsWritable(MLWritable):
    """Saves an estimator by Spark ML's `write()`."""

    def write(self) -> ParamsWriter:
        """Returns the writer; `write().overwrite().save(path)` replaces the old directory, see
        `places`.
        """
        from farandole.spark.torch.saving.persistence import TorchParamsWriter

        return TorchParamsWriter(cast("Any", self))


class TorchEstimatorParamsReadable(MLReadable["LightningEstimator"]):
    """Loads an estimator by Spark ML's `read()`."""

    @classmethod
    def read(cls) -> ParamsReader[Any]:
        """Returns the reader; loading runs the code that was pickled with the estimator."""
        from farandole.spark.torch.saving.persistence import TorchParamsReader

        return TorchParamsReader(cls)


class LightningEstimator(
    LightningParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable
):
    """Fits a `LightningModule` on a DataFrame, on several processes at once.

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

    def _check(self) -> None:
        super()._check()
        if not isinstance(self.getModel(), torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(self.getModel()).__name__}")
        if self.getLoss() is not None and self.getLossConstructors() is not None:
            raise ValueError(
                "at most one of parameters loss and loss_constructors may be specified"
            )
        if self._package() is None:
            self._check_plain()
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
        compression_hook(self.getGradientCompression())

    def _check_plain(self) -> None:
        optimizer = self.getOptimizer()
        if optimizer is None:
            raise ValueError("optimizer is required for a plain module")
        mapping.check_optimizer(self.getModel(), optimizer)
        mapping.check_scheduler(self.getLrScheduler(), optimizer)
        if self.getLoss() is None and self.getLossConstructors() is None:
            raise ValueError("loss is required for a plain module")

    def _package(self) -> str | None:
        """Returns the package whose `LightningModule` the model is; `None` for a plain module."""
        imported = [package for package in _PACKAGES if package in sys.modules]
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

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> TorchModel:
        fingerprint = self._fingerprint(prepared)
        job, objects, sizes, tensors = self._job(prepared, fingerprint)
        base = job.base
        with (
            self._held(base, fingerprint, shown),
            trackers_of(self, base, prepared, fingerprint) as tracker,
        ):
            trained = cast("Trained", self._launch(backend, train, job, shown, tracker)[0])
            objects.module.load_state_dict(payload.unpack_state(trained.checkpoint)["model"])
            module = objects.module.model if self._package() is None else objects.module
            tracker.model(module, "pytorch", self._example(base, module, tensors))
        outputs = None
        if sizes is not None:
            outputs = [
                Output(one.column.dtype, bool(one.column.shape), size)
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
            signature=signature(base.inputs),
            **self._carried(prepared),
            paths=base.paths(),
            outputs=outputs,
        )

    def _example(
        self, job: Job, module: torch.nn.Module, tensors: dict[str, torch.Tensor]
    ) -> Example | None:
        """Some rows for MLflow; `None` where it is not asked for, or `forward` does not take the
        columns.
        """
        if not self.getMlflow():
            return None
        try:
            outputs = mapping.outputs_of_model(job.inputs, job.labels, module, tensors)
        except ValueError:  # the steps of a LightningModule need not call it
            return None
        return mapping.example(job, tensors, outputs)

    def _form_of_loss(self) -> str | None:
        loss = self.getLoss()
        return form_of(loss[0] if isinstance(loss, list | tuple) and loss else loss)

    def _own_parts(self) -> list[Part]:
        model = self.getModel()
        parts = parts_of(model, self.getOptimizer())
        if self._package() is not None:
            parts += [
                Part.of(name, [function, dict(model.hparams)], f"{class_name(model)}.{name}")
                for name in ("training_step", "configure_optimizers")
                if (function := getattr(type(model), name, None)) is not None
            ]
        return parts

    def _job(
        self, prepared: Prepared, fingerprint: Fingerprint
    ) -> tuple[LightningJob, LightningObjects, list[int] | None, dict[str, torch.Tensor]]:
        """Returns the run's description, a copy of the user's objects, known sizes of outputs,
        and some rows.
        """
        transformation = transformation_of(self)
        raw = self._roles().kept
        columns, tensors = mapping.transformed_columns(
            prepared, raw, transformation, missing_of(self, prepared)
        )
        inputs, names = self._inputs(), self.getLabelCols()
        check_sizes(columns, inputs, self.getInputShapes(), "feature")
        check_sizes(columns, [[name] for name in names], self.getLabelShapes(), "label")
        mapping.check_statistics(prepared, self.getSampleWeightCol())
        package = self._package()
        losses = self._losses(len(names))
        shapes = self.getLabelShapes()
        labels = tuple(Label(*one) for one in mapping.labels_of(names, columns, losses, shapes))
        made = inputs_of(inputs, columns, self.getInputShapes(), self.getInputDtypes(), prepared)
        objects = LightningObjects(
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
            objects.module = wrap(
                next(one for one in _PACKAGES if find_spec(one.partition(".")[0]) is not None),
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
            )
        packed = payload.pack_objects(
            objects,
            module="model",
            compression="gradient_compression",
            transformation="transformation_fn",
        )
        run_id = self._new_run("pytorch", fingerprint)
        base = Job(
            objects=packed,
            store=self._store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=data_of(self, prepared, raw, unseeded=0 if self.getDeterministic() else None),
            loop=Loop.of(self),
            inputs=made,
            labels=labels,
            weight=self.getSampleWeightCol(),
            loss_weights=(),
        )
        mine: LightningObjects = payload.unpack(packed)
        job = LightningJob(
            base=base,
            package=package
            or next(one for one in _PACKAGES if find_spec(one.partition(".")[0]) is not None),
            batches=package is not None,
            log_every=self.getLogEveryNSteps(),
            gpus=self.getNumGpus(),
            allow_pickle=self.getAllowPickle(),
        )
        sizes = None
        if package is None:
            outputs = mapping.outputs_of_model(made, labels, mine.module, tensors)
            sizes = [output[1:].numel() for output in outputs]
        return job, mine, sizes, tensors

    def _losses(self, count: int) -> list[Any]:
        """Returns the losses of a plain module; for a `LightningModule` what says that labels
        keep their kind.
        """
        given = self.getLoss() or self.getLossConstructors()
        if given is None:
            return [_own_loss] * count
        losses = list(given) if isinstance(given, list | tuple) else [given] * count
        if len(losses) != count:
            raise ValueError(f"loss needs one loss, or one per label column {count}: {len(losses)}")
        if self.getLoss() is not None:
            return losses
        from farandole.spark.torch.job import Objects

        objects = Objects(self.getModel(), self.getOptimizer(), losses, True, [], None)
        return constructed(
            objects, model=self.getModel(), optimizer=self.getOptimizer(), rank=0, size=1
        )


def _own_loss(_output: Any, _label: Any) -> None:
    """Stands for the loss that a `LightningModule` computes by itself."""


TorchEstimator = LightningEstimator
"""Horovod's name of it."""


def __getattr__(name: str) -> object:
    """Horovod's names of what saves estimators."""
    from farandole.spark.torch.saving import persistence

    names = {
        "TorchEstimatorParamsReader": persistence.TorchParamsReader,
        "TorchEstimatorParamsWriter": persistence.TorchParamsWriter,
    }
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return names[name]
