# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The hooks of Horovod's classes are called when the table says, with what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.surface import hooks

ROOT = Path(__file__).parents[2]
ESTIMATORS = {
    "torch": "TorchEstimator", "lightning": "LightningEstimator", "keras": "KerasEstimator",
}  # fmt: skip


def recorded_fit(framework, way):
    """Returns what a fit of a recording subclass printed."""
    rows = hooks.CALLED[ESTIMATORS[framework]]
    env = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.surface.record_hooks", framework, way, *rows]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", hooks.FITS)
@pytest.mark.parametrize("framework", ESTIMATORS)
def test_a_fit_calls_the_hooks_of_a_subclass_in_horovods_order(framework, way):
    rows = hooks.CALLED[ESTIMATORS[framework]]
    found = recorded_fit(framework, way)
    expected = [[name, row["arguments"]] for name, row in rows.items() if way in row["by"]]
    assert found["calls"] == expected
    assert found["model"] == "ModelOfSubclass"
    assert found["runs"] == 1
    assert found["metadata"] == {"x": "DenseVector", "y": "FloatType"}
    assert found["run"].startswith("keras_" if framework == "keras" else "pytorch_")
