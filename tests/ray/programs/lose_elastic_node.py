# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs an elastic function on two nodes of a Ray cluster, removes one and adds another."""

import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

import ray
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
