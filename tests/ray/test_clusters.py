# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ray with several nodes, one of which is killed, and Ray Client: each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(330)]

LIMIT = 280

TRAIN = """
def train():
    import numpy as np
    import farandole.numpy as hvd
    hvd.init()
    return hvd.rank(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()
"""

NODE_DIES = (
    TRAIN
    + """
import ray
from ray.cluster_utils import Cluster
from farandole.ray import RayExecutor
from farandole.runner.errors import FarandoleJobError

def wait():
    import time, numpy as np
    import farandole.numpy as hvd
    hvd.init()
    while True:
        hvd.allreduce(np.ones(1))
        time.sleep(0.05)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
made = RayExecutor(RayExecutor.create_settings(), num_hosts=2, num_workers_per_host=1)
made.start()
print(made.run(train), flush=True)
import threading
threading.Timer(2, cluster.remove_node, [other]).start()
try:
    made.run(wait)
except FarandoleJobError as error:
    print("died:", error, flush=True)
made.shutdown()
ray.shutdown()
cluster.shutdown()
"""
)

DRAINED = """
import sys, threading, time
from pathlib import Path
import ray, ray.train
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

folder, way = Path(sys.argv[1]), sys.argv[2]

def loop():
    import torch
    import farandole.torch as hvd
    hvd.init()
    state = hvd.elastic.TorchState(step=0, alone=0)
    @hvd.elastic.run
    def steps(state):
        while state.step < 900 and state.alone < 3 and not (folder / "enough").exists():
            hvd.allreduce(torch.ones(1), name="one")
            (folder / f"{state.step:03}.{hvd.size()}").touch()
            state.step += 1
            state.alone += hvd.size() == 1 and bool(list(folder.glob("*.2")))
            time.sleep(0.1)
            state.commit()
            if way != "executor" and state.step % 2 == 0:
                ray.train.report({"step": state.step})
    steps(state)

cpus = {"train": 2, "train-all": 3, "executor": 1}[way]
cluster = Cluster(initialize_head=True,
    head_node_args={"num_cpus": cpus, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

def waited(condition):
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)

def steps_of_two():
    return len(list(folder.glob("*.2")))

def stays():
    logs = Path(cluster.head_node.get_logs_dir_path())
    files = [one for one in logs.rglob("*") if one.is_file()]
    return any("stays on its node for now" in one.read_text(errors="replace") for one in files)

def drain():
    waited(steps_of_two)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = gcs.drain_node(other.node_id, reason, "spot", int(1000 * (time.time() + 240)))
    assert accepted, why
    if way == "train-all":
        try:
            waited(stays)  # the job has seen the drain
            before = steps_of_two()
            waited(lambda: steps_of_two() > before + 5)
            print("trains on a draining node", flush=True)
            cluster.remove_node(other)
            before = steps_of_two()
            waited(lambda: steps_of_two() > before + 10)
            print("trains with a successor", flush=True)
        finally:
            (folder / "enough").touch()

thread = threading.Thread(target=drain)
thread.start()
if way == "executor":
    from farandole.ray import RayExecutor
    made = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
    made.start()
    made.run(loop)
    made.shutdown()
else:
    from farandole.ray.train import DataParallelTrainer, FarandoleConfig
    spread, least = {"train": ("STRICT_SPREAD", 1), "train-all": ("SPREAD", None)}[way]
    DataParallelTrainer(
        loop,
        backend_config=FarandoleConfig(elastic=True, min_workers=least),
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy=spread),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "results"),
            failure_config=ray.train.FailureConfig(max_failures=1 if least is None else 0),
        ),
    ).fit()
thread.join()
sizes = [int(one.name.split(".")[1]) for one in sorted(folder.glob("*.[12]"))]
first = sizes.index(2)
print("sizes", sizes[first], sizes[-1], sizes[first:] == sorted(sizes[first:], reverse=True),
    flush=True)
ray.shutdown()
cluster.shutdown()
"""

NODE_OF_ELASTIC_DIES = """
import sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from farandole.ray import RayExecutor

folder = Path(sys.argv[1])

def loop():
    import torch
    import farandole.torch as hvd
    hvd.init()
    state = hvd.elastic.TorchState(step=0)
    @hvd.elastic.run
    def steps(state):
        while not (folder / "enough").exists():
            hvd.allreduce(torch.ones(1), name="one")
            (folder / f"size.{hvd.size()}").touch()
            state.step += 1
            time.sleep(0.1)
            state.commit()
        return hvd.rank(), hvd.size()
    return steps(state)

def waited(name):
    deadline = time.monotonic() + 100
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.1)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

made = RayExecutor(RayExecutor.create_settings(), min_workers=1, max_workers=2)
made.start()
ended = []
thread = threading.Thread(target=lambda: ended.append(made.run(loop)))
thread.start()
try:  # in the main thread, which alone may start nodes
    waited("size.2")
    cluster.remove_node(other)
    (folder / "size.2").unlink()
    waited("size.1")
    cluster.add_node(num_cpus=1)
    (folder / "size.2").unlink(missing_ok=True)
    waited("size.2")
finally:
    (folder / "enough").touch()
    thread.join()
print("ended", *ended, flush=True)
made.shutdown()
ray.shutdown()
cluster.shutdown()
"""

CLIENT = (
    TRAIN
    + """
import subprocess, sys, socket, ray
from pathlib import Path
from farandole.ray import ElasticRayExecutor, RayBackend, RayExecutor, ray_logger

def log():
    from farandole.ray import ray_logger
    import farandole.torch as hvd
    hvd.init()
    if hvd.rank() == 0:
        ray_logger.log({"size": hvd.size()})
    return hvd.rank()

def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])

ray_command = str(Path(sys.executable).with_name("ray"))
door = free()
# It ends with its process. `ray stop` would end every Ray of this machine, and drivers that use one with it.
head = subprocess.Popen(
    [ray_command, "start", "--head", "--num-cpus=4", "--include-dashboard=false", "--port", free(),
     "--ray-client-server-port", door, "--disable-usage-stats", "--block"],
    stdout=subprocess.PIPE, text=True,
)
try:
    for line in head.stdout:
        if "Ray runtime started" in line:
            break
    import threading
    threading.Thread(target=head.stdout.read, daemon=True).start()
    ray.init("ray://127.0.0.1:" + door)
    made = RayExecutor(RayExecutor.create_settings(), num_workers=2)
    made.start()
    seen = []
    print(made.run(train), made.run(log, callbacks=[seen.append]), seen, flush=True)
    made.shutdown()
    made = RayExecutor(RayExecutor.create_settings(), min_workers=2, max_workers=2)
    made.start()
    seen = []
    print("elastic", made.run(log, callbacks=[seen.append]), seen, flush=True)
    made.shutdown()
    made = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2))
    made.start()
    seen = []
    print("older", made.run(log, callbacks=[seen.append]), seen, flush=True)
    try:
        RayBackend(2).run(train)
    except RuntimeError as error:
        print("refused:", error, flush=True)
    del made
    ray.shutdown()
finally:
    head.terminate()
    head.wait(60)
"""  # noqa: E501
)


def script_output(script, folder, *words):
    """Returns the output of a script. Ray's client sends its token only if it is configured to."""
    (folder / "script.py").write_text(script)
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
    }
    command = [sys.executable, folder / "script.py", folder, *words]
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
