# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The parameters of all estimators, and of all fitted models."""

# ruff: noqa: N802, N815, PLC0415 - names are Spark ML's; pyarrow is loaded where statistics are

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

from pyspark.ml.param.shared import HasOutputCols

from farandole.common import argument_checks
from farandole.spark.common import param_checks
from farandole.spark.common.data.column_metadata import parse_metadata
from farandole.spark.common.parameter import DeclaredParams, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from farandole.data.statistics import Statistics
    from farandole.runner.backend import Backend
    from farandole.stores.store import Store


class EstimatorParams(DeclaredParams):
    """The parameters of every estimator."""

    num_proc: Parameter[int] = Parameter(
        "Training processes, instead of `backend`; without both, Spark's default parallelism.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    model: Parameter[Any] = Parameter(
        "The model to train.", argument_checks.accept_any_value, default=None
    )
    backend: Parameter[Backend] = Parameter(
        "Where processes run, instead of `num_proc`: `SparkBackend`, `LocalBackend`.",
        param_checks.check_backend,
        default=None,
    )
    store: Parameter[Store | str] = Parameter(
        "Where prepared data, checkpoints and logs live: a `Store`, or a path.",
        param_checks.check_store,
        default=None,
    )
    optimizer: Parameter[Any] = Parameter(
        "The optimizer over the model's parameters.", argument_checks.accept_any_value, default=None
    )
    loss: Parameter[Any] = Parameter(
        "The loss, or a list of one per label column.",
        argument_checks.accept_any_value,
        default=None,
    )
    loss_weights: Parameter[Sequence[float]] = Parameter(
        "Weight of each label's loss; without them, the weights are equal.",
        argument_checks.check_number_list,
        default=None,
    )
    sample_weight_col: Parameter[str] = Parameter(
        "Column with each row's weight in the loss, and in the `weighted_metrics` of a Keras "
        "model.",
        argument_checks.check_nonempty_text,
        default=None,
    )
    metrics: Parameter[Any] = Parameter(
        "Functions of (output, label), averaged over rows.",
        argument_checks.check_callable_list,
        default=[],
    )
    feature_cols: Parameter[Sequence[str | Sequence[str]] | Mapping[str, Any]] = Parameter(
        "Columns for the model, one input each; a list in the list makes one input of several "
        "columns. Of PyTorch and Lightning also a dict by argument, for a model that takes inputs "
        "by keyword.",
        param_checks.check_feature_cols,
        default=None,
    )
    label_cols: Parameter[Sequence[str]] = Parameter(
        "Columns to compare the outputs with.", argument_checks.check_column_names, default=None
    )
    validation: Parameter[float | str] = Parameter(
        "Share of rows held out, or a column: true or positive rows are held out.",
        param_checks.check_validation_value,
        default=None,
    )
    validation_stratify: Parameter[str] = Parameter(
        "Column of classes: the share `validation` is held out of each, of every class with two "
        "rows at least one.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    validation_group: Parameter[str] = Parameter(
        "Column of groups: all rows of a group are on one side.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    validation_time: Parameter[str] = Parameter(
        "Column of times or numbers: the latest rows are held out.",
        argument_checks.make_optional_check(argument_checks.check_nonempty_text),
        default=None,
    )
    batch_size: Parameter[int] = Parameter(
        "Rows per step and process.", argument_checks.make_minimum_check(1), default=32
    )
    global_batch_size: Parameter[int] = Parameter(
        "Rows of a step of the optimizer on all processes together, however many there are. The "
        "learning rate is then not multiplied by their number, and processes that join or leave do "
        "not change what is trained. Without it, a step has `batch_size` rows of each process.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    val_batch_size: Parameter[int] = Parameter(
        "The same for validation; without it, `batch_size`.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    epochs: Parameter[int] = Parameter(
        "Number of passes over the rows.", argument_checks.make_minimum_check(1), default=1
    )
    verbose: Parameter[int] = Parameter(
        "0 silent, 1 progress, 2 also what workers print.",
        argument_checks.make_minimum_check(0),
        default=1,
    )
    callbacks: Parameter[Sequence[Any]] = Parameter(
        "Called on every rank while the model trains.", argument_checks.check_value_list, default=[]
    )
    random_seed: Parameter[int] = Parameter(
        "Seed of the split, the order and the framework.",
        argument_checks.make_minimum_check(0),
        default=None,
    )
    shuffle: Parameter[bool] = Parameter(
        "Whether each epoch has its own order.", argument_checks.check_boolean_flag, default=True
    )
    shuffle_buffer_size: Parameter[int] = Parameter(
        "Ignored.",
        argument_checks.make_deprecated_check("the order of an epoch does not depend on a buffer"),
        default=None,
        horovod_name="ShufflingBufferSize",
    )
    partitions_per_process: Parameter[int] = Parameter(
        "Largest number of prepared files per process.",
        argument_checks.make_minimum_check(1),
        default=10,
    )
    run_id: Parameter[str] = Parameter(
        "Name of the run; without it, the framework and the time. The checkpoint of an existing "
        "run is resumed.",
        param_checks.check_run_id,
        default=None,
    )
    resume: Parameter[str] = Parameter(
        '`"force"` also continues a run that was started with other data, another model or other '
        "parameters.",
        argument_checks.make_choice_check("auto", "force"),
        default="auto",
    )
    gc_older_than: Parameter[str | float | timedelta] = Parameter(
        "`fit` deletes prepared data of the store that is older and not in use: an age such as "
        "`30d`, or seconds.",
        argument_checks.make_optional_check(param_checks.parse_age),
        default=None,
    )
    gc_max_size: Parameter[str | int] = Parameter(
        "`fit` deletes the oldest prepared data of the store that is not in use, until all of it, "
        "with data in use, takes no more than this: a size such as `500GB` or `20GiB`, or bytes.",
        argument_checks.make_optional_check(param_checks.parse_size),
        default=None,
    )
    train_steps_per_epoch: Parameter[int] = Parameter(
        "Training steps per epoch, fewer or more than one pass over the rows takes.",
        argument_checks.make_minimum_check(1),
        default=None,
    )
    validation_steps_per_epoch: Parameter[int] = Parameter(
        "The same for validation.", argument_checks.make_minimum_check(1), default=None
    )
    label_shapes: Parameter[Sequence[Sequence[int]]] = Parameter(
        "Shape of each label's tensor, -1 for its rows.",
        argument_checks.check_shape_list,
        default=None,
    )
    use_gpu: Parameter[bool] = Parameter(
        "Train on GPUs if every process sees one.", argument_checks.check_boolean_flag, default=True
    )
    backward_passes_per_step: Parameter[int] = Parameter(
        "Batches whose gradients make one step.", argument_checks.make_minimum_check(1), default=1
    )
    gradient_compression: Parameter[Any] = Parameter(
        "Compression of gradients between processes, such as `farandole.torch.Compression.fp16`.",
        param_checks.check_compression,
        default=None,
    )
    transformation_fn: Parameter[Callable[..., Any]] = Parameter(
        "Changes the values of each row, a dict by column, in the training processes; if marked by "
        "`farandole.spark.common.transform.batched`, of whole batches.",
        argument_checks.check_callable_value,
        default=None,
    )
    transformation_edit_fields: Parameter[Sequence[Any]] = Parameter(
        "Columns it changes: (name, NumPy type, shape, whether nulls are allowed). The shape "
        "`None` is whatever comes, `()` is a number.",
        param_checks.check_edit_fields,
        default=None,
    )
    transformation_removed_fields: Parameter[Sequence[str]] = Parameter(
        "Columns it removes; with a `LightningModule` also features and labels.",
        argument_checks.check_optional_column_names,
        default=None,
    )
    train_reader_num_workers: Parameter[int] = Parameter(
        "Reading threads per process.",
        argument_checks.make_minimum_check(1),
        default=2,
        horovod_name="TrainReaderNumWorker",
    )
    val_reader_num_workers: Parameter[int] = Parameter(
        "The same for validation.",
        argument_checks.make_minimum_check(1),
        default=2,
        horovod_name="ValReaderNumWorker",
    )
    reader_pool_type: Parameter[str] = Parameter(
        "Accepted for compatibility with Horovod: readers are native threads.",
        argument_checks.make_choice_check("thread", "process", "dummy"),
        default="thread",
    )
    inmemory_cache_all: Parameter[bool] = Parameter(
        "Whether each process keeps its rows in memory after the first epoch.",
        argument_checks.check_boolean_flag,
        default=False,
        horovod_name="InMemoryCacheAll",
    )
    mp_start_method: Parameter[str] = Parameter(
        "Start method of processes that a training process starts.",
        argument_checks.make_choice_check(*multiprocessing.get_all_start_methods()),
        default=None,
    )
    tensorflow_dataset_prefetch_buffer_size: Parameter[int] = Parameter(
        "Of Keras on TensorFlow: batches prepared ahead; 0 leaves it to Keras.",
        argument_checks.make_minimum_check(0),
        default=0,
    )
    compress_sparse_cols: Parameter[bool] = Parameter(
        "Whether prepared vectors, which are dense, are compressed.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    fill: Parameter[Any] = Parameter(
        "Replacement of nulls and NaN, for all columns or a dict by column; without it they are "
        "errors. "
        '`"mean"`, `"median"` and `"most_frequent"` are learned from the rows. A feature '
        "`<column>__missing` "
        "says where a column is missing.",
        param_checks.check_fill,
        default=None,
    )
    categories: Parameter[Sequence[str] | Mapping[str, Sequence[Any] | int | None]] = Parameter(
        "Columns of strings, integers or booleans that become indices: 0 for a missing value, 1 "
        "for an unseen one, from 2 on the categories, sorted; in a label, classes from 0 on. A "
        "list of names; or a dict by name of a list of categories, a number of categories, or "
        "None for all. Categories that are not given are learned.",
        param_checks.check_categories,
        default={},
    )
    ragged: Parameter[Mapping[str, Any]] = Parameter(
        "What becomes of columns of lists of different lengths: a dict by name of "
        "`farandole.data.Pad`, which pads them, or `farandole.data.Nested`, which makes nested "
        "tensors of them; Keras takes only the former.",
        param_checks.check_ragged,
        default={},
    )
    statistics: Parameter[bool] = Parameter(
        "Whether the fitted model carries statistics of the rows, for its `drift`. They take one "
        "more pass over the rows.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    allow_nan: Parameter[bool] = Parameter(
        "Whether NaN and infinities are accepted like other values.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    continuous_cols: Parameter[Sequence[str]] = Parameter(
        "NVTabular's; not used.", argument_checks.check_optional_column_names, default=None
    )
    categorical_cols: Parameter[Sequence[str]] = Parameter(
        "NVTabular's; not used.", argument_checks.check_optional_column_names, default=None
    )
    terminate_on_nan: Parameter[bool] = Parameter(
        "Whether a loss that is NaN or infinite ends the run.",
        argument_checks.check_boolean_flag,
        default=True,
    )
    mlflow: Parameter[bool] = Parameter(
        "Whether parameters, metrics and the model are logged to MLflow.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    wandb: Parameter[bool] = Parameter(
        "Whether parameters and metrics are logged to Weights & Biases.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    tensorboard: Parameter[bool] = Parameter(
        "Whether parameters, steps and the model are logged for TensorBoard. Scalars of epochs "
        "always are.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    on_failure: Parameter[str] = Parameter(
        '`"restart"` starts a failed run again from its checkpoint.',
        argument_checks.make_choice_check("raise", "restart"),
        default="raise",
    )
    max_restarts: Parameter[int] = Parameter(
        "Largest number of restarts of one fit.", argument_checks.make_minimum_check(1), default=3
    )

    def _get_optimizer(self) -> Any:
        """Returns the optimizer. Fits ask this method, which a subclass may override."""
        return self.getOrDefault("optimizer")

    def getOptimizer(self) -> Any:
        """Returns the result of `_get_optimizer`."""
        return self._get_optimizer()


