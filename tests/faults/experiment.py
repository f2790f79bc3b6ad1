# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One cell of the grid: a world, a fault, and what must follow."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.faults.job import Job
from tests.faults.sabotage import Connections
from tests.faults.table import FAULTS

if TYPE_CHECKING:
    from tests.faults.table import Cell

PEER_TIMEOUT: Final = 1.0
"""Seconds, in all cells: the default of 5 only makes them slower."""
RATIONED: Final = 1.6
"""Seconds for which a kernel may leave the question unanswered whether a full connection takes
more: until then nobody knows that packets vanish (`tcp/path.rs`). A peer timeout as short as this
one shows it; the default does not."""
ON_ITS_HOST: Final = 0.1
ELSEWHERE: Final = 1.0
HOPS: Final = 4
"""Processes that have to be given a core, one after the other, until the last rank knows."""
ERRORS: Final = ("FarandoleInternalError", "HorovodInternalError")
REPORT: Final = "FARANDOLE_FAULTS_REPORT"


class Pace:
    """The longest time this machine kept something waiting that was ready to run."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(0.002)
            self.longest = max(self.longest, time.monotonic() - began - 0.002)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def hosts(cell: Cell) -> list[str | None]:
    """The names that the ranks' hosts go by."""
    return [f"host{host}" for host in cell.hosts]


def run(
    cell: Cell,
    peer_timeout: float = PEER_TIMEOUT,
    stopped_for: float = 0.0,
    env: dict[str, str] | None = None,
) -> None:
    """Runs the cell with these settings. That a new world starts right after is for the next one
    to show.
    """
    fault = FAULTS[cell.fault]
    before = _descriptors()
    plan = {
        "operation": cell.operation,
        "fault": fault.name,
        "victim": cell.victim,
        "inside": fault.inside,
        "survivable": fault.survivable,
        "pause": peer_timeout * 1.5,
    }
    with (
        Pace() as pace,
        Job(hosts(cell), {"FARANDOLE_PEER_TIMEOUT": f"{peer_timeout}", **(env or {})}) as job,
    ):
        job.begin(plan)
        everybody = range(cell.ranks)
        working = job.until({"working", "failed", "unharmed"}, everybody, 30)
        assert len(working) == cell.ranks, f"not all ranks work: {job.story()}"
        trial = _Trial(cell, job, peer_timeout, pace)
        if fault.survivable:
            trial.survives()
        elif fault.name == "mismatch":
            trial.disagrees()
        else:
            trial.breaks(stopped_for)
        outcomes = job.end()
        trial.judge_ends(outcomes)
    _report(cell, trial.latencies, trial.texts, pace.longest)
    _nothing_left(job, before)


