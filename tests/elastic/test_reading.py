# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks are killed at random moments while they train on `farandole.data`: each row of each epoch
counts once.

What counts is what is in the model: a step adds 1 to the parameter of each row and epoch that its
gradient comes from.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.launcher.conftest import is_alive, until
from tests.launcher.elastic import own

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

# Processes start slowly on a machine that is busy with other tests.
PATIENCE = 150
ROWS, EPOCHS, KILLS = 997, 6, 5
BEGIN = f"""
import json, os, sys, time
import torch
import farandole.torch as hvd
from farandole.common import basics
from farandole.data import ParquetLoader

EPOCHS, ROWS = {EPOCHS}, {ROWS}
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(EPOCHS, ROWS)])
counts = model[0]
def print_pid():
    print(f"pid {{os.getpid()}} of {{hvd.size()}}", flush=True)
basics.call_on_each_init(print_pid)
hvd.init()
loader = ParquetLoader(sys.argv[1], batch_size=4, framework="torch", seed=3)
plain = torch.optim.SGD(model.parameters(), lr=1.0)
named = [("counts", counts)]

def loss(epoch, batch):
    # Workers that are started in the place of lost ones come before the others have finished.
    time.sleep(0.01 if hvd.size() >= 3 else 0.1)
    return -counts[epoch, batch["row"]].sum()

def end():
    print("result " + json.dumps(counts.tolist()), flush=True)
"""
STATE = (
    BEGIN
    + """
optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum)

@hvd.elastic.run
def train(state):
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for batch in loader:
            optimizer.zero_grad()
            loss(epoch, batch).backward()
            optimizer.step()
            state.step += 1
            if state.step % 3 == 0:
                state.commit()

train(hvd.elastic.TorchState(model=model, optimizer=optimizer, reader=loader, step=0))
end()
"""
)
TOLERANT = (
    BEGIN
    + """
optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum, fault_tolerant=True)
optimizer.share(reader=loader)
while loader.epoch < EPOCHS:
    epoch = loader.epoch
    for batch in loader:
        optimizer.zero_grad()
        loss(epoch, batch).backward()
        optimizer.step()
end()
"""
)
DDP = (
    BEGIN
    + """
import torch.distributed as dist
from farandole.torch.distributed import FaultTolerantDataParallel

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = counts
        self.present = torch.nn.Parameter(torch.zeros(1 << 16))

    def forward(self, epoch, batch):
        return loss(epoch, batch) + self.present[os.getpid() % (1 << 16)]

network = Network()
plain = torch.optim.SGD(network.parameters(), lr=1.0)
dist.init_process_group("farandole")
ddp = FaultTolerantDataParallel(network, plain)
ddp.share(reader=loader)
while loader.epoch < EPOCHS:
    epoch = loader.epoch
    for batch in loader:
        plain.zero_grad()
        ddp(epoch, batch).backward()
        # DDP averages: the part of one rank tells how many took part.
        counts.grad.div_(network.present.grad.max()).round_()
        plain.step()
end()
"""
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with their numbers, in files of several groups."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
        pq.write_table(
            pa.table({"row": rows}), folder / f"part-{number}.parquet", row_group_size=60
        )
    return folder


def world(run: Launch) -> list[int]:
    """Processes of the latest world, if all of them have said that they are in it."""
    said = [
        line.split(":pid ", 1)[1].split()
        for line in run.out.read_text().splitlines()
        if ":pid " in line
    ]
    size = int(said[-1][-1]) if said else 0
    latest = said[-size:] if size else []
    return [int(pid) for pid, _, told in latest if int(told) == size] if len(latest) == size else []


def disturb(run: Launch, seed: int) -> int:
    """Kills members of worlds of three at least, at random moments, and has some leave; how many
    it were.
    """
    draw = random.Random(seed)
    done = 0
    while done < KILLS:
        until(
            lambda: run.process.poll() is not None or len(world(run)) >= 3,
            "a world of three or four",
            PATIENCE,
        )
        time.sleep(draw.uniform(0.0, 0.7))
        members = world(run)
        if run.process.poll() is not None:
            break
        if len(members) < 3:
            continue
        for victim in draw.sample(members, draw.choice([1, 1, 2])):
            if is_alive(victim):
                os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        done += 1
        time.sleep(0.1)
    return done


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "script",
    [STATE, TOLERANT, pytest.param(DDP, marks=pytest.mark.slow)],
    ids=["state", "fault-tolerant", "fault-tolerant-ddp"],
)
def test_each_row_of_each_epoch_counts_once(
    launch: Start, tmp_path: Path, data: Path, script: str, seed: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    flags = ("-np", 4, "--min-np", 1, "--blacklist-cooldown-range", 1, 1)
    run = launch(*flags, sys.executable, path, data, env={"OMP_NUM_THREADS": "1"})
    done = disturb(run, seed)
    until(lambda: run.process.poll() is not None, "its end", PATIENCE)
    assert run.wait() == 0, run.err.read_text()
    assert done >= 3, "the faults did happen"
    assert "was ended by SIGKILL" in own(run)
    results = [
        json.loads(line.partition(":result ")[2]) for line in run.lines() if ":result " in line
    ]
    assert results
    for counts in results:
        wrong = {
            (epoch, row)
            for epoch in range(EPOCHS)
            for row in range(ROWS)
            if counts[epoch][row] != 1.0
        }
        assert not wrong, sorted(wrong)[:20]
