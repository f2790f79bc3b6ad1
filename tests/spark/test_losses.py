# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Executors and drivers that are killed, on clusters whose executors are processes of their own."""

from __future__ import annotations

import re

import pytest
from tests.spark.deployments import KILLS, PATIENCE, drive, driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(250 * PATIENCE)]


@pytest.mark.timing
def test_workers_of_a_killed_executors_gang_end_in_five_seconds_and_the_user_sees_why(
    tmp_path, pids
):
    body = f"""
folder = {pids.folder!r}
spark = session("local-cluster[2,1,1024]", executor_cores="1")
def sleep():
    import os, time
    if len(os.listdir(folder)) >= 2:
        return "second time"
    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    time.sleep(600)
def kill():
    while len(os.listdir(folder)) < 2:
        time.sleep(0.02)
    kill_one()
threading.Thread(target=kill).start()
print(farandole.spark.run(sleep, num_proc=2))
spark.stop()
"""
    with driver(KILLS + body, tmp_path) as process:
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
    body = f"""
folder = {pids.folder!r}
spark = session({master!r})
def sleep():
    import os, subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    for pid in (child.pid, os.getpid()):
        os.close(os.open(os.path.join(folder, str(pid)), os.O_CREAT))
    time.sleep(600)
farandole.spark.run(sleep, num_proc=2)
"""
    with driver(body, tmp_path) as process:
        pids.wait(4, 90 * PATIENCE, process)
        process.kill()  # the driver alone: its JVM, its executors and their workers have to notice
        assert pids.gone(4, limit=5)


def test_with_dynamic_allocation_a_gang_forms_without_a_barrier_and_again_after_a_lost_executor(
    tmp_path, pids
):
    body = f"""
folder = {pids.folder!r}
spark = session("local-cluster[2,1,1024]", executor_cores="1", **{{
    "dynamicAllocation_enabled": "true", "dynamicAllocation_shuffleTracking_enabled": "true",
    "dynamicAllocation_minExecutors": "0", "dynamicAllocation_maxExecutors": "2",
    "dynamicAllocation_executorIdleTimeout": "5s"}})
def work():
    import os
    import numpy as np
    import farandole.numpy as hvd
    hvd.init()
    return hvd.allreduce(np.ones(2, dtype=np.float32), op=hvd.Sum).tolist(), hvd.size()
print("formed", farandole.spark.run(work, num_proc=2))

def uneven():
    import os, time
    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    seen = len([name for name in os.listdir(folder)])
    if os.environ["RANK"] == "0":
        return seen            # has ended well when the other is lost
    if seen <= 2:
        time.sleep(600)
    return seen
def running(name):
    try:
        return pathlib.Path(f"/proc/{{name}}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
def kill():
    # Until both have begun, and the one that does not sleep has ended.
    while len(os.listdir(folder)) < 2 or all(map(running, os.listdir(folder))):
        time.sleep(0.02)
    # The executor of the one that sleeps: its worker's agent's executor.
    from farandole.runner import warm_workers
    for name in sorted(os.listdir(folder)):
        pid = int(name)
        while pid > 1 and os.path.exists(f"/proc/{{pid}}"):
            if b"CoarseGrainedExecutorBackend" in pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return
            pid = warm_workers._parent_pid(pid)
threading.Thread(target=kill).start()
print("again", farandole.spark.run(uneven, num_proc=2))
try:
    farandole.spark.run(work, num_proc=3)
except ValueError as error:
    print(error)
spark.stop()
"""  # noqa: E501
    done = drive(KILLS + body, tmp_path, 240)
    assert "formed [([2.0, 2.0], 2), ([2.0, 2.0], 2)]" in done.stdout, done.stderr[-4000:]
    assert re.search(r"again \[[34], [34]\]", done.stdout), done.stdout + done.stderr[-4000:]
    assert (
        "num_proc=3 needs 3 task slots at the same time, but dynamic allocation gives at most 2"
        in done.stdout
    )
