# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ray with several nodes, one of which is killed, and Ray Client: each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest
from tests.programs import program_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]

LIMIT = 280


NODE_DIES = program_path(__file__, "lose_node")

DRAINED = program_path(__file__, "drain_node")

NODE_OF_ELASTIC_DIES = program_path(__file__, "lose_elastic_node")

CLIENT = program_path(__file__, "run_by_client")


def script_output(script, folder, *words):
    """Returns the output of a script. Ray's client sends its token only if it is configured to."""
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
    }
    command = [sys.executable, script, folder, *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_node_that_dies_is_an_error_that_names_rank_and_node(tmp_path):
    out = script_output(NODE_DIES, tmp_path)
    assert "[(0, 2.0), (1, 2.0)]" in out
    assert re.search(r"died: the process of rank [01] on node [\d.]+ died: .*node has died", out), (
        out
    )


def test_a_job_by_ray_client_runs_in_the_cluster_and_callbacks_run_here(tmp_path):
    out = script_output(CLIENT, tmp_path)
    assert "[(0, 2.0), (1, 2.0)] [0, 1] [{'size': 2}]" in out
    assert "elastic [0, 1] [{'size': 2}]" in out
    assert "older [0, 1] [{'size': 2}]" in out
    assert "refused: RayBackend does not work with Ray Client" in out


@pytest.mark.parametrize("way", ["train", "executor"])
def test_a_worker_whose_node_ray_drains_leaves_at_its_next_commit_and_that_is_no_failure(
    tmp_path, way
):
    assert "sizes 2 1 True" in script_output(DRAINED, tmp_path, way)


def test_a_worker_that_the_others_need_stays_on_a_node_that_ray_drains_until_it_is_gone(tmp_path):
    out = script_output(DRAINED, tmp_path, "train-all")
    assert "trains on a draining node\ntrains with a successor\nsizes 2 2 True" in out


def test_an_elastic_job_loses_a_node_and_takes_in_the_worker_of_a_new_one(tmp_path):
    assert re.search(r"ended \[\(0, 2\), \(1, 2\)\]", script_output(NODE_OF_ELASTIC_DIES, tmp_path))
