# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The column of hooks: methods of Horovod's classes that a subclass may override.

`hooks.json` lists them, from Horovod's sources. Each is either called, in a row of `CALLED`, which
says when and with which arguments, or it has a reason in `NOT_CALLED`. The rows of a class are in
the order of the first calls. `test_hooks.py` compares them with the calls of recorded subclasses,
which override the methods of `NOT_CALLED`, too.
"""

FITS = ("fit", "fit_on_parquet")


def called(*arguments, by):
    """A row: the arguments, and the public calls in which the method is called."""
    return {"arguments": list(arguments), "by": (by,) if isinstance(by, str) else by}


FIT = {
    "fit": called("df", by="fit"),
    "fit_on_parquet": called(by="fit_on_parquet"),
    "_fit": called("dataset", by="fit"),
    "_fit_on_parquet": called("dataset_idx", by="fit_on_parquet"),
    "getOptimizer": called(by=FITS),
    "_get_optimizer": called(by=FITS),
    "_get_or_create_backend": called(by=FITS),
    "_check_metadata_compatibility": called("metadata", by="fit"),
    "_check_params": called("metadata", by=FITS),
    "_has_checkpoint": called("run_id", by=FITS),
    "get_model_class": called(by=FITS),
    "_get_model_kwargs": called("model", "history", "optimizer", "run_id", "metadata", by=FITS),
}
KERAS_FIT = {
    **FIT,
    "_get_model_kwargs": called("model", "history", "run_id", "metadata", "floatx", by=FITS),
}
TRANSFORM = {
    "transform": called("df", by="transform"),
    "_transform": called("dataset", by="transform"),
}
OPTIMIZER = {
    "getOptimizer": called(by="getOptimizer"),
    "_get_optimizer": called(by="getOptimizer"),
}
BACKEND = {
    "num_processes": called(by=FITS),
    "run": called("fn", "args", "kwargs", "env", by=FITS),
}
STORE = {
    "saving_runs": called(by=FITS),
    "get_train_data_path": called("idx", by=FITS),
    "get_val_data_path": called("idx", by=FITS),
    "is_parquet_dataset": called("path", by="fit_on_parquet"),
    "get_full_path": called("path", by=FITS),
    "to_remote": called("run_id", "dataset_idx", by=FITS),
    "get_test_data_path": called("idx", by=FITS),
    "get_runs_path": called(by=FITS),
    "get_run_path": called("run_id", by=FITS),
    "get_checkpoint_path": called("run_id", by=FITS),
    "get_logs_path": called("run_id", by=FITS),
    "get_logs_subdir": called(by=FITS),
    "get_checkpoint_filename": called(by=FITS),
    "exists": called("path", by=FITS),
}
DBFS_STORE = {name: STORE[name] for name in ("get_full_path", "get_checkpoint_filename", "exists")}
HDFS_STORE = {"get_full_path": called("path", by="get_data_metadata_path")}
RUN = "elastic.run"
STATE = {
    "register_reset_callbacks": called("callbacks", by="the script"),
    "sync": called(by=RUN),
    "commit": called(by="the script"),
    "save": called(by="commit"),
    "check_host_updates": called(by="commit"),
    "restore": called(by=RUN),
    "on_reset": called(by=RUN),
    "reset": called(by="on_reset"),
    "on_hosts_updated": called("timestamp", "update_res", by="check_host_updates"),
}
SPREAD = {
    "sync": called(by=RUN),
    "save": called(by="commit"),
    "restore": called(by=RUN),
}
HANDLER = {"set_value": called("value", by="the script"), **SPREAD}
BATCH_END = called("batch", "logs", by="Keras")
EPOCH_END = called("epoch", "logs", by="Keras")
TRAIN_BEGIN = called("logs", by="Keras")
SCHEDULE = {
    "on_train_begin": TRAIN_BEGIN,
    "on_epoch_begin": EPOCH_END,
    "on_batch_begin": BATCH_END,
    "_adjust_learning_rate": called("epoch", by="on_batch_begin"),
    "on_batch_end": BATCH_END,
    "on_epoch_end": EPOCH_END,
}
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": {
        "register_local_var": called("var", by="the constructor"),
        "on_batch_end": BATCH_END,
    },
    "MetricAverageCallback": {"on_epoch_end": EPOCH_END},
    "LearningRateScheduleCallback": SCHEDULE,
    "LearningRateWarmupCallback": {"on_epoch_end": EPOCH_END},
    "CommitStateCallback": {
        "on_train_begin": TRAIN_BEGIN,
        "on_batch_end": BATCH_END,
        "commit": called(by="on_batch_end"),
        "on_epoch_end": EPOCH_END,
    },
    "UpdateBatchStateCallback": {
        "on_train_begin": TRAIN_BEGIN,
        "on_epoch_begin": EPOCH_END,
        "on_batch_end": BATCH_END,
        "on_epoch_end": EPOCH_END,
    },
    "UpdateEpochStateCallback": {"on_train_begin": TRAIN_BEGIN, "on_epoch_end": EPOCH_END},
}
CALLED = {
    "horovod.spark.common.params: EstimatorParams": {
        name: FIT[name] for name in ("getOptimizer", "_check_params")
    },
    "horovod.spark.common.estimator: HorovodEstimator": FIT,
    "horovod.spark.torch.estimator: TorchEstimator": FIT,
    "horovod.spark.lightning.estimator: TorchEstimator": FIT,
    "horovod.spark.keras.estimator: KerasEstimator": KERAS_FIT,
    "horovod.spark.common.estimator: HorovodModel": TRANSFORM,
    "horovod.spark.torch.estimator: TorchModel": {**TRANSFORM, **OPTIMIZER},
    "horovod.spark.lightning.estimator: TorchModel": {
        "get_prediction_fn": called(by="transform"),
        **TRANSFORM,
        **OPTIMIZER,
    },
    "horovod.spark.keras.estimator: KerasModel": TRANSFORM,
    "horovod.spark.common.backend: Backend": BACKEND,
    "horovod.spark.common.backend: SparkBackend": BACKEND,
    "horovod.spark.common.store: Store": STORE,
    "horovod.spark.common.store: AbstractFilesystemStore": STORE,
    "horovod.spark.common.store: FilesystemStore": STORE,
    "horovod.spark.common.store: DBFSLocalStore": DBFS_STORE,
    "horovod.spark.common.store: HDFSStore": HDFS_STORE,
    "horovod.common.elastic: State": STATE,
    "horovod.common.elastic: ObjectState": STATE,
    "horovod.torch.elastic.state: TorchState": STATE,
    "horovod.torch.elastic.state: StateHandler": HANDLER,
    "horovod.torch.elastic.state: ModelStateHandler": HANDLER,
    "horovod.torch.elastic.state: OptimizerStateHandler": SPREAD,
    "horovod.torch.elastic.state: SamplerStateHandler": SPREAD,
    "horovod.tensorflow.elastic: TensorFlowState": STATE,
    "horovod.tensorflow.elastic: TensorFlowKerasState": STATE,
    **{
        f"horovod._keras.{'elastic' if 'State' in name else 'callbacks'}: {name}Impl": rows
        for name, rows in CALLBACKS.items()
    },
}
NOT_CALLED = {
    "A step of Horovod's own training, which is another one here.": """
        horovod.spark.torch.estimator: TorchEstimator._fit_on_prepared_data
        horovod.spark.torch.estimator: TorchEstimator._create_model
        horovod.spark.torch.estimator: TorchEstimator._load_checkpoint
        horovod.spark.lightning.estimator: TorchEstimator._fit_on_prepared_data
        horovod.spark.lightning.estimator: TorchEstimator._create_model
        horovod.spark.lightning.estimator: TorchEstimator._read_checkpoint
        horovod.spark.keras.estimator: KerasEstimator._fit_on_prepared_data
        horovod.spark.keras.estimator: KerasEstimator._create_model
        horovod.spark.keras.estimator: KerasEstimator._load_model_from_checkpoint
        horovod.spark.keras.estimator: KerasEstimator._compile_model
        horovod.spark.keras.estimator: KerasEstimator._get_keras_utils
        horovod.spark.keras.estimator: KerasModel._get_keras_utils
    """,
    "For the user alone: fits and predictions know it without asking.": """
        horovod.spark.keras.estimator: KerasEstimator.get_model_shapes
        horovod.spark.common.params: ModelParams._get_metadata
        horovod.spark.keras.estimator: KerasModel._get_floatx
        horovod.spark.common.store: Store.get_checkpoints
        horovod.spark.common.store: AbstractFilesystemStore.get_checkpoints
        horovod.spark.common.store: Store.get_parquet_dataset
        horovod.spark.common.store: AbstractFilesystemStore.get_parquet_dataset
        horovod.spark.common.store: AbstractFilesystemStore.get_data_metadata_path
    """,
    "Files are read and written natively, at the paths that the store names.": """
        horovod.spark.common.store: Store.read
        horovod.spark.common.store: AbstractFilesystemStore.read
        horovod.spark.common.store: Store.write_text
        horovod.spark.common.store: AbstractFilesystemStore.write_text
        horovod.spark.common.store: Store.get_local_output_dir_fn
        horovod.spark.common.store: AbstractFilesystemStore.get_local_output_dir_fn
        horovod.spark.common.store: Store.sync_fn
        horovod.spark.common.store: FilesystemStore.sync_fn
        horovod.spark.common.store: AbstractFilesystemStore.get_localized_path
        horovod.spark.common.store: FilesystemStore.get_localized_path
        horovod.spark.common.store: AbstractFilesystemStore.get_full_path_fn
        horovod.spark.common.store: FilesystemStore.get_full_path_fn
        horovod.spark.common.store: FilesystemStore.copy
        horovod.spark.common.store: FilesystemStore.get_filesystem
        horovod.spark.common.store: DBFSLocalStore.get_localized_path
        horovod.spark.common.store: DBFSLocalStore.read_serialized_keras_model
        horovod.spark.common.store: HDFSStore.get_localized_path
        horovod.spark.common.store: HDFSStore.get_full_path_fn
        horovod.spark.common.store: HDFSStore.sync_fn
        horovod.spark.common.store: HDFSStore.parse_url
    """,
    "An inner part of Horovod's class, whose work has another form here.": """
        horovod.spark.common.store: Store._remote_attrs
        horovod.spark.common.store: AbstractFilesystemStore._get_full_path_or_default
        horovod.spark.common.store: AbstractFilesystemStore._get_path
        horovod.spark.common.store: AbstractFilesystemStore.read_serialized_keras_model
        horovod.spark.common.store: FilesystemStore._get_fs_and_protocol
        horovod.spark.common.store: HDFSStore._check_url
        horovod.spark.common.store: HDFSStore._get_filesystem_fn
        horovod.common.elastic: ObjectState._set_attrs
        horovod.tensorflow.elastic: TensorFlowKerasState._save_model
        horovod.tensorflow.elastic: TensorFlowKerasState._load_model
        horovod.tensorflow.elastic: TensorFlowState._save_model
        horovod.tensorflow.elastic: TensorFlowState._load_model
        horovod.tensorflow.elastic: TensorFlowState._eval_var
        horovod.tensorflow.elastic: TensorFlowState._to_numpy
        horovod.tensorflow.elastic: TensorFlowState._load_var
        horovod.tensorflow.elastic: TensorFlowState._assign_var
        horovod._keras.callbacks: MetricAverageCallbackImpl._average_metrics_in_place
        horovod._keras.callbacks: MetricAverageCallbackImpl._make_variable
        horovod._keras.callbacks: LearningRateScheduleCallbackImpl._autodetect_steps_per_epoch
        horovod._keras.callbacks: LearningRateScheduleCallbackImpl._restore_momentum_if_needed
    """,
}


def uncalled_methods(*kinds):
    """Names of the methods of these classes that are not called."""
    found = (entry.rpartition(".") for entry in uncalled())
    return sorted({method for kind, _, method in found if kind in kinds})


def uncalled():
    """The reason for every method that is not called."""
    return {
        entry.strip(): why
        for why, entries in NOT_CALLED.items()
        for entry in entries.strip().splitlines()
    }
