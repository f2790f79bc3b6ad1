# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs on several hosts: hosts that are added, removed, killed, cut off, or cannot be
reached.
"""

from __future__ import annotations

import signal
import sys
import time

import pytest
from tests.launch.namespace_cluster import JOB, SEARCH, until
from tests.programs import program_text

pytestmark = pytest.mark.slow

# Ranks train until one of them finds the file `enough`. Each prints its rank and its host in every
# world.
TRAIN = program_text(__file__, "train_until_enough")
QUICK = ("--blacklist-cooldown-range", 1, 2)


def start(cluster, *flags, listed=("h1:2", "h2:2")):
    """An elastic job on the hosts that the file `hosts` of the first one lists."""
    cluster.write("train.py", TRAIN)
    are(cluster, *listed)
    script = ("--host-discovery-script", "cat hosts")
    return cluster.launch(*script, *QUICK, *flags, sys.executable, "train.py")


def are(cluster, *hosts):
    """Lists other hosts from now on."""
    head = cluster["head"]
    head.write("hosts.new", "".join(f"{host}\n" for host in hosts))
    head.run("mv", "hosts.new", "hosts")


def members(running, *hosts):
    """Waits for a world with these ranks' hosts; what they have said of themselves, by rank.

    The last line of each process counts: a launcher that continues a job may print lines of its
    predecessor again.
    """
    found = []

    def fits():
        assert running.process.poll() is None, running.output
        lines = running.out.read_text(errors="replace").splitlines()
        said = [line.split(":", 1)[1].split()[1:] for line in lines if ":world " in line]
        last = {}
        for one in said:
            # Taken out and put in again, so that the order is by time.
            last.pop((one[2], one[3]), None)
            last[one[2], one[3]] = one
        # A process that has ended has a last line, too. If its world had this size, its rank has a
        # later one.
        ranks = {int(one[1]): one for one in last.values() if int(one[0]) == len(hosts)}
        found[:] = [ranks[rank] for rank in sorted(ranks)]
        return [one[2] for one in found] == list(hosts)

    until(fits, lambda: f"a world on {hosts} in {running.output}")
    return list(found)


def pids(world):
    """The processes of a world, by rank, as their hosts number them."""
    return [int(one[3]) for one in world]


def finish(cluster, running, size):
    """Ends the training; every rank of the last world must return."""
    for host in cluster.hosts.values():
        if host.is_on:
            host.write("enough", "")
    assert running.wait(30.0) == 0, running.output
    assert sum(line.endswith(f":over {size}") for line in running.lines) == size
    return own(running)


def own(running):
    """Returns the output of the launcher itself."""
    return "\n".join(
        line for line in running.err.read_text().splitlines() if not line.startswith("[")
    )


def test_a_host_that_is_added_joins_and_one_that_is_removed_leaves(hosts):
    cluster = hosts("h1", "h2")
    running = start(cluster, "-np", 2, "--min-np", 1, listed=["h1:2"])
    first = members(running, "h1", "h1")
    are(cluster, "h1:2", "h2:2")
    both = members(running, "h1", "h1", "h2", "h2")
    assert pids(both)[:2] == pids(first)
    are(cluster, "h2:2")
    last = members(running, "h2", "h2")
    assert pids(last) == pids(both)[2:]
    assert all(one[4] == "1" for one in last), "they went on from what there was"
    until(
        lambda: not cluster["h1"].processes(),
        lambda: "; ".join(map(str, cluster["h1"].processes())),
    )
    said = finish(cluster, running, 2)
    assert "h1" not in said, f"to be removed is no failure: {said}"


def test_a_host_that_is_killed_is_named_and_the_others_continue(hosts):
    cluster = hosts("h1", "h2")
    running = start(cluster, "-np", 4, "--min-np", 2)
    before = members(running, "h1", "h1", "h2", "h2")
    cluster["h2"].end()
    after = members(running, "h1", "h1")
    assert pids(after) == pids(before)[:2]
    assert "on h2" in own(running)
    finish(cluster, running, 2)


def test_a_host_that_loses_power_is_survived(hosts):
    cluster = hosts("h1", "h2")
    running = start(cluster, "-np", 4, "--min-np", 2)
    before = members(running, "h1", "h1", "h2", "h2")
    cluster["h2"].power_off()
    after = members(running, "h1", "h1")
    assert pids(after) == pids(before)[:2]
    are(cluster, "h1:2")
    finish(cluster, running, 2)


def test_a_killed_worker_is_replaced_on_its_host(hosts):
    cluster = hosts("h1", "h2")
    running = start(cluster, "-np", 4, "--min-np", 2)
    before = members(running, "h1", "h1", "h2", "h2")
    cluster["h2"].run("kill", "-9", pids(before)[3])
    members(running, "h1", "h1", "h2")
    again = members(running, "h1", "h1", "h2", "h2")
    assert set(pids(before)[:3]) < set(pids(again))
    assert "was ended by SIGKILL" in finish(cluster, running, 4)


def test_a_host_that_cannot_be_reached_is_named_and_comes_when_it_can(hosts):
    cluster = hosts("h1", "h2")
    cluster["h2"].cut()
    running = start(cluster, "-np", 2, "--min-np", 1, "--start-timeout", 10)
    members(running, "h1", "h1")
    until(lambda: "a worker on h2" in own(running), lambda: own(running))
    cluster["h2"].restore()
    members(running, "h1", "h1", "h2", "h2")
    assert "h1" not in finish(cluster, running, 4)


@pytest.mark.parametrize("links", ["between hosts", "by the launcher"])
def test_a_launcher_that_is_killed_and_starts_again_takes_back_the_workers_of_all_hosts(
    hosts, links
):
    cluster = hosts("h1", "h2")
    flags = (
        "-np",
        4,
        "--min-np",
        2,
        "--journal",
        "journal",
        *(["--dial-out"] if links == "by the launcher" else []),
    )
    killed = start(cluster, *flags)
    before = members(killed, "h1", "h1", "h2", "h2")
    until(
        lambda: sum(line.endswith(":has committed") for line in killed.lines) >= 4,
        lambda: killed.output,
    )
    killed.send(signal.SIGKILL)
    assert killed.wait() != 0
    # Longer than workers outlive a launcher without a journal.
    time.sleep(3.0)
    running = start(cluster, *flags)
    until(lambda: "continues a job that has 4 processes" in own(running), lambda: running.output)
    if links == "by the launcher":
        # Their links broke with it, so they form another world, and continue from their last
        # commit.
        until(
            lambda: all(one[4] == "1" for one in members(running, "h1", "h1", "h2", "h2")),
            lambda: running.output,
        )
        assert pids(members(running, "h1", "h1", "h2", "h2")) == pids(before)
    for rank, pid in enumerate(pids(before)):
        assert cluster["h1" if rank < 2 else "h2"].run("kill", "-0", pid).returncode == 0, (
            "the same processes"
        )
    # It decides as before.
    cluster["h2"].run("kill", "-9", pids(before)[3])
    members(running, "h1", "h1", "h2")
    members(running, "h1", "h1", "h2", "h2")
    assert "was ended by SIGKILL" in finish(cluster, running, 4)
    until(lambda: not cluster.processes(), lambda: "; ".join(map(str, cluster.processes())), 15.0)


def test_a_script_that_fails_and_hangs_changes_nothing(hosts):
    cluster = hosts("h1")
    running = start(cluster, "-np", 1, "--discovery-timeout", 1, listed=["h1:1"])
    before = members(running, "h1")
    cluster["head"].run("mv", "hosts", "away")
    until(lambda: "Exit code: 1" in own(running), lambda: own(running))
    cluster["head"].run("mkfifo", "hosts")
    until(lambda: "did not end within 1 s and was killed" in own(running), lambda: own(running))
    cluster["head"].run("mv", "away", "hosts")
    are(cluster, "h1:2")
    assert pids(members(running, "h1", "h1"))[0] == pids(before)[0]
    finish(cluster, running, 2)


@pytest.mark.parametrize("system", ["none", "MPIJob"])
def test_a_host_file_that_changes_is_followed(hosts, system):
    cluster = hosts("h1", "h2")
    cluster.write("train.py", TRAIN)
    are(cluster, "h1 slots=1")
    flags, env = ("--hostfile", "hosts"), {}
    if system == "MPIJob":
        # What Kubernetes' operator sets, whose file follows the pods.
        flags, env = (), {"OMPI_MCA_orte_default_hostfile": f"{JOB}/hosts"}
    running = cluster.launch("-np", 1, "--min-np", 1, *flags, sys.executable, "train.py", **env)
    members(running, "h1")
    are(cluster, "h1 slots=1", "h2 slots=1")
    members(running, "h1", "h2")
    are(cluster, "h2 slots=1")
    members(running, "h2")
    finish(cluster, running, 1)


def test_nodes_of_slurm_that_go_down_and_come_back(hosts):
    cluster = hosts("h1", "h2")
    head = cluster["head"]
    cluster.write("train.py", TRAIN)
    # What a job that was submitted with --no-kill sees of its nodes.
    head.write("bin/scontrol", f"#!/bin/sh\ncat {JOB}/states\n", mode=0o755)

    def states(**nodes):
        lines = (
            f"NodeName={name} CPUAlloc=2 State={state} Reason=x\n" for name, state in nodes.items()
        )
        head.write("states.new", "".join(lines))
        head.run("mv", "states.new", "states")

    states(h1="ALLOCATED", h2="DOWN*")
    running = cluster.launch(
        *("-np", 2, "--min-np", 1, "--ssh-command", "ssh", sys.executable, "train.py"),
        PATH=f"{JOB}/bin:{SEARCH}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="h[1-2]",
        SLURM_TASKS_PER_NODE="2(x2)",
    )
    members(running, "h1", "h1")
    states(h1="ALLOCATED", h2="MIXED")
    members(running, "h1", "h1", "h2", "h2")
    states(h1="DOWN+NOT_RESPONDING", h2="ALLOCATED")
    members(running, "h2", "h2")
    finish(cluster, running, 2)


def test_ctrl_c_ends_the_workers_of_every_host(hosts):
    cluster = hosts("h1", "h2")
    running = start(cluster, "-np", 4, "--min-np", 2)
    members(running, "h1", "h1", "h2", "h2")
    running.send(signal.SIGINT)
    assert running.wait(30.0) == 128 + signal.SIGINT, running.output
    cluster.until_quiet(15.0)
