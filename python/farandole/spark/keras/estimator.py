# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`KerasEstimator`: a Keras model fitted data-parallel on a DataFrame."""

# ruff: noqa: ARG002, N803 - keyword_only reads the arguments; Spark ML's names

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import keras
from pyspark import keyword_only
from pyspark.ml.util import MLReadable, MLWritable

from farandole._keras.values import as_array
from farandole.spark.common.columns import Column, check_sizes
from farandole.spark.common.datamodule import check_data_module
from farandole.spark.common.estimator import FarandoleEstimator
from farandole.spark.common.outputs import Output
from farandole.spark.common.reading import data_of, missing_of, transformation_of
from farandole.spark.common.signature import signature
from farandole.spark.common.source import sample
from farandole.spark.common.tracking import Example
from farandole.spark.keras import compiled, payload
from farandole.spark.keras.arrays import check_padded, flat_outputs, inputs_of, model_inputs, told_mapping
from farandole.spark.keras.job import Job, Objects, Shape
from farandole.spark.keras.model import KerasModel
from farandole.spark.keras.objects import dumps, travelling
from farandole.spark.keras.params import KerasParams
from farandole.spark.keras.parts import parts_of
from farandole.spark.keras.persistence import KerasEstimatorParamsReader, KerasEstimatorParamsWriter
from farandole.spark.keras.remote import train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.backend import Backend
    from farandole.spark.common.fingerprint import Fingerprint, Part
    from farandole.spark.common.progress import Progress
    from farandole.spark.common.store import Store
    from farandole.spark.keras.compiled import Compiled
    from farandole.spark.keras.job import Trained

_QUIET_TENSORFLOW = "2"
_EXAMPLES = 2
"""Rows of an example."""


class KerasEstimatorParamsWritable(MLWritable):
    """Saves an estimator by Spark ML's `write()`."""

    def write(self) -> KerasEstimatorParamsWriter:
        """The writer; `write().overwrite().save(path)` replaces what is there, see `places`."""
        return KerasEstimatorParamsWriter(cast("Any", self))


class KerasEstimatorParamsReadable(MLReadable["KerasEstimator"]):
    """Loads an estimator by Spark ML's `read()`."""

    @classmethod
    def read(cls) -> KerasEstimatorParamsReader:
        """The reader; loading runs the code that was pickled with the estimator."""
        return KerasEstimatorParamsReader(cast("Any", cls))