class ModelParams(DeclaredParams, HasOutputCols):
    """The parameters of every fitted model."""

    history: Parameter[Any] = Parameter(
        "Losses and metrics of each epoch.", argument_checks.accept_any_value, default=None
    )
    model: Parameter[Any] = Parameter(
        "The trained model.", argument_checks.accept_any_value, default=None
    )
    feature_columns: Parameter[Sequence[str | Sequence[str]] | Mapping[str, Any]] = Parameter(
        "Columns for the model, as in the estimator.", param_checks.check_feature_cols, default=None
    )
    label_columns: Parameter[Sequence[str]] = Parameter(
        "Columns the outputs are named after.",
        argument_checks.check_column_names,
        default=None,
        horovod_name="LabelColoumns",
    )
    run_id: Parameter[str] = Parameter(
        "Name of the run that trained the model.", argument_checks.check_nonempty_text, default=None
    )
    _metadata: Parameter[Mapping[str, Mapping[str, Any]]] = Parameter(
        "Description of the columns, by name, as `get_simple_meta_from_parquet` gives it.",
        parse_metadata,
        default=None,
    )
    paths: Parameter[Mapping[str, str]] = Parameter(
        "Paths of the data, checkpoint and logs of the run.",
        argument_checks.accept_any_value,
        default=None,
    )
    outputCols: Parameter[Sequence[str]] = Parameter(  # pyright: ignore[reportIncompatibleVariableOverride]
        "Names of the added columns, instead of `<label>__output`.",
        argument_checks.check_column_names,
        default=None,
    )
    batch_size: Parameter[int] = Parameter(
        "Largest number of rows that are predicted at once.",
        argument_checks.make_minimum_check(1),
        default=4096,
    )
    fill: Parameter[Any] = Parameter(
        "Replacement of nulls and NaN, as in the estimator.", param_checks.check_fill, default=None
    )
    learned: Parameter[Mapping[str, str]] = Parameter(
        'The values of `fill` that were learned, and their kind, such as `{"age": "mean"}`.',
        argument_checks.accept_any_value,
        default={},
    )
    categories: Parameter[Mapping[str, Sequence[Any]]] = Parameter(
        "The categories of each column that has some.", param_checks.check_categories, default={}
    )
    ragged: Parameter[Mapping[str, Any]] = Parameter(
        "What becomes of columns of lists of different lengths, as in the estimator.",
        param_checks.check_ragged,
        default={},
    )
    statistics: Parameter[Statistics | Mapping[str, Any]] = Parameter(
        "Statistics of the rows that the model was trained with, for `drift`.",
        param_checks.check_statistics,
        default=None,
    )
    transformation_fn: Parameter[Callable[..., Any]] = Parameter(
        "As in the estimator; predictions take it with `apply_transformation`.",
        argument_checks.check_callable_value,
        default=None,
    )
    transformation_edit_fields: Parameter[Sequence[Any]] = Parameter(
        "As in the estimator.", param_checks.check_edit_fields, default=None
    )
    transformation_removed_fields: Parameter[Sequence[str]] = Parameter(
        "As in the estimator.", argument_checks.check_optional_column_names, default=None
    )
    apply_transformation: Parameter[bool] = Parameter(
        "Whether `transformation_fn` changes features before they are predicted, too.",
        argument_checks.check_boolean_flag,
        default=False,
    )
    verbose: Parameter[int] = Parameter(
        "0 shows no messages about predictions.", argument_checks.make_minimum_check(0), default=1
    )
    signature: Parameter[Sequence[Mapping[str, Any]]] = Parameter(
        "What goes into each input: its `columns`, `shape` (-1 for the rows) and `dtype`.",
        argument_checks.accept_any_value,
        default=None,
    )

    def _get_metadata(self) -> Any:
        """Returns the description of the columns."""
        return self.getOrDefault("_metadata")

    def getStatistics(self) -> Statistics | None:
        """Returns the statistics of the rows that the model was trained with, if it carries
        them.
        """
        from farandole.data.statistics import Statistics

        known = self.getOrDefault("statistics")
        return None if known is None else Statistics.of_values(known)

    def getOutputCols(self) -> list[str]:
        """Returns the columns `transform` adds: as set, or `<label>__output` for every label
        column.
        """
        chosen = self.getOrDefault("outputCols")
        return chosen or [f"{label}__output" for label in self.getOrDefault("label_columns") or []]
