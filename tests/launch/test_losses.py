# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hosts, cables, connections, launchers that go while a job runs: it ends with a reason, and
nothing is left of it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress

import pytest
from tests.launch.conftest import BUSY, IDLE
from tests.launch.namespace_cluster import until

pytestmark = pytest.mark.slow

PEER_TIMEOUT = 5.0
"""The default of FARANDOLE_PEER_TIMEOUT."""
SESSION = "sshd: root@notty"


def busy(cluster, *, size=4, program=BUSY, **env):
    """A job in the middle of its work on two hosts of two."""
    cluster.write("busy.py", program)
    running = cluster.launch("-np", size, "-H", "h1:2,h2:2", sys.executable, "busy.py", **env)
    said = "goes on" if program == BUSY else "up"
    running.until(*(f"[{rank}]<stdout>:{said} {rank}" for rank in range(size)))
    return running


def failed(running, limit):
    """Returns the message of a launcher that must end by itself with an error."""
    began = time.monotonic()
    status = running.wait(limit)
    assert status != 0, running.output
    assert "Traceback" not in running.err.read_text().replace("<stderr>:Traceback", ""), (
        running.output
    )
    return status, time.monotonic() - began, running.err.read_text()


def find(cluster, host, *words):
    """The processes of a host whose command line has these words."""
    return [
        process
        for process in cluster[host].processes()
        if all(word in " ".join(process.argv) for word in words)
    ]


def until_only_sshd(cluster, *cut):
    """Waits until nothing of the job is left, while the hosts are still cut.

    Processes of sshd for an unclosed connection are ignored: they end when TCP gives the connection
    up.
    """

    def remaining_processes():
        return [
            process
            for process in cluster.processes()
            if not (process.host in cut and process.argv[0] == SESSION)
        ]

    until(
        lambda: not remaining_processes(),
        lambda: "; ".join(map(str, remaining_processes())),
        4 * PEER_TIMEOUT,
    )
    for name in cut:
        cluster[name].end()


def names(said, host, *ranks):
    """Returns whether a message of the launcher itself names the host, or else a rank of it."""
    own = [line for line in said.splitlines() if not re.match(r"\[\d+\]<", line)]
    return any(host in line or any(f"rank {rank}" in line for rank in ranks) for line in own)


@pytest.mark.timing
def test_a_host_that_dies_is_named_and_the_others_end(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster)
    cluster["h2"].power_off()
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < 2 * PEER_TIMEOUT + 2.0, said
    assert names(said, "h2"), said
    cluster.until_quiet(2 * PEER_TIMEOUT)


@pytest.mark.timing
def test_a_host_whose_processes_all_end_is_named_at_once(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster)
    cluster["h2"].end()
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < PEER_TIMEOUT, said
    assert names(said, "h2", 2, 3), said
    cluster.until_quiet(2 * PEER_TIMEOUT)


def test_a_network_that_is_cut_for_three_seconds_is_survived(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster)
    cluster["h2"].cut()
    with pytest.raises(AssertionError, match="still running"):
        running.wait(3.0)
    cluster["h2"].restore()
    cluster["h2"].write("enough", "")
    assert running.wait(20.0) == 0, running.output
    assert {f"[{rank}]<stdout>:over {rank}" for rank in range(4)} <= set(running.lines)


@pytest.mark.timing
def test_a_network_that_is_cut_for_ever_ends_the_job_on_both_sides(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster)
    cluster["h2"].cut()
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < 2 * PEER_TIMEOUT + 2.0, said
    assert names(said, "h2"), said
    until_only_sshd(cluster, "h2")


@pytest.mark.timing
def test_a_cut_host_ends_its_workers(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster, program=IDLE)
    cluster["h2"].cut()
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < 2 * PEER_TIMEOUT + 2.0, said
    assert names(said, "h2"), said
    until_only_sshd(cluster, "h2")


@pytest.mark.timing
def test_the_host_of_the_launcher_is_cut_off_from_all(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster)
    cluster["head"].cut()
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < 2 * PEER_TIMEOUT + 2.0, said
    assert names(said, "h1") or names(said, "h2"), said
    until_only_sshd(cluster, "h1", "h2")


@pytest.mark.parametrize(
    ("seconds", "peer_timeout"), [(3.0, PEER_TIMEOUT), (12.0, 30.0), (60.0, 90.0)]
)
def test_a_launcher_that_is_cut_off_for_less_than_the_peer_timeout_costs_nothing(
    hosts, seconds, peer_timeout
):
    """A laptop that sleeps does not answer. The ranks, whose links live, work on meanwhile."""
    cluster = hosts("h1", "h2")
    running = busy(cluster, FARANDOLE_PEER_TIMEOUT=f"{peer_timeout:g}")
    cluster["head"].cut()
    with pytest.raises(AssertionError, match="still running"):
        running.wait(seconds)
    cluster["head"].restore()
    for host in ("h1", "h2"):
        cluster[host].write("enough", "")
    assert running.wait(30.0) == 0, running.output
    assert {f"[{rank}]<stdout>:over {rank}" for rank in range(4)} <= set(running.lines)
    # TCP repeats a keep-alive that ssh sent during the cut at growing intervals, and the end of the
    # connection comes after it.
    until_only_sshd(cluster, "h1", "h2")


