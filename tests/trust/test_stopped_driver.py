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
from tests.started import environment

pytestmark = pytest.mark.timeout(300)
AFTER = 4.0
"""Seconds that the ranks work on after the driver's stop."""

# Ranks that sum until a file is there; each says how long its longest sum took.
RANK = """
def rank(enough):
    import os, time
    import numpy as np
    import farandole.numpy as hvd
    from farandole.spark import task
    hvd.init()
    rounds, longest, more = 0, 0.0, 1.0
    while more:
        began = time.monotonic()
        more = hvd.allreduce(np.array([0.0 if os.path.exists(enough) else 1.0]), op=hvd.Min)[0]
        longest, rounds = max(longest, time.monotonic() - began), rounds + 1
        if rounds % 20 == 0:
            task.report({"rounds": rounds})
        time.sleep(0.005)
    hvd.shutdown()
    return rounds, longest
"""
DRIVER = """
import sys
told = []
def progress(rank, record):
    if len(told) == 0:
        print("training", flush=True)
    told.append(record["rounds"])
results = backend.run(rank, (sys.argv[1],), on_progress=progress)
print("results", results, "last", told[-1], flush=True)
"""
LOCAL = """
from farandole.spark.common import LocalBackend
backend = LocalBackend(2, verbose=0, warm=False)
"""
SPARK = """
from pyspark.sql import SparkSession
from farandole.spark.common import SparkBackend
session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
backend = SparkBackend(2, verbose=0)
"""
# The launcher is the driver; its ranks have no driver's function.
COMMAND = """
import sys
result = rank(sys.argv[1])
print("results", [result], flush=True)
"""


@dataclass
class Ended:
    """The outcome of a job whose driver was stopped."""

    status: int
    output: str
    rounds: list[int]
    longest: float


def stopped(folder: Path, kind: str, seconds: float) -> Ended:
    """Runs a job, and stops its driver for some seconds while it trains."""
    enough, script, output = folder / "enough", folder / "job.py", folder / "said"
    script.write_text(
        RANK + {"local": LOCAL + DRIVER, "spark": SPARK + DRIVER, "command": COMMAND}[kind]
    )
    command = [sys.executable, str(script), str(enough)]
    if kind == "command":
        script.write_text(
            script.read_text().replace(
                "    rounds, longest", '    print("training", flush=True)\n    rounds, longest', 1
            )
        )
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
    script, output = tmp_path / "job.py", tmp_path / "said"
    body = RANK.replace(
        "    rounds, longest", '    print("pid", os.getpid(), flush=True)\n    rounds, longest', 1
    )
    script.write_text(body + {"local": LOCAL + DRIVER, "command": COMMAND}[kind])
    command = [sys.executable, str(script), str(tmp_path / "never")]
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
