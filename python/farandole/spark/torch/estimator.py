# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TorchEstimator`: a PyTorch model fitted data-parallel on a DataFrame."""

# ruff: noqa: ARG002, PLC0415, N803 - keyword_only reads the arguments; cycle with persistence; Spark ML's names

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from pyspark import keyword_only
from pyspark.ml.util import MLReadable, MLWritable

from farandole.spark.common.columns import check_sizes
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.fingerprint import Part
from farandole.spark.common.outputs import Output
from farandole.spark.common.reading import data_of, missing_of, transformation_of
from farandole.spark.common.signature import signature
from farandole.spark.torch import callbacks, mapping, payload
from farandole.spark.torch.job import Job, Label, Loop, Objects, Trained
from farandole.spark.torch.losses import constructed, form_of, weighted
from farandole.spark.torch.model import TorchModel
from farandole.spark.torch.params import TorchParams
from farandole.spark.torch.parts import parts_of
from farandole.spark.torch.remote import train
from farandole.spark.torch.tensors import inputs_of, told_mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.backend import Backend
    from farandole.spark.common.fingerprint import Fingerprint
    from farandole.spark.common.persistence import ParamsReader, ParamsWriter
    from farandole.spark.common.progress import Progress
    from farandole.spark.common.store import Store


class TorchEstimatorParamsWritable(MLWritable):
    """Saves an estimator by Spark ML's `write()`."""

    def write(self) -> ParamsWriter:
        """The writer; `write().overwrite().save(path)` replaces what is there, see `places`."""
        from farandole.spark.torch.persistence import TorchParamsWriter

        return TorchParamsWriter(cast("Any", self))


class TorchEstimatorParamsReadable(MLReadable["TorchEstimator"]):
    """Loads an estimator by Spark ML's `read()`."""

    @classmethod
    def read(cls) -> ParamsReader[Any]:
        """The reader; loading runs the code that was pickled with the estimator."""
        from farandole.spark.torch.persistence import TorchParamsReader

        return TorchParamsReader(cls)


