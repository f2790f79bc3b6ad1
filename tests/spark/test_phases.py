# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An executor that is killed in any phase of a fit: one cluster, whose driver fits once for each
phase.
"""

from __future__ import annotations

import json
import queue
import threading
import time

import pytest
from tests.spark.deployments import KILLS, PATIENCE, driver

PHASE = 120.0 * PATIENCE
"""For one fit that loses an executor: Spark starts another JVM, whose worker imports torch.
Quiet it takes 15 s.
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PHASE)]

PROGRAM = """
import json
import torch
from farandole.runner import gang
from farandole.spark.common import LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator

spark = session("local-cluster[2,1,1024]", executor_cores="1")
store = LocalStore(os.getcwd() + "/store")
frame = spark.range(0, 600, 1, 4).selectExpr("cast(id % 11 as float) as x", "cast(id % 11 as float) * 2 + 1 as y")

def fit(name, warm, frame=frame):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    estimator = TorchEstimator(backend=SparkBackend(2, warm=warm), model=model, loss=torch.nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01), feature_cols=["x"], label_cols=["y"], batch_size=20,
        epochs=4, random_seed=1, input_shapes=[[-1, 1]], verbose=1, run_id=name, store=store)
    return {name: value.tolist() for name, value in estimator.fit(frame).getModel().state_dict().items()}

class Saboteur:
    \"\"\"Kills an executor_pid when the gang's driver hears of something, once.\"\"\"
    def __init__(self, phase):
        self.phase, self.done, self.records = phase, False, 0
    def __call__(self, gang_, event):
        original(gang_, event)
        self.records += event.kind == "metric"
        there = any(pathlib.Path("store/runs", self.phase).rglob("checkpoint*"))
        now = {
            "register": event.kind == "registered", "start": event.kind == "assigned",
            "train": self.records > 0, "checkpoint": self.records > 0 and there, "result": event.kind == "result",
        }
        if not self.done and now.get(self.phase, False):
            self.done = True
            kill_one()

def killing(batches):
    # Runs in an executor: the first task that gets here takes its executor along.
    import os, signal
    from farandole.runner.warm_workers import executor_pid
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield from batches
        return
    os.kill(executor_pid(), signal.SIGKILL)
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
    gang._GangRun.handle_event = lambda self, event: saboteur(self, event)
    weights = fit(phase, warm, frame.mapInArrow(killing, frame.schema) if phase == "prepare" else frame)
    gang._GangRun.handle_event = original
    killed = os.path.exists(marker) if phase == "prepare" else saboteur.done
    lost = sorted(before - set(executors()))
    print("answer", json.dumps({"weights": weights, "killed": killed, "lost": lost}), flush=True)
spark.stop()
"""  # noqa: E501


class Driver:
    """The driver's program, which answers every line it is told with one."""

    def __init__(self, process):
        self.process = process
        self.recent_lines = []
        self._answers = queue.Queue()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream):
        for line in stream:
            self.recent_lines.append(line)
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))

    def answer(self, limit):
        deadline = time.monotonic() + limit
        while True:
            try:
                return self._answers.get(timeout=0.5)
            except queue.Empty:
                told = "".join(self.recent_lines[-60:])
                assert self.process.poll() is None, f"it ended:\n{told}"
                assert time.monotonic() < deadline, f"no answer in {limit} s:\n{told}"

    def fit(self, phase, warm):
        self.process.stdin.write(json.dumps([phase, warm]) + "\n")
        self.process.stdin.flush()
        return self.answer(PHASE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The driver, and the weights of a fit that nothing disturbed."""
    with driver(
        KILLS + PROGRAM, tmp_path_factory.mktemp("phases"), EXECUTORS_WITHIN=str(PHASE / 2)
    ) as process:
        made = Driver(process)
        yield made, made.answer(2 * PHASE)["weights"]


@pytest.mark.parametrize(
    ("phase", "warm"),
    [
        # Warm workers: of the executor that stays, they are there at once. One phase begins anew
        # the long way.
        ("prepare", True),
        ("register", True),
        ("start", True),
        ("train", False),
        ("checkpoint", True),
        ("result", True),
    ],
)
def test_an_executor_killed_in_a_phase_of_a_fit_leaves_the_same_model(cluster, phase, warm):
    running, undisturbed = cluster
    found = running.fit(phase, warm)
    assert found["killed"], phase
    assert len(found["lost"]) == 1
    assert found["weights"].keys() == undisturbed.keys()
    for name, values in undisturbed.items():
        for value, wanted in zip(found["weights"][name], values, strict=True):
            assert value == pytest.approx(wanted, rel=1e-6, abs=1e-7), (phase, name)
