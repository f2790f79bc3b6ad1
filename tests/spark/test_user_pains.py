# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Problems that users of Horovod on Spark reported, one a test. The numbers are those of the
list of pains.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import time

import pytest
from tests.spark.deployments import PATIENCE, can_unshare, drive, pod, standalone

import farandole.spark
from farandole.spark import FarandoleJobError
from farandole.spark.common.backend import LocalBackend
from farandole.spark.task import choose_gpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 * PATIENCE, func_only=True)]


@pytest.mark.parametrize(
    ("count", "local_rank", "addresses", "visible", "index"),
    [
        (4, 1, ["3"], None, 3),  # Spark's own address, all GPUs in sight
        (2, 1, ["3"], "2,3", 1),  # Spark counts the host's, the mask hides two
        (1, 1, ["0"], "3", 0),  # the cluster manager shows each task one, Spark counts from it
        (2, 0, ["1"], "6,7", 1),  # an executor's two, counted within the mask
        (1, 1, ["5"], None, 0),  # a container with one device and the host's number
        (2, 3, [], None, 1),  # none assigned: by local rank, shared where there are more ranks
        (2, 1, ["7"], None, 1),  # nonsense: better the local rank's than an invalid one
        (2, 1, ["GPU-b"], "GPU-a,GPU-b", 1),
    ],
)
def test_13_an_invalid_device_ordinal_or_several_ranks_on_one_gpu(
    count, local_rank, addresses, visible, index
):
    choice = choose_gpu(count, local_rank, 4, addresses, visible)
    assert choice is not None
    assert choice.index == index
    assert (addresses[0] if addresses else "Spark assigned none") in choice.reason


def test_13_the_choice_of_a_gpu_is_logged_by_every_rank_and_the_old_switch_is_honoured(spark):
    def choose():
        import os

        from farandole.spark import task

        # Two GPUs and an assignment, as far as this code can tell.
        os.environ[task.RESOURCES_VARIABLE] = '{"gpu": ["1"]}'
        first = task.choose_own_gpu(2, 0, 2)
        os.environ["HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"] = "1"
        second = task.choose_own_gpu(2, 0, 2)
        return first.index, second.index

    import io

    log = io.StringIO()
    assert farandole.spark.run(choose, num_proc=2, stderr=log) == [(1, 0)] * 2
    for rank in range(2):
        assert (
            f"[{rank}]<stderr>:farandole: rank {rank} takes GPU 1 of 2: Spark assigned 1"
            in log.getvalue()
        )
    assert choose_gpu(0, 0, 1, ["0"]) is None


def test_15_ten_minutes_of_waiting_and_then_timed_out(spark):
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=r"num_proc=12 needs 12 task slots at the same time, but .* has 2"
    ):
        farandole.spark.run(lambda: None, num_proc=12)
    assert time.monotonic() - started < 30


def test_16_http_request_failed_as_executors_grow_past_a_dozen():
    def size():
        import os

        return os.environ["WORLD_SIZE"]

    assert LocalBackend(24, warm=False).run(size) == ["24"] * 24


def test_17_one_or_more_processes_exited_with_non_zero_status(spark):
    def train():
        import os
        import sys

        print("epoch 7, loss is nan", file=sys.stderr)
        if os.environ["RANK"] == "1":
            raise FloatingPointError("loss is nan after 211 steps")

    with pytest.raises(FarandoleJobError) as caught:
        farandole.spark.run(train, num_proc=2)
    error = caught.value
    assert error.rank == 1
    assert error.host
    assert isinstance(error.__cause__, FloatingPointError)
    assert "in train" in error.remote_traceback
    assert "epoch 7, loss is nan" in str(error)


