# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on two nodes of a Ray cluster, and has Ray drain one of them."""

import sys
import threading
import time
from pathlib import Path

import ray.train
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import ray

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
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False}
)
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
print(
    "sizes",
    sizes[first],
    sizes[-1],
    sizes[first:] == sorted(sizes[first:], reverse=True),
    flush=True,
)
ray.shutdown()
cluster.shutdown()
