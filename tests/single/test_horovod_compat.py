# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The drop-in `horovod` package: the same modules under the old names."""

import importlib
import os
import re
import subprocess
import sys

import pytest

DEEP = {
    "horovod.torch.mpi_ops": [
        "allreduce",
        "allreduce_async_",
        "alltoall",
        "reducescatter",
        "synchronize",
        "_basics",
    ],
    "horovod.torch.functions": [
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ],
    "horovod.torch.optimizer": ["DistributedOptimizer"],
    "horovod.torch.compression": ["Compression", "Compressor", "NoneCompressor", "FP16Compressor"],
    "horovod.torch.elastic": ["run", "TorchState", "ElasticSampler"],
    "horovod.common.util": ["num_rank_is_power_2", "split_list", "gpu_available"],
    "horovod.common.basics": ["HorovodBasics"],
    "horovod.common.process_sets": [
        "ProcessSet",
        "global_process_set",
        "add_process_set",
        "remove_process_set",
    ],
    "horovod.common.exceptions": [
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "HorovodVersionMismatchError",
    ],
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
    "horovod.spark.torch.estimator": [
        "TorchEstimatorParamsReadable",
        "TorchEstimatorParamsWritable",
    ],
    "horovod.spark.torch.datamodule": ["PetastormDataModule", "NVTabularDataModule"],
    "horovod.spark.lightning": ["TorchEstimator", "TorchModel"],
    "horovod.spark.common.estimator": ["HorovodEstimator", "HorovodModel"],
    "horovod.spark.common.params": ["EstimatorParams", "ModelParams"],
    "horovod.spark.common.util": [
        "prepare_data",
        "get_simple_meta_from_parquet",
        "check_validation",
        "to_list",
    ],
    "horovod.spark": ["run"],
    "horovod.runner": ["run"],
}


@pytest.fixture(autouse=True)
def _convention(monkeypatch):
    """The drop-in leaves a convention that the user chose; its own choice would hold for later
    tests.
    """
    monkeypatch.setenv("FARANDOLE_GRADIENT_CONVENTION", "farandole")


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


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("spark.common", "constants"),
        ("runner", "launch"),
        ("runner.util", "threads"),
        ("runner.common", "util"),
        ("runner.elastic", "worker"),
    ],
)
def test_a_module_of_the_drop_in_is_taken_from_its_package(package, name):
    space = {}
    exec(f"from horovod.{package} import {name} as taken\nimport horovod.{package}.{name}", space)
    assert space["taken"] is sys.modules[f"horovod.{package}.{name}"]
    assert space["taken"].__name__ == f"horovod.{package}.{name}"


def test_states_get_changes_of_hosts_from_one_class():
    worker = importlib.import_module("horovod.runner.elastic.worker")
    assert (
        worker.HostUpdateResult is importlib.import_module("horovod.torch").elastic.HostUpdateResult
    )


def test_a_module_farandole_lacks_is_named_in_the_error():
    with pytest.raises(
        ModuleNotFoundError, match=r"no counterpart of Horovod's module: horovod\.nothing"
    ):
        importlib.import_module("horovod.nothing.here")


def test_a_fresh_process_imports_horovod_without_a_framework_or_a_thread():
    program = (
        "import sys, threading, horovod; assert callable(horovod.run); assert "
        "horovod.__version__.startswith('0.28');assert not {'torch', 'tensorflow', 'pyspark'} & "
        "set(sys.modules); assert threading.active_count() == 1;import horovod.common.util, "
        "farandole.common.util;assert horovod.common.util is farandole.common.util"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "given", [None, "FARANDOLE_GRADIENT_CONVENTION", "HOROVOD_GRADIENT_CONVENTION"]
)
def test_the_drop_in_chooses_horovods_gradients_unless_the_user_has_chosen(given):
    program = (
        "import horovod, os\n"
        "from farandole.common import gradient_convention\n"
        "given = os.environ.get('FARANDOLE_GRADIENT_CONVENTION')\n"
        "print(gradient_convention.uses_horovod_gradients(), given)"
    )
    env = {name: value for name, value in os.environ.items() if "GRADIENT_CONVENTION" not in name}
    if given is not None:
        env[given] = "farandole"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env=env, capture_output=True
    )
    expected = {None: "True horovod", "FARANDOLE_GRADIENT_CONVENTION": "False farandole"}
    assert done.stdout.decode().strip() == expected.get(given, "False None")


def test_a_script_that_imports_farandole_has_its_gradients():
    program = (
        "from farandole.common import gradient_convention; "
        "assert not gradient_convention.uses_horovod_gradients()"
    )
    env = {name: value for name, value in os.environ.items() if "GRADIENT_CONVENTION" not in name}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=env)