class _Trial:
    def __init__(self, cell: Cell, job: Job, peer_timeout: float, pace: Pace) -> None:
        self.cell = cell
        self.fault = FAULTS[cell.fault]
        self.job = job
        self.peer_timeout = peer_timeout
        self.pace = pace
        self.pair: tuple[int, ...] = ()
        """The ends of the connection that a fault was done to."""
        self.latencies: dict[int, float] = {}
        self.texts: dict[int, str] = {}

    def survives(self) -> None:
        """Every step of every rank has the right result."""
        done = self.job.until({"done", "failed", "unharmed"}, range(self.cell.ranks), 30)
        assert {message["what"] for message in done.values()} == {"done"}, self.job.story()
        assert len(done) == self.cell.ranks, self.job.story()

    def disagrees(self) -> None:
        """Every rank gets an error with all ranks' submissions, and all continue."""
        everybody = range(self.cell.ranks)
        told = self.job.until({"mismatch", "failed", "unharmed"}, everybody, 20)
        done = self.job.until({"done", "failed", "unharmed"}, everybody, 20)
        assert [done.get(rank, {}).get("what") for rank in everybody] == [
            "done"
        ] * self.cell.ranks, self.job.story()
        last = max(message["began"] for message in told.values())
        for rank, message in told.items():
            self.note(rank, message["at"] - last, message["text"], ELSEWHERE)
            self.names({self.cell.victim}, message["text"])

    def breaks(self, stopped_for: float) -> None:
        """Every other rank gets its error in time, naming the guilty one."""
        victim, others = (
            self.cell.victim,
            [rank for rank in range(self.cell.ranks) if rank != self.cell.victim],
        )
        began = self.inflict()
        limit = 20 + 2 * self.peer_timeout
        told = self.job.until({"failed", "unharmed"}, others, limit)
        if self.fault.inside:
            began = self.job.began()
        missing = [rank for rank in others if told.get(rank, {}).get("what") != "failed"]
        if self.fault.name == "stop":
            time.sleep(max(0.0, began + stopped_for - time.monotonic()))
            os.kill(self.job.pids[victim], signal.SIGCONT)
        assert not missing, f"ranks {missing} heard nothing: {self.job.story()}"
        for rank, message in told.items():
            assert message["kind"] in ERRORS, message
            self.note(rank, message["at"] - began, message["text"], self.deadline(rank))
            self.names(self.guilty(rank), message["text"])
            self.judge_later(message)
        if self.fault.name in ("stop", "partition", "drop", "reset"):
            own = self.job.until({"failed", "unharmed"}, [victim], limit).get(victim)
            assert own is not None, f"rank {victim} itself heard nothing: {self.job.story()}"
            assert own["kind"] in ERRORS, own
            if self.fault.link:
                # There is nothing wrong with it: it has to learn as soon as all others, and as
                # much.
                self.note(victim, own["at"] - began, own["text"], self.deadline(victim))
                self.names(self.guilty(victim), own["text"])
            self.judge_later(own)
        if self.fault.name == "shutdown":
            left = self.job.until({"left"}, [victim], 10)
            assert left[victim]["text"].startswith(ERRORS), left

    def inflict(self) -> float:
        """Does it; returns when it was, unless the rank itself tells."""
        victim, pid = self.cell.victim, self.job.pids[self.cell.victim]
        if self.fault.inside:
            return 0.0
        if self.fault.name in ("kill", "stop"):
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL if self.fault.name == "kill" else signal.SIGSTOP)
            return began
        connections = Connections(self.job.pids)
        try:
            if self.fault.name == "partition":
                cut = connections.across(self.side(victim))
                began = time.monotonic()
                for connection in cut:
                    connection.silence()
                return began
            self.pair, connection = connections.busiest(victim)
            if self.fault.name == "drop":
                connection.silence()
                # Nothing is lost, and no rank can know, before something is sent.
                limit = time.monotonic() + 30
                while not connection.waits:
                    assert time.monotonic() < limit, (
                        f"nothing was sent where it is silent: {self.job.story()}"
                    )
                    time.sleep(0.002)
                return time.monotonic()
            began = time.monotonic()
            connection.reset()
            return began
        finally:
            connections.close()

    def side(self, rank: int) -> set[int]:
        """The ranks on this side of a partition, which cuts the victim's host off."""
        hosts = self.cell.hosts
        inside = hosts[rank] == hosts[self.cell.victim]
        return {
            other
            for other in range(self.cell.ranks)
            if (hosts[other] == hosts[self.cell.victim]) == inside
        }

    def guilty(self, rank: int) -> set[int]:
        """Returns the ranks of which a rank's error must name one."""
        if self.fault.name == "partition":
            # A rank on one side misses a rank on the other.
            return set(range(self.cell.ranks)) - self.side(rank)
        return set(self.pair) or {self.cell.victim}

    def deadline(self, rank: int) -> float:
        if self.fault.name == "drop":
            return self.peer_timeout + RATIONED
        if self.fault.silent:
            return self.peer_timeout
        if self.fault.kind == "end":
            near = self.cell.hosts[rank] == self.cell.hosts[self.cell.victim]
            return ON_ITS_HOST if near else ELSEWHERE
        return ELSEWHERE

    def note(self, rank: int, latency: float, text: str, deadline: float) -> None:
        self.latencies[rank] = latency
        self.texts[rank] = text
        allowed = deadline + HOPS * self.pace.longest
        assert latency <= allowed, (
            f"rank {rank} heard after {latency:.3f} s, allowed {allowed:.3f}: {text}"
        )

    def names(self, guilty: set[int], text: str) -> None:
        named = {int(number) for number in re.findall(r"\brank (\d+)\b", text)}
        assert guilty & named, f"of {guilty} nobody is named: {text}"

    def judge_later(self, message: dict[str, Any]) -> None:
        assert message["later"].startswith((*ERRORS, "FarandoleUsageError")), message
        assert message["later_took"] < ELSEWHERE + HOPS * self.pace.longest, message
        assert message["leaving_took"] < 2 * ELSEWHERE + HOPS * self.pace.longest, message

    def judge_ends(self, outcomes: list[Any]) -> None:
        """Checks that each process ended by itself, except the one that was killed."""
        for rank, outcome in enumerate(outcomes):
            expected: tuple[int | None, int | None] = (0, None)
            if rank == self.cell.victim and self.fault.name in ("kill", "orphan"):
                expected = (None, signal.SIGKILL)
            if rank == self.cell.victim and self.fault.name == "exception":
                expected = (1, None)
            assert (outcome.exit_code, outcome.signal) == expected, (
                f"rank {rank}: {self.job.story()}"
            )


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _nothing_left(job: Job, descriptors: int) -> None:
    deadline = time.monotonic() + 30
    while (left := job.left_over()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"processes are left: {left}"
    for host, port in job.ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            assert probe.connect_ex((host, port)) != 0, f"somebody still listens on {host}:{port}"
    while _descriptors() > descriptors and time.monotonic() < deadline:
        time.sleep(0.01)
    names = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert _descriptors() <= descriptors, f"descriptors are left: {names}"


def a_world_works(operation: str, on: list[str | None]) -> None:
    """A world of these hosts starts, works and ends."""
    plan = {
        "operation": operation,
        "fault": "nothing",
        "victim": -1,
        "inside": False,
        "survivable": True,
    }
    with Job(on, {}) as job:
        job.begin(plan)
        done = job.until({"done", "failed", "unharmed"}, range(job.size), 30)
        assert [message["what"] for message in done.values()] == ["done"] * job.size, job.story()
        job.end()


def _report(cell: Cell, latencies: dict[int, float], texts: dict[int, str], pace: float) -> None:
    path = os.environ.get(REPORT)
    if not path:
        return
    row = {
        "operation": cell.operation,
        "fault": cell.fault,
        "transport": cell.transport,
        "ranks": cell.ranks,
        "victim": cell.victim,
        "latency_s": {str(rank): round(latency, 4) for rank, latency in sorted(latencies.items())},
        "error": {str(rank): text for rank, text in sorted(texts.items())},
        "longest_wait_for_a_core_s": round(pace, 4),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")
