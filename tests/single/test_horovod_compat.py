# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The drop-in `horovod` package: the same modules under the old names."""

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DEEP = {
    "horovod.torch.mpi_ops": ["allreduce", "allreduce_async_", "alltoall", "reducescatter", "synchronize", "_basics"],
    "horovod.torch.functions": ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"],
    "horovod.torch.optimizer": ["DistributedOptimizer"],
    "horovod.torch.compression": ["Compression", "Compressor", "NoneCompressor", "FP16Compressor"],
    "horovod.torch.elastic": ["run", "TorchState", "ElasticSampler"],
    "horovod.common.util": ["num_rank_is_power_2", "split_list", "gpu_available"],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.process_sets": ["ProcessSet", "global_process_set", "add_process_set", "remove_process_set"],
    "horovod.common.exceptions": ["HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"],
    "horovod.common.elastic": ["State", "ObjectState", "run_fn"],
    "horovod.data.data_loader_base": ["BaseDataLoader", "AsyncDataLoaderMixin"],
    "horovod.spark.data_loaders.pytorch_data_loaders": [
        "PytorchDataLoader",
        "PytorchAsyncDataLoader",
        "PytorchInfiniteDataLoader",
        "PytorchInfiniteAsyncDataLoader",
        "PytorchInmemDataLoader",
        "PytorchInmemAsyncDataLoader",
        "PetastormBatchedDataLoader",
    ],
    "horovod.spark.common.store": ["Store", "LocalStore"],
    "horovod.spark.common.backend": ["SparkBackend"],
    "horovod.spark.torch": ["TorchEstimator", "TorchModel"],
    "horovod.spark.torch.estimator": ["TorchEstimatorParamsReadable", "TorchEstimatorParamsWritable"],
    "horovod.spark.torch.datamodule": ["PetastormDataModule", "NVTabularDataModule"],
    "horovod.spark.lightning": ["TorchEstimator", "TorchModel"],
    "horovod.spark.common.estimator": ["HorovodEstimator", "HorovodModel"],
    "horovod.spark.common.params": ["EstimatorParams", "ModelParams"],
    "horovod.spark.common.util": ["prepare_data", "get_simple_meta_from_parquet", "check_validation", "to_list"],
    "horovod.spark": ["run"],
    "horovod.runner": ["run"],
}

