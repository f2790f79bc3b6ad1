# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Executors and drivers that are killed, on clusters whose executors are processes of their own."""

from __future__ import annotations

import re

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, drive, driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(250 * PATIENCE)]


@pytest.mark.timing
def test_workers_of_a_killed_executors_gang_end_in_five_seconds_and_the_user_sees_why(
    tmp_path, pids
):
    body = program_path(__file__, "kill_executor_of_gang")
    with driver(body, tmp_path, pids.folder) as process:
        pids.wait(2, 90 * PATIENCE, process)
        gone = pids.gone(2, limit=6)
        out, err = process.communicate(timeout=90 * PATIENCE)
    assert gone, err[-3000:]
    assert "['second time', 'second time']" in out, err[-3000:]
    assert re.search(r"task \d \(rank \d on \S+\) was lost: its agent's connection closed", err), (
        err[-3000:]
    )
    assert "was started again by Spark" in err


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
@pytest.mark.timing
def test_a_killed_driver_leaves_no_worker_for_five_seconds(master, tmp_path, pids):
    body = program_path(__file__, "sleep_in_driver")
    with driver(body, tmp_path, pids.folder, master) as process:
        pids.wait(4, 90 * PATIENCE, process)
        process.kill()  # the driver alone: its JVM, its executors and their workers have to notice
        assert pids.gone(4, limit=5)


def test_with_dynamic_allocation_a_gang_forms_without_a_barrier_and_again_after_a_lost_executor(
    tmp_path, pids
):
    body = program_path(__file__, "allocate_dynamically")
    done = drive(body, tmp_path, 240, pids.folder)
    assert "formed [([2.0, 2.0], 2), ([2.0, 2.0], 2)]" in done.stdout, done.stderr[-4000:]
    assert re.search(r"again \[[34], [34]\]", done.stdout), done.stdout + done.stderr[-4000:]
    assert (
        "num_proc=3 needs 3 task slots at the same time, but dynamic allocation gives at most 2"
        in done.stdout
    )
