# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Methods that a subclass of Horovod's classes overrides are called when the table says, with what
it says, and the others are not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.surface import hooks
from tests.surface.record_hooks import CLASS_MODULE, STORES, names_of, recording, run_elastic

from farandole.common import elastic
from farandole.spark.common.store import HDFSStore

ROOT = Path(__file__).parents[2]
FACTS = json.loads(Path(__file__).with_name("hooks.json").read_text())
STATES = {
    "states_of_torch": (
        "horovod.torch.elastic.state",
        ["ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "TorchState"],
    ),
    "states_of_tensorflow": (
        "horovod.tensorflow.elastic",
        ["TensorFlowState", "TensorFlowKerasState"],
    ),
}
HDFS = "horovod.spark.common.store: HDFSStore"


def recorded(*arguments, keras_backend="torch"):
    """Returns what the recording process printed."""
    env = {**os.environ, "KERAS_BACKEND": keras_backend, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.surface.record_hooks", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows_called_by(rows, *ways):
    """The methods of a class that are called by one of the ways, with their arguments."""
    return [[name, row["arguments"]] for name, row in rows.items() if set(ways) & set(row["by"])]


def arguments_of(rows):
    """The arguments of each method of a class."""
    return {name: row["arguments"] for name, row in rows.items()}


def test_every_method_is_called_or_has_a_reason():
    reasons = hooks.uncalled()
    every = [(kind, method) for kind, methods in FACTS.items() for method in methods]
    assert [
        f"{kind}.{method}"
        for kind, method in every
        if (method in hooks.CALLED.get(kind, {})) == (f"{kind}.{method}" in reasons)
    ] == []
    assert set(reasons) <= {f"{kind}.{method}" for kind, method in every}
    assert set(hooks.CALLED) <= set(FACTS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", hooks.FITS)
@pytest.mark.parametrize("framework", CLASS_MODULE)
def test_a_fit_calls_the_hooks_of_subclasses_in_order(framework, way):
    module = CLASS_MODULE[framework]
    found = recorded("fit", framework, way)
    assert found["calls"]["estimator"] == rows_called_by(hooks.CALLED[f"{module}Estimator"], way)
    assert found["calls"]["model"] == rows_called_by(
        hooks.CALLED[f"{module}Model"], "transform", "getOptimizer"
    )
    assert found["calls"]["backend"] == rows_called_by(hooks.BACKEND, way)
    assert sorted(found["calls"]["store"]) == sorted(rows_called_by(hooks.STORE, way))
    assert found["model"].startswith("Recording")
    assert found["metadata"] == {"x": "DenseVector", "y": "FloatType"}
    assert found["run"].startswith("keras_" if framework == "keras" else "pytorch_")


def test_a_store_in_hdfs_calls_its_hooks():
    calls = {}
    store = recording(HDFSStore, names_of(*STORES, HDFS), calls)("hdfs://a-host:8020/store")
    calls.clear()
    path = store.get_data_metadata_path(store.get_train_data_path())
    assert path == "hdfs://a-host:8020/store/intermediate_train_data/_manifest.json"
    expected = arguments_of(hooks.HDFS_STORE)
    assert {name: calls[name] for name in calls if name in FACTS[HDFS]} == expected


@pytest.mark.timeout(240)
def test_keras_calls_the_hooks_of_callbacks():
    found = recorded("callbacks")
    assert set(found) == set(hooks.CALLBACKS)
    for name, rows in hooks.CALLBACKS.items():
        assert found[name] == arguments_of(rows), name


def test_an_elastic_run_calls_the_hooks_of_states():
    calls = {}
    names = names_of("horovod.common.elastic: State", "horovod.common.elastic: ObjectState")
    kind = recording(elastic.ObjectState, names, calls)
    state = kind(lambda value, **_: value, lambda: 0, epoch=0)
    calls.clear()
    run_elastic(state)
    assert calls == arguments_of(hooks.STATE)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("framework", STATES)
def test_an_elastic_run_calls_the_hooks_of_states_of_a_framework(framework):
    module, kinds = STATES[framework]
    backend = "tensorflow" if "tensorflow" in framework else "torch"
    found = recorded(framework, keras_backend=backend)
    for kind in kinds:
        rows = hooks.CALLED[f"{module}: {kind}"]
        # Each handler has been replaced by an assignment, which the base class has a row for.
        expected = hooks.HANDLER if kind.endswith("Handler") else rows
        assert rows.items() <= expected.items()
        assert found[kind] == arguments_of(expected), kind
    assert set(found) == set(kinds)


def test_no_class_of_the_table_is_without_a_recorded_subclass():
    fits = [
        f"{module}{kind}" for module in CLASS_MODULE.values() for kind in ("Estimator", "Model")
    ]
    states = [f"{module}: {kind}" for module, kinds in STATES.values() for kind in kinds]
    callbacks = [kind for kind in hooks.CALLED if kind.startswith("horovod._keras.")]
    tested = [hooks.CALLED[kind] for kind in [*fits, *states, *callbacks]]
    tested += [hooks.STORE, hooks.BACKEND, hooks.HDFS_STORE, hooks.HANDLER]
    for kind, rows in hooks.CALLED.items():
        assert any(rows.items() <= others.items() for others in tested), kind
