# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator` of Lightning: a `LightningModule` fitted data-parallel on a DataFrame."""

# ruff: noqa: ARG002, PLC0415, N803 - keyword_only reads the arguments; cycle with persistence; Spark ML's names

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from pyspark import keyword_only
from pyspark.ml.util import MLReadable, MLWritable

from farandole.spark.common.columns import check_sizes
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.digests import class_name
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.fingerprint import Part
from farandole.spark.common.outputs import Output
from farandole.spark.common.reading import data_of, missing_of, transformation_of
from farandole.spark.common.signature import signature
from farandole.spark.lightning.job import LightningJob, LightningObjects
from farandole.spark.lightning.model import TorchModel
from farandole.spark.lightning.params import LightningParams
from farandole.spark.lightning.remote import compression_hook, train
from farandole.spark.lightning.wrapped import wrap
from farandole.spark.torch import mapping, payload
from farandole.spark.torch.job import Job, Label, Loop
from farandole.spark.torch.losses import constructed, form_of
from farandole.spark.torch.parts import parts_of
from farandole.spark.torch.tensors import inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.backend import Backend
    from farandole.spark.common.fingerprint import Fingerprint
    from farandole.spark.common.persistence import ParamsReader, ParamsWriter
    from farandole.spark.common.progress import Progress
    from farandole.spark.common.store import Store
    from farandole.spark.common.tracking import Example
    from farandole.spark.torch.job import Trained

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


MIN_PL_VERSION = "2.4.0"
"""The first version of Lightning that this works with."""


class TorchEstimatorParamsWritable(MLWritable):
    """Saves an estimator by Spark ML's `write()`."""

    def write(self) -> ParamsWriter:
        """The writer; `write().overwrite().save(path)` replaces what is there, see `places`."""
        from farandole.spark.torch.persistence import TorchParamsWriter

        return TorchParamsWriter(cast("Any", self))


class TorchEstimatorParamsReadable(MLReadable["LightningEstimator"]):
    """Loads an estimator by Spark ML's `read()`."""

    @classmethod
    def read(cls) -> ParamsReader[Any]:
        """The reader; loading runs the code that was pickled with the estimator."""
        from farandole.spark.torch.persistence import TorchParamsReader

        return TorchParamsReader(cls)


