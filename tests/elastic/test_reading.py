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
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

# Processes start slowly on a machine that is busy with other tests.
PATIENCE = 150
ROWS, EPOCHS, KILLS = 997, 6, 5
STATE = program_path(__file__, "read_with_state")
TOLERANT = program_path(__file__, "read_tolerant")
DDP = program_path(__file__, "read_tolerant_ddp")


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
    launch: Start, data: Path, script: Path, seed: int
) -> None:
    flags = ("-np", 4, "--min-np", 1, "--blacklist-cooldown-range", 1, 1)
    run = launch(*flags, sys.executable, script, data, EPOCHS, ROWS, env={"OMP_NUM_THREADS": "1"})
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
