# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Faults that happen to an elastic job on several hosts; each proves that it happened."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.namespace_cluster import until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.launch.conftest import Hosts
    from tests.launch.namespace_cluster import Host, Running

SLOTS = 2


class Job:
    """The job, its hosts, and what is known of both."""

    def __init__(
        self, cluster: Hosts, launch: Callable[[], Running], chance: random.Random
    ) -> None:
        """Starts it."""
        self.cluster, self.launch, self.chance = cluster, launch, chance
        self.launches: list[Running] = []
        self.start()
        self.names = [name for name in cluster.hosts if name != "head"]
        self.listed = dict.fromkeys(self.names, SLOTS)

    def start(self) -> None:
        """Starts the launcher, for the first time or again."""
        self.running = self.launch()
        self.launches.append(self.running)

    def steps(self) -> tuple[int, int]:
        """The last step that rank 0 has told, and the size of its world."""
        for line in reversed(self.running.out.read_text(errors="replace").splitlines()):
            words = line.partition(":")[2].split()
            if words[:1] == ["step"] and len(words) == 3:
                return int(words[1]), int(words[2])
        return 0, 0

    def progress(self, limit: float, what: str, size: int | None = None) -> None:
        """Waits until steps continue, in a world of this size if one is given."""
        before = self.steps()[0]

        def fits() -> bool:
            assert self.running.process.poll() is None, (
                f"after {what} the job ended: {self.running.output[-5000:]}"
            )
            step, now = self.steps()
            return step >= before + 10 and (size is None or now == size)

        until(
            fits,
            lambda: f"steps after {what}, now {self.steps()}: {self.running.output[-5000:]}",
            limit,
        )

    def hosts(self) -> list[Host]:
        """Hosts that have workers now."""
        return [self.cluster[name] for name in self.names if self.workers(self.cluster[name])]

    def workers(self, host: Host) -> list[int]:
        """Processes of the training on a host, as this process's namespace numbers them."""
        return [
            process.pid
            for process in host.processes()
            if process.argv[-1:] == ("train.py",) and is_worker(process)
        ]

    def survivor(self) -> tuple[Host, int]:
        """A worker that has the training's state. Faults leave one: with the last of these, the
        state is lost.
        """
        found: list[tuple[Host, int]] = []

        def members() -> list[tuple[Host, int]]:
            found[:] = [
                (host, pid)
                for name, own in self.world()
                for host in (self.cluster[name],)
                for pid in self.workers(host)
                if inner(pid) == own
            ]
            return found

        until(lambda: bool(members()), lambda: f"a worker of {self.world()}", 30.0)
        return self.chance.choice(found)

    def world(self) -> list[tuple[str, int]]:
        """Host and process of each rank of the newest world, as it numbers its processes."""
        worlds: dict[int, dict[str, tuple[str, int]]] = {}
        for launch in self.launches:
            for line in launch.out.read_text(errors="replace").splitlines():
                words = line.partition(":")[2].split()
                if words[:1] == ["world"] and len(words) == 5:
                    worlds.setdefault(int(words[1]), {})[words[2]] = words[4], int(words[3])
        return list(worlds[max(worlds)].values())

    def used(self) -> list[str]:
        """Hosts that are listed."""
        return [name for name, slots in self.listed.items() if slots]

    def reduced(self) -> list[str]:
        """Hosts that are not listed with all their slots."""
        return [name for name, slots in self.listed.items() if slots < SLOTS]

    def full(self) -> list[str]:
        """Hosts that are listed with all their slots and have as many workers."""
        listed = (name for name, slots in self.listed.items() if slots == SLOTS)
        return [name for name in listed if len(self.workers(self.cluster[name])) == SLOTS]

    def descriptors(self) -> int:
        """The largest number of files and sockets that a worker has open."""
        counts = [0]
        for host in self.hosts():
            for pid in self.workers(host):
                with suppress(OSError):
                    counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        return max(counts)

    def list(self) -> None:
        """Lets the discovery script list the present hosts."""
        head = self.cluster["head"]
        text = "".join(f"{name}:{slots}\n" for name, slots in self.listed.items() if slots)
        head.write("hosts.new", text)
        head.run("mv", "hosts.new", "hosts")

    def launcher_output(self) -> str:
        """Returns the output of the launcher itself."""
        return self.running.err.read_text(errors="replace")


def is_worker(process: object) -> bool:
    """Returns whether a process is a worker: agents and shells have the same words behind
    others.
    """
    argv = getattr(process, "argv", ())
    return len(argv) == 2 and "python" in argv[0]


