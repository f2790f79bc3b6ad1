# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver that fits once for each line of its input, and kills an executor in that phase."""

import json
import os
import pathlib
import sys

import torch
from driver_session import session
from executor_kills import executors, kill_one, until_executors

from farandole.runner import gang
from farandole.spark.common import LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator

spark = session("local-cluster[2,1,1024]", executor_cores="1")
store = LocalStore(os.getcwd() + "/store")
frame = spark.range(0, 600, 1, 4).selectExpr(
    "cast(id % 11 as float) as x", "cast(id % 11 as float) * 2 + 1 as y"
)


def fit(name, warm, frame=frame):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    estimator = TorchEstimator(
        backend=SparkBackend(2, warm=warm),
        model=model,
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=20,
        epochs=4,
        random_seed=1,
        input_shapes=[[-1, 1]],
        verbose=1,
        run_id=name,
        store=store,
    )
    return {
        name: value.tolist() for name, value in estimator.fit(frame).getModel().state_dict().items()
    }


class Saboteur:
    """Kills an fork_server_owner_pid when the gang's driver hears of something, once."""

    def __init__(self, phase):
        self.phase, self.done, self.records = phase, False, 0

    def __call__(self, gang_, event):
        original(gang_, event)
        self.records += event.kind == "metric"
        there = any(pathlib.Path("store/runs", self.phase).rglob("checkpoint*"))
        now = {
            "register": event.kind == "registered",
            "start": event.kind == "assigned",
            "train": self.records > 0,
            "checkpoint": self.records > 0 and there,
            "result": event.kind == "result",
        }
        if not self.done and now.get(self.phase, False):
            self.done = True
            kill_one()


def killing(batches):
    # Runs in an executor: the first task that gets here takes its executor along.
    import os
    import signal

    from farandole.runner.warm_workers import fork_server_owner_pid

    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield from batches
        return
    os.kill(fork_server_owner_pid(), signal.SIGKILL)
    yield from batches


marker = os.getcwd() + "/killed-while-preparing"
original = gang._GangRun.handle_event
limit = float(os.environ["EXECUTORS_WITHIN"])
until_executors(2, limit)
print("answer", json.dumps({"weights": fit("undisturbed", True)}), flush=True)
for line in sys.stdin:
    phase, warm = json.loads(line)
    until_executors(2, limit)
    before, saboteur = set(executors()), Saboteur(phase)
    gang._GangRun.handle_event = lambda self, event: saboteur(self, event)  # noqa: PLW0108, B023 - a method is a function
    weights = fit(
        phase, warm, frame.mapInArrow(killing, frame.schema) if phase == "prepare" else frame
    )
    gang._GangRun.handle_event = original
    killed = os.path.exists(marker) if phase == "prepare" else saboteur.done
    lost = sorted(before - set(executors()))
    print("answer", json.dumps({"weights": weights, "killed": killed, "lost": lost}), flush=True)
spark.stop()
