# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver that is stopped for a while, as by Ctrl-Z or a debugger: its job continues, and its
user gets a message.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.programs import program_path
from tests.started import environment

pytestmark = pytest.mark.timeout(300)
AFTER = 4.0
"""Seconds that the ranks work on after the driver's stop."""

# Ranks that sum until a file is there; each prints how long its longest sum took.
SUMS = program_path(__file__, "sum_until_enough")


@dataclass
class Ended:
    """The outcome of a job whose driver was stopped."""

    status: int
    output: str
    rounds: list[int]
    longest: float


def stopped(folder: Path, kind: str, seconds: float) -> Ended:
    """Runs a job, and stops its driver for some seconds while it trains."""
    enough, output = folder / "enough", folder / "said"
    announcement = "training" if kind == "command" else "none"
    command = [sys.executable, str(SUMS), kind, str(enough), announcement]
    if kind == "command":
        command = [sys.executable, "-m", "farandole", "run", "-np", "2", *command]
    env = environment({"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"})
    with output.open("wb") as file:
        driver = subprocess.Popen(
            command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: "training" in output.read_text() or driver.poll() is not None)
        assert driver.poll() is None, output.read_text()
        driver.send_signal(signal.SIGSTOP)
        until(
            lambda: Path(f"/proc/{driver.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        )
        time.sleep(seconds)  # what is tested: nothing happens meanwhile
        driver.send_signal(signal.SIGCONT)
        time.sleep(AFTER)  # longer than the driver takes to call an agent lost
        enough.touch()
        status = driver.wait(60)
    finally:
        driver.send_signal(signal.SIGCONT)
        driver.kill()
        driver.wait()
    text = output.read_text()
    pairs = [
        line.partition("results ")[2].partition(" last")[0]
        for line in text.splitlines()
        if "results" in line
    ]
    results = [one for pair in pairs for one in ast.literal_eval(pair)]
    return Ended(
        status,
        text,
        [rounds for rounds, _ in results],
        max((longest for _, longest in results), default=0.0),
    )


def until(fits, limit: float = 100.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + limit
    while not fits():
        assert time.monotonic() < end
        time.sleep(0.02)


def check(ended: Ended, seconds: float) -> None:
    """The job went on, and its user knows what was."""
    assert ended.status == 0, ended.output
    assert len(ended.rounds) == 2, ended.output
    assert ended.rounds[0] == ended.rounds[1]
    assert ended.longest < seconds, "ranks do not wait for their driver"
    assert "this process did not run for " in ended.output
    assert "was lost" not in ended.output.replace("records were lost", "")


@pytest.mark.parametrize("kind", ["local", "command"])
@pytest.mark.timing
def test_a_driver_that_was_stopped_for_six_seconds_loses_nothing(tmp_path, kind):
    check(stopped(tmp_path, kind, 6.0), 6.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "command", "spark"])
@pytest.mark.parametrize("seconds", [4.0, 12.0, 60.0])
@pytest.mark.timing
def test_a_driver_that_was_stopped_for_long_loses_nothing(tmp_path, kind, seconds):
    check(stopped(tmp_path, kind, seconds), seconds)


@pytest.mark.parametrize("kind", ["local", "command"])
def test_a_driver_that_is_killed_leaves_no_rank(tmp_path, kind):
    """Ranks end sooner than with a stopped driver, because the registrar's port is closed."""
    output = tmp_path / "said"
    command = [sys.executable, str(SUMS), kind, str(tmp_path / "never"), "pid"]
    if kind == "command":
        command = [sys.executable, "-m", "farandole", "run", "-np", "2", *command]
    with output.open("wb") as file:
        driver = subprocess.Popen(
            command, env=environment(), cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: output.read_text().count("pid ") == 2 or driver.poll() is not None)
        ranks = [
            int(line.rpartition("pid ")[2])
            for line in output.read_text().splitlines()
            if "pid " in line
        ]
    finally:
        driver.kill()
        driver.wait()
    assert len(ranks) == 2
    until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks), 20.0)