class KerasEstimator(KerasParams, FarandoleEstimator, KerasEstimatorParamsReadable, KerasEstimatorParamsWritable):
    """Fits a Keras model on a DataFrame, on several processes at once, by Keras's own `fit`.

    The training processes use the Keras backend of the driver: TensorFlow, torch or JAX (`KERAS_BACKEND`, here or
    in `backend_env`). The model travels as a `.keras` file; classes and functions of yours that it is made of travel
    along. What is not given here, optimizer, loss, metrics, is taken from how the model was compiled.

    Columns become arrays as follows. Every feature column is one input of the model, in the shape and type that the
    model states; an input it does not state is `(rows, n)` for vectors and arrays of length n, `(rows, 1)` for numbers,
    float32, or int64 for integers. Columns listed together, `feature_cols=[["a", "b"], "image"]`, are one input, side
    by side. A label has the shape of its output where it has as many elements, else that of its column. The model is
    tried on the driver and the mapping is printed.

    Training: gradients are averaged over processes. The learning rate, or a schedule, is multiplied by their
    number, in new and in resumed runs. A rate that a callback sets is used unchanged. Each row of a
    step has the same weight. Every process takes the same number of steps, and each row is seen once per epoch. Metrics
    are those of all rows, whichever process held them, and so are the logs that callbacks see. The moving statistics of
    batch normalisation are averaged at the end of every epoch. With `random_seed`, the split, the order, and
    Keras on each rank are seeded; dropout differs between ranks.

    If the checkpoint of a `run_id` is in the store, the run continues after its last complete epoch, up to
    `epochs` in total. It continues with the data, model, loss, optimizer and parameters that it was started
    with. Otherwise `fit` raises an error that lists the differences. Each fit of a tuner or with a map of parameters
    has its own run.

    Args:
        num_proc: Training processes; default: Spark's default parallelism.
        model: A `keras.Model`, compiled or not.
        backend: Where processes run, instead of `num_proc`: `SparkBackend`, `LocalBackend`.
        store: Where prepared data, checkpoints and logs live: a `Store`, or a path.
        custom_objects: Classes and functions by name, where Keras asks for them; those that the model is seen to be
            made of need not be listed.
        optimizer: A Keras optimizer or its name; default: that of the compiled model, with its state.
        loss: A Keras loss, or a list or dict with one per output; default: that of the compiled model.
        loss_weights: Weight of each output's loss.
        sample_weight_col: Column with each row's weight in the loss and in the model's `weighted_metrics`.
        metrics: As `compile` takes them; default: the compiled model's.
        feature_cols: Columns for the model; a list in the list makes one input of several columns.
        label_cols: Columns to compare the outputs with.
        validation: Share of rows held out, or a column: true or positive rows are held out.
        validation_stratify: Column of classes: the share `validation` is held out of each, of every class with two
            rows at least one.
        validation_group: Column of groups: all rows of a group are on one side.
        validation_time: Column of times or numbers: the latest rows are held out.
        gradient_compression: Such as `farandole.keras.Compression.fp16`.
        batch_size: Rows per step and process; default 32.
        val_batch_size: The same for validation; default: `batch_size`.
        epochs: Number of passes over the rows; default 1.
        verbose: 0 silent, 1 progress, 2 also what workers print; default 1.
        callbacks: Keras's; they run on every rank and see the scores of all rows. A `TensorBoard` runs on rank 0 and
            writes into the store.
        random_seed: Seed of everything.
        shuffle: Whether each epoch has its own order; default True.
        partitions_per_process: Largest number of prepared files per process; default 10.
        run_id: Name of the run; default `keras_<time>`.
        resume: `"force"` also continues a run that was started with something else; default `"auto"`.
        train_steps_per_epoch: Training steps per epoch, fewer or more than one pass over the rows takes.
        validation_steps_per_epoch: Fewer validation steps per epoch.
        transformation_fn: Changes the values of each row, a dict by column, in the training processes; if marked by
            `farandole.spark.common.transform.batched`, of whole batches.
        transformation_edit_fields: Columns it changes: (name, NumPy type, shape, whether nulls are allowed).
        transformation_removed_fields: Columns it removes.
        train_reader_num_workers: Reading threads per process; default 2.
        val_reader_num_workers: The same for validation.
        reader_pool_type: Accepted for compatibility with Horovod: readers are native threads.
        label_shapes: Shape of each label's array, -1 for its rows.
        checkpoint_callback: A `ModelCheckpoint` such as `farandole.keras.callbacks.BestModelCheckpoint`: `fit` returns
            the model that it kept, instead of the last one.
        inmemory_cache_all: Whether each process keeps its rows in memory after the first epoch; default False.
        backend_env: Variables to set in the training processes.
        use_gpu: Train on GPUs if every process sees one; default True.
        mp_start_method: Start method of processes that a training process starts.
        backward_passes_per_step: Batches whose gradients, averaged, make one step; default 1.
        tensorflow_dataset_prefetch_buffer_size: On TensorFlow, batches prepared ahead; 0, the default, leaves it to
            Keras.
        data_module: A class that returns batches instead of the native reader, created with the arguments of Horovod's
            `DataModule`; its `train_data()` and `val_data()` return what `fit` takes.
        shuffle_buffer_size: Ignored.
        compress_sparse_cols: Whether prepared vectors, which are dense, are compressed; default False.
        fill: Replacement of nulls and NaN, for all columns or a dict by column; without it they are errors.
            `"mean"`, `"median"` and `"most_frequent"` are learned from the rows. A feature `<column>__missing` says
            where a column is missing.
        categories: Columns of strings, integers or booleans that become indices: 0 for a missing value, 1 for an unseen
            one, from 2 on the categories, sorted; in a label, classes from 0 on. A list of names; or a dict by name of
            a list of categories, a number of categories, or None for all. Categories that are not given are learned.
        ragged: How columns of lists of different lengths are padded: a dict by name of `farandole.data.Pad`.
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
        model: keras.Model | None = None,
        backend: Backend | None = None,
        store: Store | str | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        optimizer: keras.optimizers.Optimizer | str | None = None,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        metrics: Any = None,
        feature_cols: Sequence[str | Sequence[str]] | None = None,
        label_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        validation_stratify: str | None = None,
        validation_group: str | None = None,
        validation_time: str | None = None,
        gradient_compression: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool | None = None,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        resume: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Callable[..., Any] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        checkpoint_callback: keras.callbacks.ModelCheckpoint | None = None,
        inmemory_cache_all: bool | None = None,
        backend_env: Mapping[str, str] | None = None,
        use_gpu: bool | None = None,
        mp_start_method: str | None = None,
        backward_passes_per_step: int | None = None,
        tensorflow_dataset_prefetch_buffer_size: int | None = None,
        data_module: type | None = None,
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
        given = cast("dict[str, Any]", self._input_kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.setParams(**{name: value for name, value in given.items() if value is not None})

    def _check(self) -> None:
        super()._check()
        model = self.getModel()
        if not isinstance(model, keras.Model):
            raise ValueError(f"model must be a keras.Model: {type(model).__name__}")
        known = compiled.compile_arguments(model)
        optimizer = self.getOptimizer()
        if optimizer is None and getattr(model, "optimizer", None) is None:
            raise ValueError("Optimizer parameter is required for the model to compile, or a compiled model")
        if optimizer is not None and not isinstance(optimizer, str | keras.optimizers.Optimizer):
            raise ValueError(f"optimizer must be a Keras optimizer or its name: {type(optimizer).__name__}")
        if self.getLoss() is None and known.get("loss") is None and not compiled.has_own_step(model):
            raise ValueError("Loss parameter is required for the model to compile, or a compiled model")
        loss = self.getLoss()
        if isinstance(loss, list) and len(loss) != len(self.getLabelCols()):
            raise ValueError(f"loss needs one loss, or one per label column {len(self.getLabelCols())}: {len(loss)}")
        check_padded(self.getRagged())
        for callback in self.getCallbacks():
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"a callback must be a keras.callbacks.Callback: {callback!r}")

    def _environment(self) -> dict[str, str]:
        quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", _QUIET_TENSORFLOW)
        return {"KERAS_BACKEND": keras.backend.backend(), "TF_CPP_MIN_LOG_LEVEL": quiet, **self.getBackendEnv()}

    def get_model_class(self) -> type[KerasModel]:
        """The class of the fitted model."""
        return KerasModel

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Shapes of the model's inputs and of its outputs, with -1 for what is not known."""
        model = self.getModel()
        inputs, outputs = (
            [[-1 if size is None else int(size) for size in one.shape] for one in side]
            for side in (model.inputs, model.outputs)
        )
        return inputs, outputs

    def _train(self, backend: Backend, prepared: Prepared, shown: Progress) -> KerasModel:
        job, copy, outputs, fingerprint = self._job(prepared)
        shown.message(told_mapping(job.shape, job.labels, outputs))
        with self._held(job, fingerprint, shown), self._tracked(job.run_id, prepared) as tracker:
            trained = cast("Trained", self._launch(backend, train, job, shown, tracker)[0])
            payload.load_state(copy.model, trained.model)
            tracker.model(copy.model, "keras", self._example(job, prepared, copy.model))
        return KerasModel(
            history=trained.history,
            model=copy.model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=copy.custom_objects,
            run_id=job.run_id,
            signature=signature(job.shape.inputs),
            **self._carried(prepared),
            paths=job.paths(),
            outputs=[
                Output(one.column.dtype, bool(one.column.shape), _size(output))
                for one, output in zip(job.labels, outputs, strict=True)
            ],
        )

    def _example(self, job: Job, prepared: Prepared, model: Any) -> Example | None:
        """Some rows for MLflow; `None` where it is not asked for, or for several inputs, which it cannot name."""
        if not self.getMlflow() or len(job.shape.inputs) != 1 or job.shape.input_keys is not None:
            return None
        missing, transformation = missing_of(self, prepared), transformation_of(self)
        rows = sample(prepared.train_url, self._roles().kept, _EXAMPLES, transformation, missing, prepared.ragged)
        given = model_inputs(job.shape, rows, _EXAMPLES)
        made = flat_outputs(
            model(keras.ops.convert_to_tensor(given), training=False), job.shape.output_keys, len(job.labels)
        )
        return Example(given, as_array(made[0]) if len(made) == 1 else None)

    def _form_of_loss(self) -> str | None:
        return compiled.form_of(self.getLoss() or compiled.compile_arguments(self.getModel()).get("loss"))

    def _own_parts(self) -> list[Part]:
        return parts_of(self.getModel(), self.getOptimizer(), self.getLoss())

    def _job(self, prepared: Prepared) -> tuple[Job, Compiled, list[tuple[int, ...]], Fingerprint]:
        """The run's description, a copy of the model that nobody else holds, its outputs' rows, and a fingerprint."""
        check_padded(prepared.ragged)
        groups, labels = self._inputs(), self.getLabelCols()
        raw = self._roles().kept
        transformation = transformation_of(self)
        columns = {name: prepared.columns[name] for name in raw}
        if transformation is not None:
            made = sample(prepared.train_url, raw, 2, transformation, missing_of(self, prepared), prepared.ragged)
            columns = {name: Column(name, str(one.dtype), tuple(one.shape[1:])) for name, one in made.items()}
            missing = [name for name in raw if name not in columns]
            if missing:
                raise ValueError(f"transformation_fn returns no columns with these names: {', '.join(missing)}")
        check_sizes(columns, labels, self.getLabelShapes(), "label")
        model = self.getModel()
        inputs, keys = inputs_of(model, groups, columns)
        shape = Shape(inputs, keys, None)
        compiled.build(model, shape)
        given = {"loss": self.getLoss(), "loss_weights": self.getLossWeights(), "metrics": self.getMetrics() or None}
        copy = compiled.compiled_copy(
            model,
            self.getOptimizer(),
            {name: value for name, value in given.items() if value is not None},
            self.getCustomObjects(),
            self.getBackwardPassesPerStep(),
        )
        weight = self.getSampleWeightCol()
        label_columns = [columns[name] for name in labels]
        shape, arrays, outputs = compiled.try_out(copy, shape, label_columns, self.getLabelShapes(), weight is not None)
        fingerprint = self._fingerprint(prepared)  # of a model that is built by now
        run_id = self._new_run("keras", fingerprint)
        objects = Objects(
            custom_objects=copy.custom_objects,
            loss=copy.loss,
            callbacks=travelling(self.getCallbacks()),
            checkpoint_callback=next(iter(travelling([one for one in [self.getCheckpointCallback()] if one])), None),
            compression=self.getGradientCompression(),
            transformation=transformation,
            data_module=check_data_module(self.getDataModule()),
        )
        job = Job(
            model=copy.packed,
            objects=dumps(objects),
            store=self._store().to_remote(run_id, prepared.index),
            run_id=run_id,
            data=data_of(self, prepared, raw),
            shape=shape,
            labels=arrays,
            weight=weight,
            epochs=self.getEpochs(),
            random_seed=self.getRandomSeed(),
            use_gpu=self.getUseGpu(),
            mp_start_method=self.getMpStartMethod(),
            floatx=keras.config.floatx(),
            policy=keras.config.dtype_policy().name,
            verbose=self.getVerbose(),
            terminate_on_nan=self.getTerminateOnNan(),
            prefetch=self.getTensorflowDatasetPrefetchBufferSize(),
        )
        return job, copy, outputs, fingerprint


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
