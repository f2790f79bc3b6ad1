# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Intended differences between the public names of Farandole and Horovod: each with a reason and a
scope.

An entry is a module that is missing, or `module: name` for a name that is missing or takes other
arguments. A test fails for a difference that is not here, and for an entry here that is no
difference any more.
"""

EXCEPTIONS = {
    "An exception of Ray's own, which Horovod happens to leave in its modules.": """
        horovod.ray.elastic: GetTimeoutError
        horovod.ray.elastic_v2: GetTimeoutError
    """,
    (
        "Ranks meet by the registrar, so that nothing looks for network interfaces or hands "
        "variables of Gloo around."
    ): """
        horovod.ray.driver_service
        horovod.ray.runner: Coordinator
        horovod.ray.utils: detect_nics
        horovod.ray.utils: nics_to_env_var
    """,
    (
        "Inner parts of Horovod's elastic driver: the registrar decides who is in, and tells "
        "workers of changes."
    ): """
        horovod.common.elastic: notification_manager
        horovod.runner.elastic.constants
        horovod.runner.elastic.discovery: DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS
        horovod.runner.elastic.discovery: DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS
        horovod.runner.elastic.discovery: DiscoveredHosts
        horovod.runner.elastic.discovery: HostManager
        horovod.runner.elastic.discovery: HostState
        horovod.runner.elastic.driver
        horovod.runner.elastic.registration
        horovod.runner.elastic.rendezvous
        horovod.runner.elastic.settings
        horovod.runner.elastic.worker: HOROVOD_GLOO_IFACE
        horovod.runner.elastic.worker: HOROVOD_GLOO_RENDEZVOUS_ADDR
        horovod.runner.elastic.worker: HOROVOD_GLOO_RENDEZVOUS_PORT
        horovod.runner.elastic.worker: HOROVOD_HOSTNAME
        horovod.runner.elastic.worker: HOROVOD_LOCAL_RANK
        horovod.runner.elastic.worker: HostsUpdatedRequest
        horovod.runner.elastic.worker: WorkerNotificationClient
        horovod.runner.elastic.worker: WorkerNotificationManager
        horovod.runner.elastic.worker: WorkerNotificationService
    """,
    (
        "Inner parts of Horovod's launcher: what they do is native here, and `farandole run` is "
        "the way to it."
    ): """
        horovod.runner.driver
        horovod.runner.driver.driver_service
        horovod.runner.gloo_run
        horovod.runner.js_run
        horovod.runner.launch: CACHE_FOLDER
        horovod.runner.launch: CACHE_STALENESS_THRESHOLD_MINUTES
        horovod.runner.launch: SSH_ATTEMPTS
        horovod.runner.launch: SSH_CONNECT_TIMEOUT_S
        horovod.runner.launch: check_build
        horovod.runner.launch: is_gloo_used
        horovod.runner.launch: make_check_build_action
        horovod.runner.launch: make_deprecated_bool_action
        horovod.runner.launch: make_nic_action
        horovod.runner.launch: make_override_action
        horovod.runner.launch: make_override_bool_action
        horovod.runner.launch: make_override_false_action
        horovod.runner.launch: make_override_true_action
        horovod.runner.launch: parse_args
        horovod.runner.launch: run_controller
        horovod.runner.mpi_run
        horovod.runner.run_task
        horovod.runner.task
        horovod.runner.task.task_service
        horovod.runner.task_fn
        horovod.runner.util.cache
        horovod.runner.util.lsf
        horovod.runner.util.remote
    """,
    "Services that unpickle what comes over a socket, or keep values for anybody who asks: the "
    "registrar takes their place, by TLS and with a token of the job.": """
        horovod.runner.common.service
        horovod.runner.common.service.compute_service
        horovod.runner.common.service.driver_service
        horovod.runner.common.service.task_service
        horovod.runner.common.util.network
        horovod.runner.http
        horovod.runner.http.http_client
        horovod.runner.http.http_server
    """,
    "Inner parts of Horovod's jobs on Spark: tasks are a barrier stage here.": """
        horovod.spark.driver
        horovod.spark.driver.driver_service
        horovod.spark.driver.host_discovery
        horovod.spark.driver.job_id
        horovod.spark.driver.mpirun_rsh
        horovod.spark.driver.rendezvous
        horovod.spark.driver.rsh
        horovod.spark.gloo_run
        horovod.spark.mpi_run
        horovod.spark.runner: MINIMUM_COMMAND_LIFETIME_S
        horovod.spark.runner: WAIT_FOR_COMMAND_START_DELAY_SECONDS
        horovod.spark.runner: WAIT_FOR_SHUTDOWN_DELAY_SECONDS
        horovod.spark.task: codec
        horovod.spark.task: driver_service
        horovod.spark.task: in_thread
        horovod.spark.task: secret
        horovod.spark.task: task_exec
        horovod.spark.task: task_info
        horovod.spark.task: task_service
        horovod.spark.task.gloo_exec_fn
        horovod.spark.task.mpirun_exec_fn
        horovod.spark.task.task_info
        horovod.spark.task.task_service
    """,
    "Inner parts of Horovod's estimators: trainers, caches and files are other ones here.": """
        horovod.spark.common.cache
        horovod.spark.common.serialization
        horovod.spark.common.store: AbstractFilesystemStore.read_serialized_keras_model
        horovod.spark.common.store: DBFSLocalStore.read_serialized_keras_model
        horovod.spark.keras.bare
        horovod.spark.keras.optimizer
        horovod.spark.keras.remote: BYTES_PER_GIB
        horovod.spark.keras.remote: RemoteTrainer
        horovod.spark.keras.remote: TOTAL_BUFFER_MEMORY_CAP_GIB
        horovod.spark.keras.tensorflow
        horovod.spark.keras.util
        horovod.spark.lightning.legacy
        horovod.spark.lightning.remote: BYTES_PER_GIB
        horovod.spark.lightning.remote: CUSTOM_SPARSE
        horovod.spark.lightning.remote: METRIC_PRINT_FREQUENCY
        horovod.spark.lightning.remote: RemoteTrainer
        horovod.spark.lightning.remote: TOTAL_BUFFER_MEMORY_CAP_GIB
        horovod.spark.torch.remote: BYTES_PER_GIB
        horovod.spark.torch.remote: CUSTOM_SPARSE
        horovod.spark.torch.remote: METRIC_PRINT_FREQUENCY
        horovod.spark.torch.remote: PETASTORM_HDFS_DRIVER
        horovod.spark.torch.remote: RemoteTrainer
        horovod.spark.torch.remote: TOTAL_BUFFER_MEMORY_CAP_GIB
    """,
    "`None` stands for the default, which is Horovod's.": """
        horovod.keras: load_model
        horovod.tensorflow.keras: load_model
        horovod.spark.keras.estimator: KerasEstimator.__init__
        horovod.spark.torch.estimator: TorchEstimator.__init__
    """,
    "`None` stands for the default, which is Horovod's but for `terminate_on_nan`: a loss that is "
    "NaN or infinite ends a run, of which nothing else would tell before the model is used.": """
        horovod.spark.lightning.estimator: TorchEstimator.__init__
    """,
    "An unknown argument is an error; Horovod drops it.": """
        horovod.spark.common.store: AbstractFilesystemStore.__init__
        horovod.spark.common.store: DBFSLocalStore.__init__
        horovod.spark.common.store: FilesystemStore.__init__
    """,
    "Petastorm is not needed: the reader is native, and takes what estimators pass by keyword.": """
        horovod.spark.common.util: to_petastorm_fn
        horovod.spark.keras.datamodule: PetastormDataModule.__init__
        horovod.spark.keras.datamodule: PetastormDataModule.empty_batch_reader
        horovod.spark.lightning.datamodule: PETASTORM_HDFS_DRIVER
        horovod.spark.lightning.datamodule: PetastormDataModule.__init__
        horovod.spark.lightning.datamodule: PetastormDataModule.setup
        horovod.spark.lightning.datamodule: PetastormDataModule.teardown
        horovod.spark.lightning.datamodule: PetastormDataModule.train_dataloader
        horovod.spark.lightning.datamodule: PetastormDataModule.val_dataloader
        horovod.spark.torch.datamodule: MapIterable
        horovod.spark.torch.datamodule: PetastormDataModule.__init__
        horovod.spark.torch.datamodule: PetastormDataModule.empty_batch_reader
    """,
    "NVTabular is retired by its makers: its data module raises with that reason.": """
        horovod.spark.keras.datamodule: NVTabularDataModule.__init__
        horovod.spark.keras.datamodule: NVTabularDataModule.seed_fn
        horovod.spark.keras.datamodule: NVTabularDataModule.to_dense
        horovod.spark.keras.datamodule: NVTabularDataModule.train_data
        horovod.spark.keras.datamodule: NVTabularDataModule.val_data
        horovod.spark.torch.datamodule: NVTabularDataModule.__init__
        horovod.spark.torch.datamodule: NVTabularDataModule.seed_fn
        horovod.spark.torch.datamodule: NVTabularDataModule.train_data
        horovod.spark.torch.datamodule: NVTabularDataModule.val_data
    """,
    (
        "The module of `mpi4py`, or a hint for type checkers, which Horovod happens to leave in "
        "its modules."
    ): """
        horovod.common.basics: MPI
        horovod.common.process_sets: HorovodBasics
        horovod.common.process_sets: MPI
    """,
    "There is no library of that name to load.": """
        horovod.mxnet.mpi_ops: MPI_MXNET_LIB_CTYPES
        horovod.mxnet.mpi_ops: dll_path
        horovod.tensorflow.mpi_ops: MPI_LIB
    """,
    (
        "Inner classes of the gradients, which are other ones here; the functions that use them "
        "are the public ones."
    ): """
        horovod.torch.mpi_ops: HorovodAllgather
        horovod.torch.mpi_ops: HorovodAllreduce
        horovod.torch.mpi_ops: HorovodAlltoall
        horovod.torch.mpi_ops: HorovodBroadcast
        horovod.torch.mpi_ops: HorovodGroupedAllgather
        horovod.torch.mpi_ops: HorovodGroupedAllreduce
        horovod.torch.mpi_ops: HorovodGroupedReducescatter
        horovod.torch.mpi_ops: HorovodReducescatter
    """,
    (
        "Adapters are made by `RayExecutor`, which has the arguments; they take them in one object."
    ): """
        horovod.ray.elastic_v2: ElasticAdapter.__init__
        horovod.ray.runner: StaticAdapter.__init__
    """,
}


def reasons():
    """The reason for every entry."""
    return {
        entry.strip(): why
        for why, entries in EXCEPTIONS.items()
        for entry in entries.strip().splitlines()
    }
