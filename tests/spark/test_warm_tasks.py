# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Warm workers of Spark tasks: a fork server for each executor, which goes with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, drive

import farandole.spark

pytestmark = pytest.mark.timeout(200 * PATIENCE, func_only=True)


def begun():
    """Returns whether the worker started with torch, the owner of its fork server, and its
    parent process.
    """
    import os
    import sys

    had = "torch" in sys.modules
    with open(f"/proc/{os.getpid()}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    place = (
        words.index(b"farandole.runner.forkserver")
        if b"farandole.runner.forkserver" in words
        else None
    )
    owner = None if place is None else int(words[place + 2])
    return had, owner, os.getppid()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_workers_of_spark_tasks_come_from_the_one_server_of_their_executor(spark, monkeypatch):
    monkeypatch.setenv("FARANDOLE_WARM_IDLE_SECONDS", "60")
    jvm = spark.sparkContext._gateway.proc.pid
    # Where pyspark's launcher stays as a shell, the executor is the JVM below it.
    first = farandole.spark.run(begun, num_proc=2, warm=True)
    second = farandole.spark.run(begun, num_proc=2, warm=True)
    assert all(had for had, _, _ in first + second)
    owners = {owner for _, owner, _ in first + second}
    assert len(owners) == 1, (first, second)
    (owner,) = owners
    assert owner is not None
    assert owner == jvm or f"PPid:\t{jvm}\n" in Path(f"/proc/{owner}/status").read_text()
    servers = {server for _, _, server in first + second}
    assert len(servers) == 1, (first, second)
    assert farandole.spark.run(begun, num_proc=1, warm=False)[0][1] is None
    # The session, and so the executor, is that of the whole directory.
    for server in servers:
        os.kill(server, signal.SIGTERM)


@pytest.mark.slow
def test_each_executor_has_a_server_of_its_own_that_dies_with_it(tmp_path):
    body = program_path(__file__, "lose_fork_servers")
    done = drive(body, tmp_path, 150, PYTHONPATH=str(Path(__file__).parents[2]))
    assert "gone" in done.stdout, done.stderr[-3000:]
