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
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

TORCH = program_path(__file__, "learn_digits_torch")
KERAS = program_path(__file__, "learn_digits_keras")
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
def test_half_of_the_workers_are_lost_in_the_middle(launch: Start, script: Path, size: int) -> None:
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    flags = ("-np", size, "--min-np", size // 2, "--blacklist-cooldown-range", 1, 1)
    run = launch(*flags, sys.executable, script, "disturbed", env=env)
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
    undisturbed = accuracy(
        launch("-np", size, sys.executable, script, "undisturbed", env=env), size
    )
    assert undisturbed > 0.9
    assert disturbed > undisturbed - 0.03
