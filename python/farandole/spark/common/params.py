# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of estimators and models, as Spark ML `Param`s with one accessor pair each.

A value is checked when it is set, by the constructor, a setter, `setParams` or a param map of `fit`. A wrong value is a
`ValueError` or `TypeError` that names the parameter.
"""

# ruff: noqa: N802, N815, PLC0415, SLF001 - names are Spark ML's; pyarrow is loaded where statistics are

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pyspark.ml.param import Param, Params

from farandole.spark.common import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.data.statistics import Statistics

T = TypeVar("T")


def declare(name: str, doc: str, convert: Callable[[Any], T]) -> Param[T]:
    """A `Param` that no object owns yet.

    Args:
        name: its name, also the constructor's keyword.
        doc: what it means.
        convert: checks and normalises a value; called with the value alone.

    Returns:
        The parameter, to be assigned to a class attribute of that name.
    """
    return Param(Params._dummy(), name, doc, convert)


def accessors(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
    """The setter and the getter of one parameter; a setter returns its object, so that calls can be chained.

    Args:
        name: the parameter's name.

    Returns:
        Two functions, to be assigned to `set<Name>` and `get<Name>`.
    """

    def setter(self: Params, value: Any) -> Params:
        return self._set(**{name: value})

    def getter(self: Params) -> Any:
        return self.getOrDefault(name)

    setter.__doc__ = f"Sets `{name}` and returns the object itself."
    getter.__doc__ = f"The value of `{name}`, or its default."
    return setter, getter


class EstimatorParams(Params):
    """The parameters of every estimator."""

    num_proc = declare("num_proc", "training processes; not together with backend", check.at_least("num_proc", 1))
    model = declare("model", "the model to train", check.anything)
    backend = declare("backend", "where training processes run; not together with num_proc", check.backend)
    store = declare("store", "place of prepared data, checkpoints and logs", check.store)
    optimizer = declare("optimizer", "the optimizer, made over the model's parameters", check.anything)
    loss = declare("loss", "the loss, or a list of one per label column", check.anything)
    loss_weights = declare(
        "loss_weights", "weight of each label's loss; equal by default", check.numbers("loss_weights")
    )
    sample_weight_col = declare(
        "sample_weight_col", "column with the weight of each row in the loss", check.text("sample_weight_col")
    )
    metrics = declare("metrics", "functions of (output, label), averaged over rows", check.callables("metrics"))
    feature_cols = declare(
        "feature_cols", "columns given to the model, one tensor each; a list in the list makes one tensor of several",
        check.features,
    )  # fmt: skip
    label_cols = declare("label_cols", "columns to compare with the outputs", check.names("label_cols"))
    validation = declare(
        "validation",
        "share of rows to hold out, or a column that is true or positive in held-out rows",
        check.validation,
    )
    batch_size = declare("batch_size", "rows per step and process", check.at_least("batch_size", 1))
    val_batch_size = declare(
        "val_batch_size",
        "rows per validation step and process; batch_size by default",
        check.at_least("val_batch_size", 1),
    )
    epochs = declare("epochs", "number of passes over the training rows", check.at_least("epochs", 1))
    verbose = declare("verbose", "0 silent, 1 progress, 2 also the workers' output", check.at_least("verbose", 0))
    random_seed = declare("random_seed", "seed of split, order and framework", check.at_least("random_seed", 0))
    shuffle = declare("shuffle", "whether each epoch has its own order", check.flag("shuffle"))
    partitions_per_process = declare(
        "partitions_per_process",
        "largest number of prepared files per process",
        check.at_least("partitions_per_process", 1),
    )
    run_id = declare("run_id", "name of the run; an existing run's checkpoint is resumed", check.run_id)
    resume = declare(
        "resume", "auto: continue only with the same data, model and parameters; force: always",
        check.choice("resume", "auto", "force"),
    )  # fmt: skip
    train_steps_per_epoch = declare(
        "train_steps_per_epoch", "fewer training steps per epoch", check.at_least("train_steps_per_epoch", 1)
    )
    validation_steps_per_epoch = declare(
        "validation_steps_per_epoch",
        "fewer validation steps per epoch",
        check.at_least("validation_steps_per_epoch", 1),
    )
    label_shapes = declare("label_shapes", "shape of each label's tensor", check.shapes("label_shapes"))
    use_gpu = declare("use_gpu", "train on GPUs if every process has one", check.flag("use_gpu"))
    backward_passes_per_step = declare(
        "backward_passes_per_step",
        "batches whose gradients make one step",
        check.at_least("backward_passes_per_step", 1),
    )
    gradient_compression = declare(
        "gradient_compression", "compression of gradients between processes", check.compression
    )
    callbacks = declare("callbacks", "callbacks during the training", check.listed("callbacks"))
    continuous_cols = declare("continuous_cols", "NVTabular's; not used", check.text_list("continuous_cols"))
    categorical_cols = declare("categorical_cols", "NVTabular's; not used", check.text_list("categorical_cols"))
    compress_sparse_cols = declare(
        "compress_sparse_cols", "compress vectors, which are written dense", check.flag("compress_sparse_cols")
    )
    fill = declare("fill", "replacement of nulls and NaN, for all columns or by column", check.fill)
    validation_stratify = declare(
        "validation_stratify", "column of classes: the share is held out of each", check.optional("validation_stratify")
    )
    validation_group = declare(
        "validation_group", "column of groups, whose rows stay together", check.optional("validation_group")
    )
    validation_time = declare(
        "validation_time", "column of times: the latest rows are held out", check.optional("validation_time")
    )
    ragged = declare("ragged", "how lists of different lengths are padded, by column", check.ragged)
    categories = declare(
        "categories", "columns that become indices of categories, which are learned or given", check.categories
    )
    allow_nan = declare("allow_nan", "accept NaN and infinities like other values", check.flag("allow_nan"))
    shuffle_buffer_size = declare(
        "shuffle_buffer_size", "ignored",
        check.deprecated("shuffle_buffer_size", "the order of an epoch does not depend on a buffer"),
    )  # fmt: skip
    transformation_fn = declare(
        "transformation_fn", "changes the values of each row before the model gets it",
        check.function("transformation_fn"),
    )  # fmt: skip
    transformation_edit_fields = declare(
        "transformation_edit_fields", "columns that transformation_fn changes or adds", check.edit_fields
    )
    transformation_removed_fields = declare(
        "transformation_removed_fields", "columns that transformation_fn removes",
        check.text_list("transformation_removed_fields"),
    )  # fmt: skip
    train_reader_num_workers = declare(
        "train_reader_num_workers", "reading threads per process", check.at_least("train_reader_num_workers", 1)
    )
    val_reader_num_workers = declare(
        "val_reader_num_workers", "reading threads per process in validation",
        check.at_least("val_reader_num_workers", 1),
    )  # fmt: skip
    reader_pool_type = declare(
        "reader_pool_type", "not used: readers are native threads",
        check.choice("reader_pool_type", "thread", "process", "dummy"),
    )  # fmt: skip
    inmemory_cache_all = declare(
        "inmemory_cache_all", "whether each process keeps its rows in memory", check.flag("inmemory_cache_all")
    )
    mp_start_method = declare(
        "mp_start_method", "start method of processes that a training process starts",
        check.choice("mp_start_method", *multiprocessing.get_all_start_methods()),
    )  # fmt: skip
    tensorflow_dataset_prefetch_buffer_size = declare(
        "tensorflow_dataset_prefetch_buffer_size", "batches that tf.data prepares ahead; 0 leaves it to TensorFlow",
        check.at_least("tensorflow_dataset_prefetch_buffer_size", 0),
    )  # fmt: skip
    on_failure = declare(
        "on_failure", "reaction to a lost or failed worker: an error, or a restart from the checkpoint",
        check.choice("on_failure", "raise", "restart"),
    )  # fmt: skip
    max_restarts = declare("max_restarts", "largest number of restarts of one fit", check.at_least("max_restarts", 1))
    terminate_on_nan = declare(
        "terminate_on_nan", "whether a loss that is NaN or infinite ends the run", check.flag("terminate_on_nan")
    )
    statistics = declare("statistics", "whether the model carries statistics of the rows", check.flag("statistics"))
    mlflow = declare("mlflow", "whether the run is logged to MLflow", check.flag("mlflow"))
    wandb = declare("wandb", "whether the run is logged to Weights & Biases", check.flag("wandb"))
    tensorboard = declare(
        "tensorboard", "whether parameters, steps and the model are logged for TensorBoard", check.flag("tensorboard")
    )

    setNumProc, getNumProc = accessors("num_proc")
    setModel, getModel = accessors("model")
    setBackend, getBackend = accessors("backend")
    setStore, getStore = accessors("store")
    setOptimizer, getOptimizer = accessors("optimizer")
    setLoss, getLoss = accessors("loss")
    setLossWeights, getLossWeights = accessors("loss_weights")
    setSampleWeightCol, getSampleWeightCol = accessors("sample_weight_col")
    setMetrics, getMetrics = accessors("metrics")
    setFeatureCols, getFeatureCols = accessors("feature_cols")
    setLabelCols, getLabelCols = accessors("label_cols")
    setValidation, getValidation = accessors("validation")
    setBatchSize, getBatchSize = accessors("batch_size")
    setValBatchSize, getValBatchSize = accessors("val_batch_size")
    setEpochs, getEpochs = accessors("epochs")
    setVerbose, getVerbose = accessors("verbose")
    setRandomSeed, getRandomSeed = accessors("random_seed")
    setShuffle, getShuffle = accessors("shuffle")
    setPartitionsPerProcess, getPartitionsPerProcess = accessors("partitions_per_process")
    setRunId, getRunId = accessors("run_id")
    setResume, getResume = accessors("resume")
    setTrainStepsPerEpoch, getTrainStepsPerEpoch = accessors("train_steps_per_epoch")
    setValidationStepsPerEpoch, getValidationStepsPerEpoch = accessors("validation_steps_per_epoch")
    setLabelShapes, getLabelShapes = accessors("label_shapes")
    setUseGpu, getUseGpu = accessors("use_gpu")
    setBackwardPassesPerStep, getBackwardPassesPerStep = accessors("backward_passes_per_step")
    setGradientCompression, getGradientCompression = accessors("gradient_compression")
    setCallbacks, getCallbacks = accessors("callbacks")
    setContinuousCols, getContinuousCols = accessors("continuous_cols")
    setCategoricalCols, getCategoricalCols = accessors("categorical_cols")
    setCompressSparseCols, getCompressSparseCols = accessors("compress_sparse_cols")
    setFill, getFill = accessors("fill")
    setCategories, getCategories = accessors("categories")
    setRagged, getRagged = accessors("ragged")
    setValidationStratify, getValidationStratify = accessors("validation_stratify")
    setValidationGroup, getValidationGroup = accessors("validation_group")
    setValidationTime, getValidationTime = accessors("validation_time")
    setAllowNan, getAllowNan = accessors("allow_nan")
    setShuffleBufferSize, getShuffleBufferSize = accessors("shuffle_buffer_size")
    setShufflingBufferSize, getShufflingBufferSize = setShuffleBufferSize, getShuffleBufferSize  # Horovod's names
    setTransformationFn, getTransformationFn = accessors("transformation_fn")
    setTransformationEditFields, getTransformationEditFields = accessors("transformation_edit_fields")
    setTransformationRemovedFields, getTransformationRemovedFields = accessors("transformation_removed_fields")
    setTrainReaderNumWorkers, getTrainReaderNumWorkers = accessors("train_reader_num_workers")
    setTrainReaderNumWorker, getTrainReaderNumWorker = setTrainReaderNumWorkers, getTrainReaderNumWorkers
    setValReaderNumWorkers, getValReaderNumWorkers = accessors("val_reader_num_workers")
    setValReaderNumWorker, getValReaderNumWorker = setValReaderNumWorkers, getValReaderNumWorkers
    setReaderPoolType, getReaderPoolType = accessors("reader_pool_type")
    setInmemoryCacheAll, getInmemoryCacheAll = accessors("inmemory_cache_all")
    setInMemoryCacheAll, getInMemoryCacheAll = setInmemoryCacheAll, getInmemoryCacheAll
    setMpStartMethod, getMpStartMethod = accessors("mp_start_method")
    setTensorflowDatasetPrefetchBufferSize, getTensorflowDatasetPrefetchBufferSize = accessors(
        "tensorflow_dataset_prefetch_buffer_size"
    )
    setOnFailure, getOnFailure = accessors("on_failure")
    setMaxRestarts, getMaxRestarts = accessors("max_restarts")
    setTerminateOnNan, getTerminateOnNan = accessors("terminate_on_nan")
    setStatistics, getStatistics = accessors("statistics")
    setMlflow, getMlflow = accessors("mlflow")
    setWandb, getWandb = accessors("wandb")
    setTensorboard, getTensorboard = accessors("tensorboard")

    def __init__(self) -> None:
        """Gives every parameter its default."""
        super().__init__()
        self._setDefault(
            **dict.fromkeys(
                (
                    "num_proc", "model", "backend", "store", "optimizer", "loss", "loss_weights", "sample_weight_col",
                    "feature_cols", "label_cols", "validation", "val_batch_size", "random_seed", "run_id",
                    "train_steps_per_epoch", "validation_steps_per_epoch", "label_shapes", "gradient_compression",
                    "continuous_cols", "categorical_cols", "shuffle_buffer_size", "transformation_fn",
                    "transformation_edit_fields", "transformation_removed_fields", "mp_start_method",
                    "fill", "validation_stratify", "validation_group", "validation_time",
                )
            ),
            metrics=[],
            batch_size=32,
            epochs=1,
            verbose=1,
            shuffle=True,
            partitions_per_process=10,
            use_gpu=True,
            backward_passes_per_step=1,
            callbacks=[],
            compress_sparse_cols=False,
            categories={},
            ragged={},
            allow_nan=False,
            train_reader_num_workers=2,
            val_reader_num_workers=2,
            reader_pool_type="thread",
            inmemory_cache_all=False,
            tensorflow_dataset_prefetch_buffer_size=0,
            on_failure="raise",
            resume="auto",
            max_restarts=3,
            terminate_on_nan=True,
            statistics=False,
            mlflow=False,
            wandb=False,
            tensorboard=False,
        )  # fmt: skip

    def setParams(self, **params: Any) -> Self:
        """Sets several parameters by name and returns the object itself.

        Args:
            **params: values by parameter name.

        Returns:
            The object.

        Raises:
            TypeError: a name is no parameter.
        """
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            raise TypeError(f"no parameter of {type(self).__name__}: {', '.join(sorted(unknown))}")
        return self._set(**params)


class ModelParams(Params):
    """The parameters of every fitted model."""

    history = declare("history", "losses and metrics of each epoch", check.anything)
    model = declare("model", "the trained model", check.anything)
    feature_columns = declare("feature_columns", "columns given to the model", check.features)
    label_columns = declare(
        "label_columns", "columns that were compared with the outputs", check.names("label_columns")
    )
    output_cols = declare("output_cols", "columns that transform adds", check.names("output_cols"))
    run_id = declare("run_id", "name of the run that trained the model", check.text("run_id"))
    paths = declare("paths", "paths of the run: data, checkpoint and logs", check.anything)
    batch_size = declare(
        "batch_size", "largest number of rows that are predicted at once", check.at_least("batch_size", 1)
    )
    fill = declare("fill", "replacement of nulls and NaN", check.fill)
    verbose = declare("verbose", "0 shows no messages about predictions", check.at_least("verbose", 0))
    learned = declare("learned", "the values of fill that were learned, and their kind", check.anything)
    categories = declare("categories", "categories of the columns that have some", check.categories)
    ragged = declare("ragged", "how lists of different lengths are padded, by column", check.ragged)
    signature = declare("signature", "columns, shape and type of each of the model's inputs", check.anything)
    statistics = declare("statistics", "statistics of the rows that the model was trained with", check.statistics)

    setStatistics = accessors("statistics")[0]
    setSignature, getSignature = accessors("signature")
    setFill, getFill = accessors("fill")
    setCategories, getCategories = accessors("categories")
    setRagged, getRagged = accessors("ragged")
    setLearned, getLearned = accessors("learned")
    setVerbose, getVerbose = accessors("verbose")
    setHistory, getHistory = accessors("history")
    setModel, getModel = accessors("model")
    setFeatureColumns, getFeatureColumns = accessors("feature_columns")
    setLabelColumns, getLabelColumns = accessors("label_columns")
    setLabelColoumns = setLabelColumns  # Horovod's spelling
    setOutputCols = accessors("output_cols")[0]
    setRunId, getRunId = accessors("run_id")
    setPaths, getPaths = accessors("paths")
    setBatchSize, getBatchSize = accessors("batch_size")

    def setParams(self, **params: Any) -> Self:
        """Sets several parameters by name and returns the object itself.

        Args:
            **params: values by parameter name.
        """
        return self._set(**params)

    def __init__(self) -> None:
        """Gives every parameter its default."""
        super().__init__()
        self._setDefault(
            history=None, model=None, feature_columns=None, label_columns=None, output_cols=None, run_id=None,
            paths=None, fill=None, categories={}, ragged={}, learned={}, signature=None, statistics=None,
            verbose=1,
            batch_size=4096,
        )  # fmt: skip

    def getStatistics(self) -> Statistics | None:
        """The statistics of the rows that the model was trained with, if it carries them."""
        from farandole.data.statistics import Statistics

        known = self.getOrDefault("statistics")
        return None if known is None else Statistics.of_values(known)

    def getOutputCols(self) -> list[str]:
        """The columns `transform` adds: as set, or `<label>__output` for every label column."""
        chosen = self.getOrDefault("output_cols")
        return chosen or [f"{label}__output" for label in self.getOrDefault("label_columns") or []]
