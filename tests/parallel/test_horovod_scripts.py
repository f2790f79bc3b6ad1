# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Scripts that were written for Horovod run with the drop-in, unchanged, and get Horovod's results.

They lie in `tests/horovod_scripts`, one for each framework and feature, and check themselves.
`horovodrun` starts them on two ranks; those of Spark start their own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "horovod_scripts"
LIMIT = 240
RUN = [sys.executable, "-m", "horovod.runner.launch", "-np", "2"]

ON_TWO_RANKS = {
    "torch_train": False,
    "torch_accumulation": False,
    "torch_collectives": False,
    "torch_join": True,
    "torch_process_sets": True,
    "torch_adasum": True,
    "torch_sync_batch_norm": True,
    "torch_elastic": True,
    "tensorflow2_tape": False,
    "tensorflow2_keras": True,
    "keras_standalone": True,
}
"""The scripts, and whether a run is left to the slow tests."""
ON_SPARK = ["spark_run", "spark_torch", "spark_lightning", "spark_keras"]
ON_RAY = ["ray_executor", "ray_elastic", "ray_tune"]
"""`tests/ray` runs them."""


def environment(**more):
    env = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **more,
    }
    env.pop("FARANDOLE_GRADIENT_CONVENTION", None)
    return env


def run(*command):
    """Returns the output of a command, which must succeed."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def script_path(script):
    if (
        script.startswith(("tensorflow", "keras", "spark_keras"))
        and find_spec("tensorflow") is None
    ):
        pytest.skip("needs TensorFlow")
    return SCRIPTS / f"{script}.py"


def as_marked(scripts):
    return [
        pytest.param(name, marks=[pytest.mark.slow] if slow else [], id=name)
        for name, slow in scripts.items()
    ]


def test_every_script_is_run_by_a_test():
    found = {path.stem for path in SCRIPTS.glob("*.py")}
    assert found == {*ON_TWO_RANKS, *ON_SPARK, *ON_RAY, "tensorflow2_data_service"}


@pytest.mark.parametrize("script", as_marked(ON_TWO_RANKS))
def test_a_script_of_horovods_runs_on_two_ranks(script, tmp_path):
    told = run(*RUN, sys.executable, script_path(script), tmp_path)
    assert sorted(line for line in told.splitlines() if ":done" in line) == [
        "[0]<stdout>:done 0",
        "[1]<stdout>:done 1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_SPARK)
def test_a_script_of_horovods_runs_on_spark(script, tmp_path):
    pytest.importorskip("pyspark")
    assert "done 0" in run(sys.executable, script_path(script), tmp_path).splitlines()


@pytest.mark.slow
def test_two_jobs_of_horovods_share_a_data_service(tmp_path):
    trainers, config = script_path("tensorflow2_data_service"), tmp_path / "service.json"
    workers = subprocess.Popen(
        [*RUN, sys.executable, "-m", "horovod.tensorflow.data.compute_worker", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "FARANDOLE_TF_DATA_OPEN_TO_THE_NETWORK": "1"},
    )
    try:
        told = run(*RUN, sys.executable, trainers, config)
        said, _ = workers.communicate(timeout=LIMIT)
    finally:
        workers.kill()
        workers.wait()
    assert told.count(":done ") == 2
    assert workers.returncode == 0, said