def test_18_the_timeline_is_a_single_bracket(spark, tmp_path):
    def train():
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        for step in range(3):
            hvd.allreduce(np.ones(100, dtype=np.float32), name=f"gradient.{step}")
        hvd.shutdown()

    farandole.spark.run(
        train, num_proc=2, env={"FARANDOLE_TIMELINE": f"{tmp_path}/timeline.{{rank}}.json"}
    )
    for rank in range(2):
        events = json.loads((tmp_path / f"timeline.{rank}.json").read_text())
        assert any("gradient.2" in json.dumps(event) for event in events)
        assert any("ALLREDUCE" in event.get("name", "") for event in events)


PLACES = """
def describe_rank():
    import os
    import numpy as np
    import farandole.numpy as hvd
    from farandole.spark.task import get_available_devices
    hvd.init()
    total = hvd.allreduce(np.ones(3, dtype=np.float32), op=hvd.Sum).tolist()
    return hvd.local_size(), hvd.cross_size(), total, get_available_devices()
"""


@pytest.fixture(scope="module")
def in_containers(tmp_path_factory):
    """The output of ranks in two containers, with connections in both directions, then from
    executors only.
    """
    body = """
spark = session(os.environ["MASTER_URL"], executor_cores="1")
print(farandole.spark.run(describe_rank, num_proc=2))
os.environ["FARANDOLE_DIAL_OUT"] = "1"
print(farandole.spark.run(describe_rank, num_proc=2))
spark.stop()
"""
    directory = tmp_path_factory.mktemp("containers")
    with standalone(
        directory, {"CONTAINER_ID": "container_1"}, {"CONTAINER_ID": "container_2"}
    ) as url:
        done = drive(PLACES + body, directory, 150, MASTER_URL=url)
    return [ast.literal_eval(line) for line in done.stdout.strip().splitlines()[-2:]]


TWO_HOSTS = [(1, 2, [2.0] * 3, [])] * 2


@pytest.mark.slow
def test_14_sixteen_processes_of_one_host_share_one_containers_memory_and_are_killed(in_containers):
    # Two containers of one host are two hosts: nobody counts on the other's memory.
    assert in_containers[0] == TWO_HOSTS


@pytest.mark.slow
def test_ranks_of_executors_that_only_dial_out_are_linked_through_the_drivers_port(in_containers):
    # Whether one could dial the other is for tests/launcher to show.
    assert in_containers[1] == TWO_HOSTS


@pytest.mark.slow
@pytest.mark.skipif(
    not can_unshare(), reason="this machine gives processes no namespaces of their own"
)
def test_14_two_pods_of_one_kubernetes_node_count_on_memory_that_they_do_not_share(tmp_path):
    body = """
spark = session(os.environ["MASTER_URL"], executor_cores="1")
print(farandole.spark.run(describe_rank, num_proc=2))
print(farandole.spark.run(lambda: open("/proc/sys/kernel/hostname").read().strip(), num_proc=2))
spark.stop()
"""
    with standalone(tmp_path, {}, {}, inside=[pod("fit-exec-1"), pod("fit-exec-2")]) as url:
        done = drive(PLACES + body, tmp_path, 150, MASTER_URL=url)
    places, names = done.stdout.strip().splitlines()[-2:]
    assert ast.literal_eval(places) == TWO_HOSTS
    assert sorted(ast.literal_eval(names)) == ["fit-exec-1", "fit-exec-2"]


@pytest.mark.slow
def test_13_addresses_that_spark_found_reach_the_ranks(tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m farandole.spark.gpus\n")
    script.chmod(0o755)
    asked = tmp_path / "nvidia-smi"
    asked.write_text("#!/bin/sh\necho 6; echo 7\n")
    asked.chmod(0o755)
    body = f"""
spark = session("local-cluster[1,2,1024]", executor_cores="2", **{{
    "task_resource_gpu_amount": "1", "executor_resource_gpu_amount": "2",
    "worker_resource_gpu_amount": "2", "worker_resource_gpu_discoveryScript": {str(script)!r}}})
print(sorted(found[3] for found in farandole.spark.run(describe_rank, num_proc=2)))
spark.stop()
"""
    done = drive(PLACES + body, tmp_path, 150, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert re.search(r"^\[\['6'\], \['7'\]\]$", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr[-2000:]
    )