class LightningEstimator(
    LightningParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable
):
    """Fits a `LightningModule` on a DataFrame, on several processes at once.

    A batch is a dict of tensors by column: features as `farandole.spark.torch.TorchEstimator` makes them, labels and
    sample weights with one number per row. Columns listed together in `feature_cols` are under `"[a, b]"`. A plain
    module with `optimizer` and `loss` does as well.

    The module chooses its learning rate, which is not scaled. Values that the module logs become the history, as a
    mean over rows of all processes. A `run_id` whose checkpoint is in the store is resumed after its last complete
    epoch, optimizers and schedulers included, with the data, model and parameters that it was started with.

    Args:
        num_proc: Training processes; default: Spark's default parallelism.
        model: A `LightningModule`, or a plain module.
        backend: Where processes run, instead of `num_proc`: `SparkBackend`, `LocalBackend`.
        store: Where prepared data, checkpoints and logs live: a `Store`, or a path.
        optimizer: For a plain module: a torch optimizer over its parameters.
        loss: For a plain module: a loss of (output, label), or a list of one per label column.
        loss_constructors: Instead of `loss`, as in `farandole.spark.torch`.
        loss_weights: For a plain module: weight of each label's loss; default: equal weights.
        metrics: For a plain module: functions of (output, label).
        feature_cols: Columns for the model; a list in the list makes one tensor of several columns.
        label_cols: Columns to compare the outputs with; in `transform` they name the outputs.
        validation: Share of rows held out, or a column: true or positive rows are held out.
        validation_stratify: Column of classes: the share `validation` is held out of each, of every class with two
            rows at least one.
        validation_group: Column of groups: all rows of a group are on one side.
        validation_time: Column of times or numbers: the latest rows are held out.
        sample_weight_col: Column with each row's weight.
        batch_size: Rows per step and process; default 32.
        val_batch_size: The same for validation; default: `batch_size`.
        epochs: Number of passes over the rows; default 1.
        verbose: 0 silent, 1 progress, 2 also what workers print; default 1.
        callbacks: Lightning's. A `ModelCheckpoint` writes into the run's directory of the store, and the fitted model
            has the weights of its best checkpoint.
        random_seed: Seed of everything.
        shuffle: Whether each epoch has its own order; default True.
        partitions_per_process: Largest number of prepared files per process; default 10.
        fill: Replacement of nulls and NaN, for all columns or a dict by column; without it they are errors.
            `"mean"`, `"median"` and `"most_frequent"` are learned from the rows. A feature `<column>__missing` says
            where a column is missing.
        categories: Columns of strings, integers or booleans that become indices: 0 for a missing value, 1 for an unseen
            one, from 2 on the categories, sorted; in a label, classes from 0 on. A list of names; or a dict by name of
            a list of categories, a number of categories, or None for all. Categories that are not given are learned.
        ragged: What becomes of columns of lists of different lengths: a dict by name of `farandole.data.Pad`, which
            pads them, or `farandole.data.Nested`, which makes nested tensors of them.
        predictionCol: Column that `transform` adds for the class of a row, or its value, as Spark ML's models do.
        rawPredictionCol: Column for one number of each class, which is larger if the class is more likely.
        probabilityCol: Column for the probability of each class.
        predictedLabelCol: Column for the name of the class.
        labelIndexCol: Column for the index of the label's class, where labels are strings.
        thresholds: One number of each class; the class of the largest probability by threshold is predicted.
        class_names: Names of the classes, if the label has none.
        output_form: Form of the model's outputs: `"values"`, or for classes `"logits"`, `"probabilities"` or
            `"log_probabilities"`; default: the form that its loss takes, if it is known.
        allow_nan: Whether NaN and infinities are accepted like other values; default False.
        run_id: Name of the run; default `pytorch_<time>`.
        resume: `"force"` also continues a run that was started with something else; default `"auto"`.
        train_steps_per_epoch: Training steps per epoch.
        validation_steps_per_epoch: The same for validation.
        input_shapes: Shape of each input's tensor, -1 for its rows.
        input_dtypes: Type of each input's tensor; default: `"float32"`.
        label_shapes: Shape of each label's tensor, -1 for its rows.
        use_gpu: Train on GPUs if every process sees one; default True.
        num_gpus: GPUs per process: 0 keeps to CPUs.
        backward_passes_per_step: Batches whose gradients make one step; default 1.
        gradient_compression: Such as `farandole.torch.Compression.fp16`.
        train_minibatch_fn: Accepted for compatibility with Horovod; the module's `training_step` trains.
        transformation_fn: As in `farandole.spark.torch`.
        transformation_edit_fields: As in `farandole.spark.torch`.
        transformation_removed_fields: As in `farandole.spark.torch`.
        train_reader_num_workers: Reading threads per process; default 2.
        val_reader_num_workers: The same for validation.
        reader_pool_type: Accepted for compatibility with Horovod: readers are native threads.
        inmemory_cache_all: Whether each process keeps its rows in memory after the first epoch; default False.
        data_module: A `LightningDataModule`, or a class of them that is built with Horovod's arguments.
        loader_num_epochs: Accepted for compatibility with Horovod: an epoch is one pass.
        logger: Lightning's logger, or a list of them; files go to the run's logs in the store.
        log_every_n_steps: Steps between rows of a log; default 50.
        profiler: Lightning's profiler.
        terminate_on_nan: Whether a loss that is NaN or infinite ends the run; default True.
        trainer_args: Arguments of Lightning's `Trainer` that win over all others.
        debug_data_loader: Accepted for compatibility with Horovod.
        train_async_data_loader_queue_size: Accepted for compatibility with Horovod: batches are read ahead.
        val_async_data_loader_queue_size: The same for validation.
        mp_start_method: Start method of processes that a training process starts.
        precision: `"fp32"`, `"bf16"` or `"fp16"`; default `"fp32"`.
        gradient_clip_norm: Most norm of all gradients together.
        lr_scheduler: For a plain module: a scheduler over the optimizer, or a function that makes one.
        lr_scheduler_interval: `"epoch"` or `"step"`: the interval of its steps; default `"epoch"`.
        early_stopping: As in `farandole.spark.torch`.
        best_checkpoint: As in `farandole.spark.torch`.
        checkpoint_every: Interval in epochs at which a checkpoint is kept.
        compile: Whether `torch.compile` compiles the module; default False.
        deterministic: Whether equal seeds and sizes give equal bits; default False.
        max_steps: Steps after which the run ends.
        max_time: Seconds of training after which the run ends.
        statistics: Whether the fitted model carries statistics of the rows, for its `drift`. They take one more pass
            over the rows. Default False.
        mlflow: Whether parameters, metrics and the model are logged to MLflow; default False.
        wandb: Whether parameters and metrics are logged to Weights & Biases; default False.
        tensorboard: Whether parameters, steps and the model are logged for TensorBoard; default False. Scalars of
            epochs always are.
        on_failure: `"restart"` starts a failed run again from its checkpoint; default `"raise"`.
        max_restarts: Largest number of restarts of one fit; default 3.
    """

    @keyword_only
    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: Any = None,
        backend: Backend | None = None,
        store: Store | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]] | None = None,
        loss_constructors: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Any] | None = None,
        feature_cols: Sequence[str | Sequence[str]] | None = None,
        label_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        validation_stratify: str | None = None,
        validation_group: str | None = None,
        validation_time: str | None = None,
        sample_weight_col: str | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        callbacks: Sequence[Any] | None = None,
        random_seed: int | None = None,
        shuffle: bool | None = None,
        shuffle_buffer_size: int | None = None,
        partitions_per_process: int | None = None,
        fill: Any = None,
        categories: Sequence[str] | Mapping[str, Sequence[Any] | int | None] | None = None,
        ragged: Mapping[str, Any] | None = None,
        predictionCol: str | None = None,
        rawPredictionCol: str | None = None,
        probabilityCol: str | None = None,
        predictedLabelCol: str | None = None,
        labelIndexCol: str | None = None,
        thresholds: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        output_form: str | None = None,
        allow_nan: bool | None = None,
        run_id: str | None = None,
        resume: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        input_dtypes: Sequence[str] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        use_gpu: bool | None = None,
        num_gpus: int | None = None,
        backward_passes_per_step: int | None = None,
        gradient_compression: Any = None,
        train_minibatch_fn: Callable[..., Any] | None = None,
        transformation_fn: Callable[..., Any] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        inmemory_cache_all: bool | None = None,
        data_module: Any = None,
        loader_num_epochs: int | None = None,
        logger: Any = None,
        log_every_n_steps: int | None = None,
        profiler: Any = None,
        terminate_on_nan: bool | None = None,
        trainer_args: dict[str, Any] | None = None,
        debug_data_loader: bool | None = None,
        train_async_data_loader_queue_size: float | None = None,
        val_async_data_loader_queue_size: float | None = None,
        mp_start_method: str | None = None,
        precision: str | None = None,
        gradient_clip_norm: float | None = None,
        lr_scheduler: Any = None,
        lr_scheduler_interval: str | None = None,
        early_stopping: Any = None,
        best_checkpoint: Any = None,
        checkpoint_every: int | None = None,
        compile: bool | None = None,  # noqa: A002 - torch's word
        deterministic: bool | None = None,
        max_steps: int | None = None,
        max_time: float | None = None,
        statistics: bool | None = None,
        mlflow: bool | None = None,
        wandb: bool | None = None,
        tensorboard: bool | None = None,
        on_failure: str | None = None,
        max_restarts: int | None = None,
    ) -> None:
        super().__init__()
        # Only what was passed is set: a default in the signature must not win over a param map.
        self.setParams(**cast("dict[str, Any]", self._input_kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def _check(self) -> None:
        super()._check()
        if not isinstance(self.getModel(), torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(self.getModel()).__name__}")
        if self.getLoss() is not None and self.getLossConstructors() is not None:
            raise ValueError("at most one of parameters loss and loss_constructors may be specified")
        if self._package() is None:
            self._check_plain()
        else:
            for name in ("optimizer", "loss", "loss_constructors", "loss_weights", "lr_scheduler"):
                if self.getOrDefault(name) is not None:
                    raise ValueError(f"{name} is for plain modules: a LightningModule brings its own")
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
        """The package whose `LightningModule` the model is; `None` for a plain module."""
        imported = [package for package in _PACKAGES if package in sys.modules]
        return next((one for one in imported if isinstance(self.getModel(), sys.modules[one].LightningModule)), None)

    def get_model_class(self) -> type[TorchModel]:
        """The class of the fitted model."""
        return TorchModel

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> TorchModel:
        fingerprint = self._fingerprint(prepared)
        job, objects, sizes, tensors = self._job(prepared, fingerprint)
        base = job.base
        with self._held(base, fingerprint, shown), self._tracked(base.run_id, prepared) as tracker:
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
        input_dtypes = [one.dtype for one in base.inputs] if prepared.encoding else self.getInputDtypes()
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

    def _example(self, job: Job, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Example | None:
        """Some rows for MLflow; `None` where it is not asked for, or `forward` does not take the columns."""
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
        """The run's description, a copy of the user's objects, the sizes of outputs where known, and some rows."""
        transformation = transformation_of(self)
        raw = self._roles().kept
        columns, tensors = mapping.transformed_columns(prepared, raw, transformation, missing_of(self, prepared))
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
                metrics=[list(one) if isinstance(one, list | tuple) else [one] for one in self.getMetrics() or []],
                inputs=made,
                labels=labels,
                weight=self.getSampleWeightCol(),
            )
        packed = payload.pack_objects(
            objects, module="model", compression="gradient_compression", transformation="transformation_fn"
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
            package=package or next(one for one in _PACKAGES if find_spec(one.partition(".")[0]) is not None),
            batches=package is not None,
            log_every=self.getLogEveryNSteps(),
            gpus=self.getNumGpus(),
        )
        sizes = None
        if package is None:
            outputs = mapping.outputs_of_model(made, labels, mine.module, tensors)
            sizes = [output[1:].numel() for output in outputs]
        return job, mine, sizes, tensors

    def _losses(self, count: int) -> list[Any]:
        """The losses of a plain module; for a `LightningModule` what says that labels keep their kind."""
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
        return constructed(objects, model=self.getModel(), optimizer=self.getOptimizer(), rank=0, size=1)


def _own_loss(_output: Any, _label: Any) -> None:
    """Stands for the loss that a `LightningModule` computes by itself."""


TorchEstimator = LightningEstimator
"""Horovod's name of it."""


def __getattr__(name: str) -> object:
    """Horovod's names of what saves estimators."""
    from farandole.spark.torch import persistence

    names = {
        "TorchEstimatorParamsReader": persistence.TorchParamsReader,
        "TorchEstimatorParamsWriter": persistence.TorchParamsWriter,
    }
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return names[name]
