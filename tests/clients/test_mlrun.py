# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MLRun: its PyTorch and Keras interfaces in an MPI job, and the options of the job.

The test is in the place of MLRun's server and of the MPI operator: it provides the run's
specification, by which MLRun knows that it runs an MPI job, and the host name of a pod.
"""

from __future__ import annotations

import json

import pytest
from tests.clients.environments import client_variables, described, run_program, run_words
from tests.needs import skipped_without
from tests.programs import program_path
from tests.spark.deployments import can_unshare

pytestmark = [
    pytest.mark.timeout(600),
    skipped_without(None if can_unshare() else "root for namespaces"),
]

RUN = {"name": "train", "project": "p", "uid": "1", "labels": {"kind": "mpijob"}}
POD = 'hostname train-worker-0; exec "$@"'


def run_in_job(client, name, **variables):
    """Runs a program on two ranks of an MPI job."""
    specification = json.dumps({"metadata": RUN, "spec": {}})
    env = client_variables(client, MLRUN_EXEC_CONFIG=specification, **variables)
    program = str(program_path(__file__, name))
    words = ["horovodrun", "-np", "2", "python", program]
    done = run_words(["unshare", "--uts", "sh", "-c", POD, "pod", *words], env)
    assert done.returncode == 0, described(done)
    return done


def test_a_torch_model_trains_in_a_job_with_a_timeline_and_autotuning(tmp_path):
    made = run_program("mlrun", "mlrun_function", tmp_path)
    assert made.returncode == 0, described(made)
    variables = json.loads(made.stdout.splitlines()[-1])
    assert variables["HOROVOD_AUTOTUNE"] == "1"
    # A dash in a name is MLRun's: no Horovod reads it.
    variables = {name: value for name, value in variables.items() if "-" not in name}
    done = run_in_job("mlrun", "mlrun_torch", **variables)
    for rank in range(2):
        assert f"rank {rank} of 2 has the weights of one process" in done.stdout, described(done)
        assert f"Horovod worker #{rank} is using CPU" in done.stdout, described(done)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("name") == "ALLREDUCE" for event in events), events[:20]
    assert (tmp_path / "autotune.csv").read_text(), "autotuning writes its samples"


def test_a_keras_model_trains_in_a_job():
    done = run_in_job("mlrun-keras", "mlrun_keras")
    for rank in range(2):
        assert f"rank {rank} of 2 has the weights of the other" in done.stdout, described(done)
