# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Networks that learn digits lose half of their workers in the middle and get new ones; they
learn as well as ever.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import until
from tests.launcher.elastic import own

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

DIGITS = """
import json, os, sys, time
import numpy as np
from sklearn.datasets import load_digits

EPOCHS, BATCH, DISTURBED = 12, 16, sys.argv[1] == "disturbed"
images, digits = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
order = np.random.default_rng(0).permutation(len(images))
images, digits = images[order], digits[order]
train_x, train_y, test_x, test_y = images[:1440], digits[:1440], images[1440:], digits[1440:]
sizes = []

def print_epoch(epoch, hvd):
    sizes.append(hvd.size())
    print(f"epoch {epoch} rank {hvd.rank()} size {hvd.size()} pid {os.getpid()}", flush=True)

def goes_on(epoch, hvd, everywhere):
    # In the middle it waits for the fault, and for the replacements of lost workers.
    grown = not DISTURBED or epoch < EPOCHS // 2 or everywhere(float(os.path.exists("whole")))
    if not grown:
        time.sleep(0.5)  # leaves the cores to those who import their frameworks; the file ends it
    return epoch < EPOCHS or not grown

def end(accuracy):
    print("result " + json.dumps([accuracy, sizes]), flush=True)
"""
TORCH = (
    DIGITS
    + """
import torch
import farandole.torch as hvd

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
images, digits = torch.tensor(train_x).view(-1, 1, 8, 8), torch.tensor(train_y)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(digits)
everywhere = lambda value: bool(hvd.allreduce(torch.tensor([value]), op=hvd.Max)[0])

@hvd.elastic.run
def train(state):
    while goes_on(state.epoch, hvd, everywhere):
        print_epoch(state.epoch, hvd)
        indices = list(sampler)
        for number, start in enumerate(range(0, len(indices), BATCH)):
            batch = indices[start : start + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), digits[batch]).backward()
            optimizer.step()
            sampler.record_batch(number, BATCH)
            if number % 5 == 4:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()

train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
with torch.no_grad():
    found = model(torch.tensor(test_x).view(-1, 1, 8, 8)).argmax(1)
end(float((found == torch.tensor(test_y)).float().mean()))
"""
)
KERAS = (
    DIGITS
    + """
import keras
import farandole.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])
everywhere = lambda value: float(hvd.allreduce(np.array([value]))[0]) > 0.0

@hvd.elastic.run
def train(state):
    while goes_on(state.epoch, hvd, everywhere):
        print_epoch(state.epoch, hvd)
        # As many rows for each rank, whatever their number.
        rows = np.random.default_rng(state.epoch).permutation(len(train_x))
        mine = rows[: len(rows) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        model.fit(
            train_x[mine].reshape(-1, 8, 8, 1), train_y[mine], batch_size=BATCH, epochs=1,
            shuffle=False, verbose=0,
            callbacks=[hvd.elastic.CommitStateCallback(state, 5),
                hvd.elastic.UpdateEpochStateCallback(state)],
        )

train(hvd.elastic.KerasState(model, epoch=0))
end(float(model.evaluate(test_x.reshape(-1, 8, 8, 1), test_y, verbose=0)[1]))
"""
)
PATIENCE = 120.0
"""Seconds for what takes a few on an idle machine: whole frameworks are imported."""


def latest(run: Launch) -> dict[int, dict[str, int]]:
    """Returns the last values that each rank printed, by rank."""
    said: dict[int, dict[str, int]] = {}
    for line in run.out.read_text().splitlines():
        if ":epoch " in line:
            words = line.split(":", 1)[1].split()
            one = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            said[one["rank"]] = one
    return said


def pids(run: Launch) -> set[int]:
    """Processes of the ranks that have spoken last."""
    return {one["pid"] for one in latest(run).values()}


def stands(run: Launch, size: int, epoch: int) -> bool:
    """Returns whether all ranks of a world of this size have come to this epoch."""
    assert run.process.poll() is None, run.err.read_text()
    said = latest(run)
    return all(
        rank in said and said[rank]["size"] == size and said[rank]["epoch"] >= epoch
        for rank in range(size)
    )


def accuracy(run: Launch, size: int) -> float:
    """Returns the accuracy, which is the same on all ranks."""
    assert run.process.wait(PATIENCE) == 0, run.err.read_text()
    results = [
        json.loads(line.partition(":result ")[2]) for line in run.lines() if ":result " in line
    ]
    assert len(results) == size
    assert len({found for found, _ in results}) == 1
    return results[0][0]


@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize(
    ("script", "size"),
    [
        pytest.param(TORCH, 4, id="torch"),
        pytest.param(KERAS, 2, id="keras", marks=pytest.mark.slow),
    ],
)
def test_half_of_the_workers_are_lost_in_the_middle(
    launch: Start, tmp_path: Path, script: str, size: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    flags = ("-np", size, "--min-np", size // 2, "--blacklist-cooldown-range", 1, 1)
    run = launch(*flags, sys.executable, path, "disturbed", env=env)
    until(lambda: stands(run, size, 3), "all ranks in the middle", PATIENCE)
    members = latest(run)
    lost = {members[rank]["pid"] for rank in range(size // 2, size)}
    kept = {members[rank]["pid"] for rank in range(size // 2)}
    for victim in lost:
        os.kill(victim, signal.SIGKILL)
    until(lambda: stands(run, size // 2, 3), "a world of the others", PATIENCE)
    until(
        lambda: stands(run, size, 3) and not lost & pids(run),
        "a world as large as before",
        PATIENCE,
    )
    assert pids(run) > kept
    (run.out.parent / "whole").touch()
    disturbed = accuracy(run, size)
    assert "was ended by SIGKILL" in own(run)
    undisturbed = accuracy(launch("-np", size, sys.executable, path, "undisturbed", env=env), size)
    assert undisturbed > 0.9
    assert disturbed > undisturbed - 0.03