WITH_TENSORFLOW = {
    "horovod.tensorflow": ["DistributedGradientTape", "DistributedOptimizer", "allreduce", "elastic", "init", "keras"],
    "horovod.tensorflow.compression": ["Compression", "Compressor", "NoneCompressor", "FP16Compressor"],
    "horovod.tensorflow.data.compute_service": ["TfDataServiceConfig", "compute_worker_fn", "tf_data_service"],
    "horovod.tensorflow.data.compute_worker": ["main"],
    "horovod.tensorflow.elastic": ["run", "TensorFlowState", "TensorFlowKerasState"],
    "horovod.tensorflow.functions": [
        "allgather_object",
        "broadcast_object",
        "broadcast_object_fn",
        "broadcast_variables",
        "broadcast_global_variables",
    ],
    "horovod.tensorflow.gradient_aggregation": ["LocalGradientAggregationHelper"],
    "horovod.tensorflow.gradient_aggregation_eager": ["LocalGradientAggregationHelperEager"],
    "horovod.tensorflow.keras": ["DistributedOptimizer", "allreduce", "callbacks", "elastic", "load_model", "init"],
    "horovod.tensorflow.keras.callbacks": ["LearningRateScheduleCallback", "LearningRateWarmupCallback"],
    "horovod.tensorflow.keras.elastic": ["run", "KerasState", "CommitStateCallback"],
    "horovod.tensorflow.mpi_ops": [
        "_allreduce",
        "_grouped_allreduce",
        "_reducescatter",
        "allgather",
        "alltoall",
        "broadcast_",
        "join",
        "process_set_included_op",
        "size_op",
    ],
    "horovod.tensorflow.sync_batch_norm": ["SyncBatchNormalization"],
    "horovod.tensorflow.util": ["gpu_available", "refs_to_vars", "vars_to_refs"],
    "horovod.keras": ["DistributedOptimizer", "PartialDistributedOptimizer", "Adasum", "load_model", "callbacks"],
    "horovod.keras.callbacks": [
        "BestModelCheckpoint",
        "BroadcastGlobalVariablesCallback",
        "MetricAverageCallback",
    ],
    "horovod.keras.elastic": ["run", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"],
    "horovod.spark.keras": ["KerasEstimator", "KerasModel"],
    "horovod.spark.keras.estimator": [
        "KerasEstimator",
        "KerasModel",
        "KerasEstimatorParamsReadable",
        "KerasEstimatorParamsReader",
        "KerasEstimatorParamsWritable",
        "KerasEstimatorParamsWriter",
    ],
    "horovod.spark.keras.datamodule": ["PetastormDataModule", "NVTabularDataModule"],
    "horovod.spark.tensorflow.compute_worker": ["main"],
    "horovod._keras": [],
    "horovod._keras.callbacks": [],
    "horovod._keras.elastic": [],
}


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_names_of_tensorflow_and_keras_are_farandoles_own_and_take_horovods_arguments():
    """In a process of its own: TensorFlow does not bear what torch loads later on."""
    program = (
        "import importlib, json, os, sys\n"
        "for name, wanted in json.loads(sys.argv[1]).items():\n"
        "    theirs, own = importlib.import_module(name), name.replace('horovod', 'farandole', 1)\n"
        "    assert theirs is importlib.import_module(own), name\n"
        "    missing = [entry for entry in wanted if not hasattr(theirs, entry)]\n"
        "    assert not missing, (name, missing)\n"
        "sys.path.insert(0, os.getcwd())\n"
        "from tests import horovod_surface as surface\n"
        "keras = [*surface.COMMON, 'Adasum']\n"
        "for name, functions, names in (\n"
        "    ('horovod.tensorflow', surface.TENSORFLOW, surface.COMMON + surface.SIX),\n"
        "    ('horovod.tensorflow.keras', surface.TENSORFLOW_KERAS, surface.COMMON),\n"
        "    ('horovod.keras', surface.KERAS, keras),\n"
        "):\n"
        "    problems = list(surface.problems(importlib.import_module(name), functions, names))\n"
        "    assert not problems, problems\n"
    )
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program, json.dumps(WITH_TENSORFLOW)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DEEP)
def test_a_deep_name_is_farandoles_own_module(name):
    theirs = importlib.import_module(name)
    ours = importlib.import_module(name.replace("horovod", "farandole", 1))
    assert theirs is ours
    assert sys.modules[name] is ours
    assert ours.__spec__ is not None
    assert ours.__spec__.name == ours.__name__ == name.replace("horovod", "farandole", 1)
    assert [wanted for wanted in DEEP[name] if not hasattr(theirs, wanted)] == []


def test_names_without_a_counterpart_are_modules_of_the_drop_in(monkeypatch):
    env = importlib.import_module("horovod.runner.common.util.env")
    assert env.is_exportable("PATH")
    assert not env.is_exportable("BASH_FUNC_module%%")
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert env.get_env_rank_and_size() == (3, 4)
    host_hash = importlib.import_module("horovod.runner.common.util.host_hash").host_hash
    assert host_hash is importlib.import_module("horovod.spark.common.util").host_hash
    assert host_hash() == host_hash()
    assert re.fullmatch(r".+-[0-9a-f]{16}", host_hash())
    assert len({host_hash(), host_hash(salt="a"), host_hash(salt="b")}) == 3


def test_a_module_farandole_lacks_is_named_in_the_error():
    with pytest.raises(ModuleNotFoundError, match=r"no counterpart of Horovod's module: horovod\.nothing"):
        importlib.import_module("horovod.nothing.here")


def test_a_fresh_process_imports_horovod_without_a_framework_or_a_thread():
    program = (
        "import sys, threading, horovod; assert callable(horovod.run); assert horovod.__version__.startswith('0.28');"
        "assert not {'torch', 'tensorflow', 'pyspark'} & set(sys.modules); assert threading.active_count() == 1;"
        "import horovod.common.util, farandole.common.util;"
        "assert horovod.common.util is farandole.common.util"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