class TorchEstimator(TorchParams, FarandoleEstimator, TorchEstimatorParamsReadable, TorchEstimatorParamsWritable):
    """Fits a PyTorch model on a DataFrame, on several processes at once.

    Columns become tensors as follows. Every feature column is one float32 tensor and one argument of the model, `(rows,
    n)` for vectors and arrays of length n, `(rows, 1)` for numbers, unless `input_shapes` or `input_dtypes` say
    otherwise; columns listed together, `feature_cols=[["a", "b"], "image"]`, are one tensor, side by side. A label is
    int64 if its loss takes class indices (`CrossEntropyLoss`, `NLLLoss`, ...), or if the loss is your own and the
    column holds integers, else float32. The first rows are tried on the driver and the mapping is printed.

    Training: gradients are averaged over processes. The learning rate is multiplied by their number, in new
    and in resumed runs. Each row of a step has the same weight. Every process takes the same number of steps, and
    each row is seen once per epoch. With `random_seed`, the split, the order, and torch on each rank are seeded.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete epoch, up to
    `epochs` in total. It continues with the data, model, loss, optimizer and parameters that it was started
    with. Otherwise `fit` raises an error that lists the differences. Each fit of a tuner or with a map of parameters
    has its own run.

    Args:
        num_proc: Training processes; default: Spark's default parallelism.
        model: A `torch.nn.Module`.
        backend: Where processes run, instead of `num_proc`: `SparkBackend`, `LocalBackend`.
        store: Where prepared data, checkpoints and logs live: a `Store`, or a path.
        optimizer: A torch optimizer over the model's parameters.
        loss: A loss of (output, label), or a list of one per label column.
        loss_constructors: Instead of `loss`: a function that creates it, or a list of one per label column, called in
            every training process with those of `model`, `optimizer`, `rank` and `size` that it takes by name.
        loss_weights: Weight of each label's loss; default: equal weights.
        metrics: Functions of (output, label), averaged over rows, or metrics of torchmetrics; a list inside the list
            gives one per label.
        feature_cols: Columns for the model; a list in the list makes one tensor of several columns.
        label_cols: Columns to compare the outputs with.
        validation: Share of rows held out, or a column: true or positive rows are held out.
        validation_stratify: Column of classes: the share `validation` is held out of each, of every class with two
            rows at least one.
        validation_group: Column of groups: all rows of a group are on one side.
        validation_time: Column of times or numbers: the latest rows are held out.
        sample_weight_col: Column with each row's weight in the loss.
        batch_size: Rows per step and process; default 32.
        val_batch_size: The same for validation; default: `batch_size`.
        epochs: Number of passes over the rows; default 1.
        verbose: 0 silent, 1 progress, 2 also what workers print; default 1.
        callbacks: Called on every rank while the model trains: `farandole.spark.torch.callbacks.Callback`, or
            functions of a `TrainingState` for the end of epochs.
        random_seed: Seed of everything.
        shuffle: Whether each epoch has its own order; default True.
        partitions_per_process: Largest number of prepared files per process; default 10.
        run_id: Name of the run; default `pytorch_<time>`.
        resume: `"force"` also continues a run that was started with something else; default `"auto"`.
        train_steps_per_epoch: Training steps per epoch, fewer or more than one pass over the rows takes.
        validation_steps_per_epoch: The same for validation.
        input_shapes: Shape of each input's tensor, -1 for its rows.
        input_dtypes: Type of each input's tensor, such as `"int64"`; default: `"float32"`.
        label_shapes: Shape of each label's tensor, -1 for its rows.
        use_gpu: Train on GPUs if every process sees one; default True.
        backward_passes_per_step: Batches whose gradients make one step; default 1.
        gradient_compression: Such as `farandole.torch.Compression.fp16`.
        train_minibatch_fn: Trains on one batch, with Horovod's arguments: (model, optimizer, transform_outputs,
            loss_fn, inputs, labels, sample_weights, backward_passes_per_step, batch_idx); it may leave out the last
            ones. It returns (outputs, loss).
        transformation_fn: Changes the values of each row, a dict by column, in the training processes; if marked by
            `farandole.spark.common.transform.batched`, of whole batches.
        transformation_edit_fields: Columns it changes: (name, NumPy type, shape, whether nulls are allowed).
        transformation_removed_fields: Columns it removes.
        train_reader_num_workers: Reading threads per process; default 2.
        val_reader_num_workers: The same for validation.
        reader_pool_type: Accepted for compatibility with Horovod: readers are native threads.
        inmemory_cache_all: Whether each process keeps its rows in memory after the first epoch; default False.
        data_module: A class that returns batches instead of the native reader, created with the arguments of Horovod's
            `DataModule`.
        mp_start_method: Start method of processes that a training process starts.
        shuffle_buffer_size: Ignored.
        compress_sparse_cols: Whether prepared vectors, which are dense, are compressed; default False.
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
        continuous_cols: NVTabular's; not used.
        categorical_cols: NVTabular's; not used.
        precision: `"fp32"`, or `"bf16"` or `"fp16"` for autocast, the latter with a GradScaler; default `"fp32"`.
        gradient_clip_norm: Largest norm of all gradients together, after averaging.
        lr_scheduler: A scheduler over the optimizer, or a function that creates one from an optimizer. It sees the
            learning rates of one process.
        lr_scheduler_interval: `"epoch"` or `"step"`: the interval of its steps; default `"epoch"`.
        early_stopping: Epochs without an improvement after which the run ends, or a dict of `monitor`, `patience`,
            `min_delta` and `mode`.
        best_checkpoint: Metric of the history that selects the best epoch, whose model is kept and returned instead of
            the last.
        checkpoint_every: Interval in epochs at which a checkpoint is kept.
        compile: Whether `torch.compile` compiles the model; default False.
        deterministic: Whether equal seeds and sizes give equal bits; default False.
        max_steps: Steps of the optimizer after which the run ends.
        max_time: Seconds of training after which the run ends, within an epoch too.
        terminate_on_nan: Whether a loss that is NaN or infinite ends the run; default True.
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
        model: torch.nn.Module | None = None,
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
        run_id: str | None = None,
        resume: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        input_dtypes: Sequence[str] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        use_gpu: bool | None = None,
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
        data_module: type | None = None,
        mp_start_method: str | None = None,
        compress_sparse_cols: bool | None = None,
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
        continuous_cols: Sequence[str] | None = None,
        categorical_cols: Sequence[str] | None = None,
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
        terminate_on_nan: bool | None = None,
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
        model, optimizer = self.getModel(), self.getOptimizer()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model must be a torch.nn.Module: {type(model).__name__}")
        mapping.check_optimizer(model, optimizer)
        mapping.check_scheduler(self.getLrScheduler(), optimizer)
        losses = self._losses()
        if len(losses) != len(self.getLabelCols()):
            raise ValueError(f"loss needs one loss, or one per label column {len(self.getLabelCols())}: {len(losses)}")
        if self.getSampleWeightCol() is not None and self.getLossConstructors() is None:
            for loss in losses:
                weighted(loss)
        if self.getInputDtypes() is not None and len(self.getInputDtypes()) != len(self._inputs()):
            raise ValueError(f"input_dtypes needs one type per input {len(self._inputs())}: {self.getInputDtypes()}")
        callbacks.check(self.getCallbacks())
        if not callable(check_data_module(self.getDataModule()) or type):
            raise TypeError(f"data_module must be a class: {self.getDataModule()!r}")

    def _losses(self) -> list[Any]:
        """The losses, or their constructors, one per label."""
        loss, constructors = self.getLoss(), self.getLossConstructors()
        if loss is not None and constructors is not None:
            raise ValueError("at most one of parameters loss and loss_constructors may be specified")
        given = constructors if loss is None else loss
        if given is None:
            raise ValueError("loss is required")
        losses = list(given) if isinstance(given, list | tuple) else [given]
        losses = losses * len(self.getLabelCols()) if len(losses) == 1 else losses
        for one in losses:
            if not callable(one):
                raise TypeError(f"loss must be a function of (output, label): {one!r}")
        return losses

    def get_model_class(self) -> type[TorchModel]:
        """The class of the fitted model."""
        return TorchModel

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> TorchModel:
        fingerprint = self._fingerprint(prepared)
        job, objects, losses, tensors = self._job(prepared, fingerprint)
        outputs = mapping.try_out(job, objects, losses, tensors)
        shown.message(told_mapping(job.inputs, job.labels, outputs, losses))
        with self._held(job, fingerprint, shown), self._tracked(job.run_id, prepared) as tracker:
            trained = cast("Trained", self._launch(backend, train, job, shown, tracker)[0])
            state = payload.unpack_state(trained.checkpoint)
            objects.model.load_state_dict(state["model"])
            objects.optimizer.load_state_dict(state["optimizer"])
            tracker.model(objects.model, "pytorch", mapping.example(job, tensors, outputs))
        input_dtypes = [one.dtype for one in job.inputs] if prepared.encoding else self.getInputDtypes()
        return TorchModel(
            history=trained.history,
            model=objects.model,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            input_dtypes=input_dtypes,
            label_columns=self.getLabelCols(),
            optimizer=objects.optimizer,
            run_id=job.run_id,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            signature=signature(job.inputs),
            **self._carried(prepared),
            paths=job.paths(),
            outputs=[
                Output(one.column.dtype, bool(one.column.shape), output[1:].numel())
                for one, output in zip(job.labels, outputs, strict=True)
            ],
        )

    def _form_of_loss(self) -> str | None:
        loss = self.getLoss()
        return form_of(loss[0] if isinstance(loss, list | tuple) and loss else loss)

    def _own_parts(self) -> list[Part]:
        losses = self._losses()
        what = "loss" if self.getLoss() is not None else "loss_constructors"
        return [*parts_of(self.getModel(), self.getOptimizer()), Part.of(what, losses)]

    def _job(
        self, prepared: Prepared, fingerprint: Fingerprint
    ) -> tuple[Job, Objects, list[Any], dict[str, torch.Tensor]]:
        """The run's description, a copy of the user's objects that nobody else holds, its losses, and some rows."""
        transformation = transformation_of(self)
        raw = self._roles().kept
        columns, tensors = mapping.transformed_columns(prepared, raw, transformation, missing_of(self, prepared))
        inputs, labels = self._inputs(), self.getLabelCols()
        check_sizes(columns, inputs, self.getInputShapes(), "feature")
        check_sizes(columns, [[name] for name in labels], self.getLabelShapes(), "label")
        mapping.check_statistics(prepared, self.getSampleWeightCol())
        objects = Objects(
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=self._losses(),
            constructed=self.getLoss() is None,
            metrics=[list(one) if isinstance(one, list | tuple) else [one] for one in self.getMetrics() or []],
            compression=self.getGradientCompression(),
            scheduler=self.getLrScheduler(),
            train_minibatch=self.getTrainMinibatchFn(),
            transformation=transformation,
            callbacks=tuple(self.getCallbacks()),
            data_module=check_data_module(self.getDataModule()),
        )
        packed = payload.pack_objects(
            objects,
            losses="loss" if self.getLoss() is not None else "loss_constructors",
            compression="gradient_compression",
            scheduler="lr_scheduler",
            train_minibatch="train_minibatch_fn",
            transformation="transformation_fn",
        )
        mine = payload.unpack(packed)
        losses = constructed(mine, model=mine.model, optimizer=mine.optimizer, rank=0, size=1)
        run_id = self._new_run("pytorch", fingerprint)
        shapes = self.getLabelShapes()
        job = Job(
            objects=packed,
            store=self._store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=data_of(self, prepared, raw, unseeded=0 if self.getDeterministic() else None),
            loop=Loop.of(self),
            inputs=inputs_of(inputs, columns, self.getInputShapes(), self.getInputDtypes(), prepared),
            labels=tuple(Label(*one) for one in mapping.labels_of(labels, columns, losses, shapes)),
            weight=self.getSampleWeightCol(),
            loss_weights=tuple(self.getLossWeights() or [1.0 / len(labels)] * len(labels)),
        )
        return job, mine, losses, tensors


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
