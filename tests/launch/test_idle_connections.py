# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""ssh connections that are dropped while they are idle: the registrar's connections still carry
everything, so the job neither hangs nor fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from tests.launch.conftest import BUSY, IDLE
from tests.launch.namespace_cluster import until
from tests.launch.test_losses import find

pytestmark = pytest.mark.slow

# No packet to this hardware address arrives, and the sender is not informed.
NOWHERE = "02:00:00:00:00:99"
# ssh uses IPv6, and everything else IPv4, so that a test can silence ssh alone.
LOGINS = "Host h1 h2\n  HostName %h-v6\n"


def start(hosts, program, *arguments, size=2, expected="up", **env):
    """A job on two hosts, whose ssh connections use other addresses than its other connections."""
    cluster = hosts("h1", "h2")
    cluster.login(cluster["head"], config=LOGINS)
    cluster.write("program.py", program)
    running = cluster.launch(
        *("-np", size, "-H", "h1:1,h2:1"),
        *("--network-interfaces", "eth0", *arguments),
        sys.executable,
        "program.py",
        **env,
    )
    running.until(*(f"[{rank}]<stdout>:{expected} {rank}" for rank in range(size)))
    head = cluster["head"].address_v6
    for name in ("h1", "h2"):
        assert [far for _, far in cluster[name].connections() if far[0] == head], "ssh uses IPv6"
    return cluster, running


def silence(cluster, *names):
    """Drops all packets of IPv6 between the launcher's host and others, without any notice."""
    for near, far in [(cluster["head"], cluster[name]) for name in names]:
        for one, other in ((near, far), (far, near)):
            one._sh(
                f"ip -6 neigh replace {other.address_v6} lladdr {NOWHERE} dev eth0 nud permanent"
            )


def finish(cluster):
    for name in ("h1", "h2"):
        cluster[name].write("enough", "")


def end_hosts(cluster):
    """Ends the hosts with their processes of sshd, which wait for TCP to give up."""
    for name in ("h1", "h2"):
        cluster[name].end()


ELASTIC = ("--min-num-proc", 1, "--max-num-proc", 2)


@pytest.mark.parametrize("arguments", [(), ELASTIC], ids=["static", "elastic"])
@pytest.mark.parametrize("silent", [["h2"], ["h1", "h2"]])
def test_a_job_whose_connections_fall_silent_succeeds(hosts, silent, arguments):
    cluster, running = start(hosts, BUSY, *arguments, expected="goes on")
    silence(cluster, *silent)
    finish(cluster)
    assert running.wait(30.0) == 0, running.output
    assert {"[0]<stdout>:over 0", "[1]<stdout>:over 1"} <= set(running.lines)
    end_hosts(cluster)


@pytest.mark.parametrize("side", ["head", "h2"])
def test_a_job_whose_connection_is_closed_by_one_side_goes_on(hosts, side):
    cluster, running = start(hosts, BUSY, expected="goes on")
    word = ("ssh", "h2", "farandole agent") if side == "head" else ("sshd: root@notty",)
    for process in find(cluster, side, *word):
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="still running"):
        running.wait(8.0)
    finish(cluster)
    assert running.wait(30.0) == 0, running.output
    assert {"[0]<stdout>:over 0", "[1]<stdout>:over 1"} <= set(running.lines)
    cluster.until_quiet(15.0)


FAILS = """
import os, sys, time
print(f"up {os.environ['RANK']}", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    print("rank 1 is broken", file=sys.stderr, flush=True)
    sys.exit(23)
time.sleep(60)
"""


def test_a_failure_behind_a_silent_connection_is_reported(hosts):
    cluster, running = start(hosts, FAILS)
    silence(cluster, "h1", "h2")
    finish(cluster)
    assert running.wait(40.0) == 23, running.output
    assert "[1]<stderr>:rank 1 is broken" in running.output
    assert "rank 1 on h2" in running.err.read_text(), running.output
    end_hosts(cluster)


# Ranks of one world that end when they are interrupted.
ASKED = """
import signal, sys, time
import farandole.numpy as hvd
hvd.init()
def exit_on_interrupt(number, frame):
    print("asked", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, exit_on_interrupt)
print(f"up {hvd.rank()}", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("arguments", [(), ELASTIC], ids=["static", "elastic"])
@pytest.mark.timing
def test_ctrl_c_reaches_workers_behind_a_silent_connection(hosts, arguments):
    cluster, running = start(hosts, ASKED, *arguments)
    silence(cluster, "h1", "h2")
    running.send(signal.SIGINT)
    began = time.monotonic()
    assert running.wait(30.0) == 128 + signal.SIGINT, running.output
    assert time.monotonic() - began < 15.0
    assert {"[0]<stdout>:asked", "[1]<stdout>:asked"} <= set(running.lines), running.output
    end_hosts(cluster)


def test_a_launcher_that_dies_behind_a_silent_connection_leaves_no_worker(hosts):
    cluster, running = start(hosts, IDLE)
    silence(cluster, "h1", "h2")
    running.send(signal.SIGKILL)

    def workers():
        return [process for name in ("h1", "h2") for process in find(cluster, name, "program.py")]

    until(lambda: not workers(), lambda: "; ".join(map(str, workers())), 30.0)
    end_hosts(cluster)


def test_ssh_sends_keep_alives(hosts):
    cluster, running = start(hosts, IDLE)
    (connection,) = find(cluster, "head", "ssh", "h2", "farandole agent")
    assert any(word.startswith("ServerAliveInterval=") for word in connection.argv)
    running.send(signal.SIGINT)
    running.wait(30.0)
