# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Methods that a subclass of Horovod's classes overrides are called when the table says, with what
it says.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.surface import hooks
from tests.surface.record_hooks import CLASS_MODULE, recording

from farandole.common import elastic
from farandole.common.exceptions import FarandoleInternalError

ROOT = Path(__file__).parents[2]
FACTS = json.loads(Path(__file__).with_name("hooks.json").read_text())


def recorded(*arguments):
    """Returns what the recording process printed."""
    env = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.surface.record_hooks", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows_called_by(rows, *ways):
    """The methods of a class that are called by one of the ways, with their arguments."""
    return [[name, row["arguments"]] for name, row in rows.items() if set(ways) & set(row["by"])]


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
    found = recorded(framework, way)
    assert found["calls"]["estimator"] == rows_called_by(hooks.CALLED[f"{module}Estimator"], way)
    assert found["calls"]["model"] == rows_called_by(
        hooks.CALLED[f"{module}Model"], "transform", "getOptimizer"
    )
    backend = hooks.CALLED["horovod.spark.common.backend: Backend"]
    assert found["calls"]["backend"] == rows_called_by(backend, way)
    assert sorted(found["calls"]["store"]) == sorted(rows_called_by(hooks.STORE, way))
    assert found["model"].startswith("Recording")
    assert found["metadata"] == {"x": "DenseVector", "y": "FloatType"}
    assert found["run"].startswith("keras_" if framework == "keras" else "pytorch_")


@pytest.mark.timeout(240)
def test_keras_calls_the_hooks_of_callbacks():
    found = recorded("callbacks")
    assert set(found) == set(hooks.CALLBACKS)
    for name, rows in hooks.CALLBACKS.items():
        expected = {method: row["arguments"] for method, row in rows.items()}
        assert found[name] == expected, name


def test_an_elastic_run_calls_the_hooks_of_states(monkeypatch):
    changes = [[], [(1.0, elastic.HostUpdateResult.added)], []]
    monkeypatch.setattr(elastic, "engine", SimpleNamespace(host_changes=lambda: changes.pop(0)))
    calls, ended = {}, []
    kind = recording(elastic.ObjectState, hooks.STATE, calls)
    state = kind(lambda value, **_: value, lambda: 0, epoch=0)
    calls.clear()
    state.register_reset_callbacks([lambda: ended.append("a callback")])

    def train(state):
        state.commit()
        if len(ended) == 0:
            raise FarandoleInternalError("a peer is lost")
        return "done"

    assert elastic.run_fn(train, lambda: ended.append("a world"))(state) == "done"
    assert calls == {name: row["arguments"] for name, row in hooks.STATE.items()}
    assert ended == ["a world", "a callback"] * 2