def inner(pid: int) -> int:
    """Returns the process id that a host's process has inside its namespace; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def state(pid: int) -> str:
    """The state of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def kill(job: Job) -> str:
    """SIGKILL to one worker."""
    host = job.chance.choice(job.hosts())
    pid = job.chance.choice(job.workers(host))
    os.kill(pid, signal.SIGKILL)
    until(lambda: state(pid) in ("", "Z", "X"), f"the end of process {pid}")
    return f"SIGKILL of {pid} on {host.name}"


def kill_half(job: Job) -> str:
    """SIGKILL to half of the workers at once."""
    _, kept = job.survivor()
    pids = [pid for host in job.hosts() for pid in job.workers(host)]
    others = [pid for pid in pids if pid != kept]
    gone = job.chance.sample(others, min(len(others), max(1, len(pids) // 2)))
    for pid in gone:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in gone:
        until(lambda pid=pid: state(pid) in ("", "Z", "X"), f"the end of process {pid}")
    return f"SIGKILL of {len(gone)} of {len(pids)} workers"


def stop_shortly(job: Job) -> str:
    """SIGSTOP to one worker, and SIGCONT before its peers give it up."""
    return stop(job, job.chance.uniform(0.2, 1.5))


def stop_for_long(job: Job) -> str:
    """SIGSTOP to one worker until its peers have given it up."""
    return stop(job, 8.0)


def stop(job: Job, seconds: float) -> str:
    """SIGSTOP, some time, SIGCONT."""
    host = job.chance.choice(job.hosts())
    pid = job.chance.choice(job.workers(host))
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) in ("T", ""), f"process {pid} to stop")
    assert state(pid) == "T", f"process {pid} ended before it could be stopped"
    time.sleep(seconds)
    if state(pid) == "T":
        os.kill(pid, signal.SIGCONT)
    return f"SIGSTOP of {pid} on {host.name} for {seconds:.1f} s"


def cut_shortly(job: Job) -> str:
    """A host hears nothing for a time that links survive."""
    return cut(job, job.chance.uniform(0.2, 2.0), 1)


def cut_for_long(job: Job) -> str:
    """A host hears nothing until the others have given it up."""
    return cut(job, 12.0, 1)


def part(job: Job) -> str:
    """The network falls into two halves that both live. The half without the launcher is given
    up.
    """
    hosts = others(job, 2)
    reachable(job, hosts[0])
    for host in hosts:
        host.part()
    try:
        unreachable(job, hosts[0])
        if len(hosts) == 2:
            until(
                lambda: reaches(hosts[0], hosts[1]),
                f"{hosts[0].name} to reach {hosts[1].name}, which is in its half",
                10.0,
            )
        time.sleep(12.0)
    finally:
        for host in hosts:
            host.restore()
    return f"{' and '.join(host.name for host in hosts)} alone for 12 s"


def cut(job: Job, seconds: float, count: int) -> str:
    """Cuts hosts off, some time, and lets them back."""
    hosts = others(job, count)
    reachable(job, hosts[0])
    for host in hosts:
        host.cut()
    try:
        unreachable(job, hosts[0])
        time.sleep(seconds)
    finally:
        for host in hosts:
            host.restore()
    return f"{' and '.join(host.name for host in hosts)} cut off for {seconds:.1f} s"


def others(job: Job, count: int) -> list[Host]:
    """At most so many hosts with workers, drawn among all but one that has the training's state."""
    kept, _ = job.survivor()
    found: list[Host] = []

    def exist() -> bool:
        found[:] = [host for host in job.hosts() if host is not kept]
        return bool(found)

    until(exist, "workers on another host")
    return job.chance.sample(found, min(count, len(found)))


def reachable(job: Job, host: Host) -> None:
    """Proves that the launcher reaches a host, before its network is changed."""
    until(
        lambda: reaches(job.cluster["head"], host),
        f"the launcher's host to reach {host.name}",
        10.0,
    )


def unreachable(job: Job, host: Host) -> None:
    """Proves that the launcher does not reach a host."""
    assert not reaches(job.cluster["head"], host), f"{host.name} still answers"


def reaches(host: Host, other: Host) -> bool:
    """Returns whether the sshd of another host accepts a connection of a host within a second."""
    return (
        host.run("timeout", "1", "bash", "-c", f"</dev/tcp/{other.address}/{other.port}").returncode
        == 0
    )


def slow(job: Job) -> str:
    """The link of a host passes little for some seconds."""
    host = job.chance.choice(job.hosts())
    port = f"port{host.number}"
    limit = ("root", "tbf", "rate", "2mbit", "burst", "16kbit", "latency", "200ms")
    job.cluster.on_switch("tc", "qdisc", "add", "dev", port, *limit)
    try:
        assert "tbf" in job.cluster.on_switch("tc", "qdisc", "show", "dev", port)
        time.sleep(3.0)
    finally:
        job.cluster.on_switch("tc", "qdisc", "del", "dev", port, "root")
    return f"2 Mbit/s to {host.name} for 3 s"


def found_again(job: Job) -> None:
    """Puts the hosts back, and waits until the script finds them: a failure that lasts is
    reported only once.
    """
    head = job.cluster["head"]
    head.run("mv", "away", "hosts")
    head.run("rm", "-f", "found")
    until(lambda: head.run("test", "-e", "found").returncode == 0, "a script that finds hosts")


def script_fails(job: Job) -> str:
    """The discovery script ends with a failure for a while."""
    before = job.launcher_output().count("Exit code")
    head = job.cluster["head"]
    head.run("mv", "hosts", "away")
    until(
        lambda: job.launcher_output().count("Exit code") > before,
        lambda: f"the script's failure in {job.launcher_output()[-2000:]}",
    )
    found_again(job)
    return "the discovery script failed"


def script_hangs(job: Job) -> str:
    """The discovery script does not end for a while."""
    words = "did not end within"
    before = job.launcher_output().count(words)
    head = job.cluster["head"]
    head.run("sh", "-c", "mv hosts away && mkfifo hosts")
    until(
        lambda: job.launcher_output().count(words) > before,
        lambda: f"the script that hangs in {job.launcher_output()[-2000:]}",
    )
    found_again(job)
    return "the discovery script hung"


def remove(job: Job) -> str:
    """A host is no longer listed."""
    kept, _ = job.survivor()
    name = job.chance.choice([name for name in job.used() if name != kept.name])
    job.listed[name] = 0
    job.list()
    until(lambda: not job.workers(job.cluster[name]), f"the workers of {name} to leave", 90.0)
    return f"{name} removed"


def add(job: Job) -> str:
    """Hosts that were removed are listed again."""
    back = job.reduced()
    job.listed = dict.fromkeys(job.names, SLOTS)
    job.list()
    until(lambda: all(job.workers(job.cluster[name]) for name in back), f"workers on {back}", 90.0)
    return f"{' and '.join(back)} added"


def fewer_slots(job: Job) -> str:
    """A host has a slot less."""
    full = job.full()
    if not full:  # a worker has ended since the fault was drawn
        full = [name for name, slots in job.listed.items() if slots == SLOTS]
    name = job.chance.choice(full)
    job.listed[name] = SLOTS - 1
    job.list()
    until(
        lambda: len(job.workers(job.cluster[name])) <= SLOTS - 1,
        f"a worker of {name} to leave",
        90.0,
    )
    return f"{name} has {SLOTS - 1} slots"


def kill_launcher(job: Job) -> str:
    """SIGKILL to the launcher, and with it to the registrar; some time later it is started
    again.
    """
    before = {pid for host in job.hosts() for pid in job.workers(host)}
    pid, seconds = job.running.pid, job.chance.uniform(0.0, 8.0)
    os.kill(pid, signal.SIGKILL)
    until(lambda: job.running.process.poll() is not None, f"the end of the launcher {pid}")
    time.sleep(seconds)
    left = sum(bool(state(pid)) for pid in before)
    assert left > 0, (
        f"none of {len(before)} workers outlived the launcher: {job.running.output[-5000:]}"
    )
    job.start()
    until(
        lambda: "continues a job" in job.launcher_output(),
        lambda: f"the launcher to go on: {job.running.output[-5000:]}",
        30.0,
    )
    return (
        f"SIGKILL of the launcher, started again after {seconds:.1f} s with {left} of "
        f"{len(before)} workers"
    )


FAULTS: dict[Callable[[Job], str], int] = {
    kill: 6,
    kill_half: 1,
    stop_shortly: 3,
    stop_for_long: 1,
    cut_shortly: 3,
    cut_for_long: 1,
    part: 1,
    slow: 1,
    script_fails: 1,
    script_hangs: 1,
    remove: 2,
    add: 2,
    fewer_slots: 2,
    kill_launcher: 2,
}
"""Every fault, and how often it is drawn beside the others."""
POSSIBLE: dict[Callable[[Job], str], Callable[[Job], bool]] = {
    remove: lambda job: len(job.used()) > 2,
    add: lambda job: bool(job.reduced()),
    fewer_slots: lambda job: bool(job.full()),
}
"""Conditions of faults that cannot always happen."""


def draw(job: Job) -> Callable[[Job], str]:
    """One of the faults that can happen now."""
    found = {
        fault: often
        for fault, often in FAULTS.items()
        if fault not in POSSIBLE or POSSIBLE[fault](job)
    }
    return job.chance.choices(list(found), weights=list(found.values()))[0]
