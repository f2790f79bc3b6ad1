# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Flyte's plugin for Kubeflow's MPI operator: the command line of its `HorovodJob`.

The test is in the place of Flyte and of the operator: it fills in the templates of the command,
writes the inputs, and provides the discovery script and the interface `eth0` of a pod.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.clients.environments import client_variables, described, run_program, run_words
from tests.needs import skipped_without
from tests.spark.deployments import can_unshare

pytestmark = pytest.mark.timeout(600)

POD = """
ip link set lo up
ip link add eth0 type veth peer name host0
ip address add 192.0.2.77/24 dev eth0
ip link set eth0 up
ip link set host0 up
exec "$@"
"""
"""A network with the interface that the plugin names."""


@skipped_without(None if shutil.which("ip") and can_unshare() else "ip, and root for namespaces")
def test_the_command_of_a_horovod_job_runs_as_it_is(tmp_path):
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    programs = str(Path(__file__).with_name("programs"))
    variables = {"DISCOVERY_SCRIPT": str(script), "PYTHONPATH": programs}
    made = run_program("kfmpi", "flyte_task", tmp_path, **variables)
    assert made.returncode == 0, described(made)
    command = json.loads(made.stdout.splitlines()[-1])
    assert command[:2] == ["horovodrun", "-np"]
    filled = {
        "{{.input}}": tmp_path / "inputs.pb",
        "{{.outputPrefix}}": tmp_path / "out",
        "{{.rawOutputDataPrefix}}": tmp_path / "raw",
        "{{.checkpointOutputPrefix}}": tmp_path / "checkpoint",
        "{{.prevCheckpointPrefix}}": "",
        "__main__": "flyte_task",
    }
    words = [str(filled.get(word, word)) for word in command]
    assert not any("{{" in word for word in words), words
    env = client_variables("kfmpi", **variables)
    done = run_words(["unshare", "--net", "sh", "-c", POD, "pod", *words], env)
    assert done.returncode == 0, described(done)
    for rank in range(2):
        assert f"rank {rank} of 2: 7.5" in done.stdout, described(done)
    written = run_program("kfmpi", "flyte_output", tmp_path / "out")
    assert written.stdout.split()[-1] == "7.5", described(written)