@pytest.mark.timing
def test_an_agent_that_is_killed_takes_its_workers_along(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster, program=IDLE)
    agents = find(cluster, "h2", "-m farandole agent")
    assert agents
    for agent in agents:
        os.kill(agent.pid, signal.SIGKILL)
    _, took, said = failed(running, 4 * PEER_TIMEOUT)
    assert took < PEER_TIMEOUT, said
    assert names(said, "h2"), said
    cluster.until_quiet(2 * PEER_TIMEOUT)


def test_processes_that_workers_start_end_with_them(hosts):
    cluster = hosts("h1", "h2")
    program = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n" + IDLE
    running = busy(cluster, program=program)
    assert len(find(cluster, "h1", "sleep 1000")) == 2
    running.send(signal.SIGKILL)
    cluster.until_quiet(10.0)


@pytest.mark.parametrize("moment", ["connecting", "greeted", "working"])
def test_a_launcher_that_is_killed_while_it_starts_leaves_nothing(hosts, moment):
    cluster = hosts("h1", "h2")
    cluster.write("idle.py", IDLE)
    running = cluster.launch("-np", 4, "-H", "h1:2,h2:2", sys.executable, "idle.py")
    seen = {
        "connecting": lambda: find(cluster, "head", "ssh"),
        "greeted": lambda: find(cluster, "h1", "farandole agent"),
        "working": lambda: find(cluster, "h2", "idle.py"),
    }
    until(lambda: bool(seen[moment]()), moment)
    running.send(signal.SIGKILL)
    cluster.until_quiet(15.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_asked_to_end_ends_its_workers(hosts, number):
    cluster = hosts("h1", "h2")
    # Under nohup this process ignores SIGHUP, and a launcher that it starts does as well.
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        running = busy(cluster, program=IDLE)
    finally:
        signal.signal(number, inherited)
    running.send(number)
    assert running.wait(30.0) == 128 + number, running.output
    cluster.until_quiet(15.0)


@contextmanager
def terminal():
    """A terminal: the end that types, and the end that a program has."""
    near, far = os.openpty()
    try:
        yield near, far
    finally:
        for end in (near, far):
            with suppress(OSError):
                os.close(end)


def test_ctrl_c_asks_the_workers_of_all_hosts(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("idle.py", IDLE)
    with terminal() as (near, far):
        # The connections are in the terminal's hands, too: they must not break before the workers
        # have ended.
        running = cluster.launch(
            "-np", 4, "-H", "h1:2,h2:2", sys.executable, "idle.py", terminal=far
        )
        running.until(*(f"[{rank}]<stdout>:up {rank}" for rank in range(4)))
        os.write(near, b"\x03")
        assert running.wait(30.0) == 128 + signal.SIGINT, running.output
    assert {f"[{rank}]<stdout>:asked" for rank in range(4)} <= set(running.lines), running.output
    cluster.until_quiet(15.0)


# They have heard that they shall end, and do not.
DEAF = """
import os, signal, time
def print_signal(number, frame):
    print("heard", flush=True)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, print_signal)
print(f"up {os.environ['RANK']}", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.timing
def test_a_second_ctrl_c_kills_at_once(hosts):
    cluster = hosts("h1", "h2")
    cluster.write("deaf.py", DEAF)
    with terminal() as (near, far):
        running = cluster.launch(
            "-np", 4, "-H", "h1:2,h2:2", sys.executable, "deaf.py", terminal=far
        )
        running.until(*(f"[{rank}]<stdout>:up {rank}" for rank in range(4)))
        os.write(near, b"\x03")
        running.until(*(f"[{rank}]<stdout>:heard" for rank in range(4)), limit=5.0)
        os.write(near, b"\x03")
        began = time.monotonic()
        assert running.wait(30.0) == 128 + signal.SIGINT, running.output
        assert time.monotonic() - began < 2.5, running.output
    cluster.until_quiet(15.0)


def test_workers_that_do_not_end_when_asked_once_are_killed_in_the_end(hosts):
    cluster = hosts("h1", "h2")
    running = busy(cluster, program=DEAF)
    running.send(signal.SIGINT)
    assert running.wait(30.0) == 128 + signal.SIGINT, running.output
    cluster.until_quiet(15.0)
