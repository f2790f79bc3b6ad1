# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The essence: one job on two hosts, a host that refuses, a launcher that is killed."""

from __future__ import annotations

import signal
import sys
import time

from tests.launch.conftest import BUSY, IDLE, WORLD, printed_json
from tests.launch.namespace_cluster import until

# Processes that fail once the file `enough` exists.
ENDS_WHEN_ASKED = """
import os, sys, time
print(f"up {os.environ['RANK']}", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.05)
sys.exit(3)
"""


def test_two_hosts_of_two_ranks_are_one_world_and_leave_nothing(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("world.py", WORLD)
    done = cluster.launched("-np", 4, "-H", "h1:2,h2:2", sys.executable, "world.py")
    assert done.returncode == 0, done.stderr
    words = printed_json(done.stdout)
    assert [(word["rank"], word["host"], word["local"], word["cross"]) for word in words] == [
        (0, "h1", 0, 0),
        (1, "h1", 1, 0),
        (2, "h2", 0, 1),
        (3, "h2", 1, 1),
    ]
    assert all(word["right"] and word["size"] == 4 for word in words), words
    cluster.until_quiet(15.0)


def test_a_host_that_refuses_is_named_in_sshs_words_and_nothing_starts(hosts):
    cluster = hosts("h1", "h2", listen=False)
    cluster["h1"].listen()
    cluster.login(cluster["head"])
    cluster.write("start.py", "open('started', 'w').close()")
    began = time.monotonic()
    done = cluster.launched("-np", 4, "-H", "h1:2,h2:2", sys.executable, "start.py")
    assert done.returncode != 0
    assert "h2: ssh: connect to host h2 port 22: Connection refused" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 30.0
    cluster.until_quiet(15.0)
    assert not any((host.root / "run/job/started").exists() for host in cluster.hosts.values())


def test_nothing_is_left_anywhere_when_the_launcher_is_killed(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("busy.py", BUSY)
    # The launcher's own host has workers, too.
    running = cluster.launch("-np", 5, "-H", "head:1,h1:2,h2:2", sys.executable, "busy.py")
    running.until(*(f"[{rank}]<stdout>:goes on {rank}" for rank in range(5)))
    workers = [process for process in cluster.processes() if process.argv[1:] == ("busy.py",)]
    assert sorted(process.host for process in workers) == ["h1", "h1", "h2", "h2", "head"]
    running.send(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    cluster.until_quiet(10.0)


def test_processes_that_join_no_world_end_with_the_launcher_too(hosts):
    cluster = hosts("h1")
    cluster.write("idle.py", IDLE)
    running = cluster.launch("-np", 2, "-H", "h1:2", sys.executable, "idle.py")
    running.until("[0]<stdout>:up 0", "[1]<stdout>:up 1")
    running.send(signal.SIGKILL)
    until(lambda: not cluster["h1"].processes(), cluster.processes, 10.0)


def test_reports_of_workers_end_with_the_launcher(hosts):
    cluster = hosts("h1")
    cluster.write("ends.py", ENDS_WHEN_ASKED)
    running = cluster.launch("-np", 2, "-H", "h1:2", sys.executable, "ends.py")
    running.until("[0]<stdout>:up 0", "[1]<stdout>:up 1")
    # The registrar, in the launcher, receives no report before the launcher is killed.
    running.send(signal.SIGSTOP)
    cluster["h1"].write("enough", "")
    h1 = cluster["h1"]
    until(lambda: all("ends.py" not in worker.argv for worker in h1.processes()), h1.processes)
    running.send(signal.SIGKILL)
    until(lambda: not cluster["h1"].processes(), cluster.processes, 10.0)
