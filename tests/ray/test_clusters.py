# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ray with several nodes, one of which is killed, and Ray Client: each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LIMIT = 200

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

CLIENT = (
    TRAIN
    + """
import subprocess, sys, socket, ray
from pathlib import Path
from farandole.ray import RayExecutor, ray_logger

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
subprocess.run(
    [ray_command, "start", "--head", "--num-cpus=4", "--include-dashboard=false", "--port", free(),
     "--ray-client-server-port", door, "--disable-usage-stats"],
    check=True, stdout=subprocess.DEVNULL,
)
try:
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
    ray.shutdown()
finally:
    subprocess.run([ray_command, "stop"], check=False, stdout=subprocess.DEVNULL)
"""
)


def told(script, folder):
    """What a script prints. Ray's client sends its token only where it is told to."""
    (folder / "script.py").write_text(script)
    env = {**os.environ, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, folder / "script.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_node_that_dies_is_an_error_that_names_rank_and_node(tmp_path):
    out = told(NODE_DIES, tmp_path)
    assert "[(0, 2.0), (1, 2.0)]" in out
    assert re.search(r"died: the process of rank [01] on node [\d.]+ died: .*node has died", out), out


def test_a_job_by_ray_client_runs_in_the_cluster_and_callbacks_run_here(tmp_path):
    out = told(CLIENT, tmp_path)
    assert "[(0, 2.0), (1, 2.0)] [0, 1] [{'size': 2}]" in out
    assert "elastic [0, 1] [{'size': 2}]" in out
