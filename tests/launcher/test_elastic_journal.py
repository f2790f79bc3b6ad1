# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A launcher that is killed while its job trains, and is started again with its journal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import is_alive, until
from tests.launcher.elastic import QUICK, SLOW, TRAIN, failed, finish, own, printed_worlds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]


class Job:
    """An elastic job with a journal."""

    def __init__(
        self, launch: Start, folder: Path, *flags: object, cooldown: tuple[object, ...] = QUICK
    ) -> None:
        """Starts it."""
        script = folder / "train.py"
        script.write_text(
            TRAIN.replace("AT_EACH_STEP", "open('step', 'w').write(f'{state.step}\\n')")
        )
        self.journal = folder / "journal"
        self.launch = launch
        self.words = (*flags, "--journal", self.journal, *cooldown, sys.executable, str(script))
        self.run = launch(*self.words)
        self.pids: list[int] = []

    def members(self, size: int) -> list[int]:
        """The processes of a world of this size, by rank, once it trains.

        After a restart, lines that the first launcher has not confirmed come again, in their order
        for each process.
        """
        found: list[int] = []

        def fits() -> bool:
            assert self.run.process.poll() is None, self.run.err.read_text()
            last = {one["pid"]: one for one in printed_worlds(self.run) if is_alive(one["pid"])}
            ranks = sorted(last.values(), key=lambda one: one["rank"])
            found[:] = [one["pid"] for one in ranks]
            return [(one["world"], one["rank"]) for one in ranks] == [
                (size, rank) for rank in range(size)
            ]

        until(fits, f"a world of {size}")
        self.pids += [pid for pid in found if pid not in self.pids]
        return found

    def agents(self) -> list[int]:
        """Returns the ids of the agents that started the processes."""
        return [parent(pid) for pid in self.pids if is_alive(pid)]

    def kill(self) -> None:
        """SIGKILL to the launcher."""
        self.run.process.kill()
        self.run.process.wait()

    def again(self) -> None:
        """Starts the launcher again, in the same folder."""
        self.run = self.launch(*self.words, after=self.run)

    def step(self) -> int:
        """The last step of some rank."""
        path = self.run.folder / "step"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.endswith("\n") else 0

    def trains(self) -> None:
        """Waits for some steps."""
        before = self.step()
        until(lambda: self.step() >= before + 20, f"steps after {before}")


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_launcher_that_starts_again_takes_its_workers_back(launch: Start, tmp_path: Path) -> None:
    job = Job(launch, tmp_path, "-np", 3, "--min-np", 2)
    before = job.members(3)
    assert job.journal.stat().st_mode & 0o777 == 0o600
    job.kill()
    job.trains()
    time.sleep(3.0)  # Longer than an agent without its registrar lives where there is no journal.
    job.trains()
    job.again()
    until(lambda: "continues a job that has 3 processes" in own(job.run), "the launcher to go on")
    job.trains()
    assert all(is_alive(pid) for pid in before), "the same processes"
    agents = job.agents()
    # It decides as before: one is lost, and another takes its place.
    os.kill(before[1], signal.SIGKILL)
    after = job.members(2)
    assert sorted(after) == sorted([before[0], before[2]])
    assert job.members(3)[0] == before[0]
    agents += job.agents()
    told = finish(job.run, 3)
    assert "rank 1 on localhost was ended by SIGKILL" in told
    assert not job.journal.exists(), "a job that is over has no journal"
    until(lambda: not any(map(is_alive, [*job.pids, *agents])), "nothing to be left")


def test_a_job_that_a_process_starts_has_nothing_of_its_journal(
    launch: Start, tmp_path: Path
) -> None:
    inner = (
        "import os, farandole.numpy as hvd; hvd.init(); print(sorted(os.environ), 'size', "
        "hvd.size())"
    )
    outer = f"""if True:
        import subprocess, sys
        import farandole.numpy as hvd
        hvd.init()
        inner = ["run", "-np", "2", sys.executable, "-c", {inner!r}]
        subprocess.run([sys.executable, "-m", "farandole", *inner], check=True)
    """
    journal = {"FARANDOLE_JOURNAL": str(tmp_path / "journal")}
    run = launch("-np", 1, "--min-np", 1, sys.executable, "-c", outer, env=journal)
    assert run.wait() == 0, run.err.read_text()
    lines = run.lines()
    assert len(lines) == 2
    for line in lines:
        assert line.endswith("size 2")
        assert not [name for name in ("JOURNAL", "OUTAGE", "ELASTIC") if f"_{name}'" in line], line


def test_processes_that_end_while_there_is_no_launcher_have_ended_well(
    launch: Start, tmp_path: Path
) -> None:
    job = Job(launch, tmp_path, "-np", 2, "--min-np", 1)
    pids = job.members(2)
    job.kill()
    (job.run.folder / "enough").touch()
    until(lambda: not any(map(is_alive, pids)), "the workers to end")
    job.again()
    assert job.run.wait() == 0, job.run.err.read_text()
    assert sum(line.endswith(":over 2") for line in job.run.lines()) == 2, (
        "what they wrote was kept"
    )


@pytest.mark.slow
@pytest.mark.timing
def test_processes_whose_launcher_stays_away_end_in_time(launch: Start, tmp_path: Path) -> None:
    job = Job(launch, tmp_path, "-np", 2, "--min-np", 2, "--registrar-timeout", 12)
    pids, agents = job.members(2), job.agents()
    job.kill()
    began = time.monotonic()
    until(lambda: not any(map(is_alive, [*pids, *agents])), "the processes to end")
    assert 11.0 < time.monotonic() - began < 30.0
    # What nobody lives for any more begins anew.
    job.again()
    assert set(job.members(2)).isdisjoint(pids)
    finish(job.run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_second_launcher_ends_what_the_first_has_started(
    launch: Start, tmp_path: Path, number: int
) -> None:
    job = Job(launch, tmp_path, "-np", 2, "--min-np", 2)
    pids, agents = job.members(2), job.agents()
    job.kill()
    job.again()
    until(lambda: "continues a job" in own(job.run), "the launcher to go on")
    job.run.process.send_signal(number)
    assert job.run.wait() != 0
    assert not any(map(is_alive, pids)), "no worker is left when the launcher ends"
    # They are no children of this launcher, and end after they have reported to it.
    until(lambda: not any(map(is_alive, agents)), "the agents to end", 10.0)
    assert not job.journal.exists()


@pytest.mark.slow
def test_workers_that_have_not_heard_that_the_job_is_over_hear_it_from_the_second_launcher(
    launch: Start, tmp_path: Path
) -> None:
    flags = (
        "-np",
        2,
        "--min-np",
        2,
        "--elastic-timeout",
        3,
        "--registrar-timeout",
        120,
        "--log-level",
        "debug",
    )
    job = Job(launch, tmp_path, *flags, cooldown=SLOW)
    dead, stopped = job.members(2)
    agent = parent(stopped)
    os.kill(dead, signal.SIGKILL)
    # It waits for a world of two in that call, and then hears nothing any more.
    asks = re.compile(r'"Asks":{"task":\d+,"after":1,')
    until(lambda: bool(asks.search(job.journal.read_text())), "the survivor to ask for a world")
    for pid in (agent, stopped):
        os.kill(pid, signal.SIGSTOP)
    try:
        until(
            lambda: "the registrar decides" in own(job.run) and "Aborted {" in own(job.run),
            "the job to be given up",
        )
        job.kill()
        job.again()
        until(lambda: "continues a job that has 1 process" in own(job.run), "the launcher to go on")
        # Longer than a registrar takes to close.
        time.sleep(4.0)
        assert job.run.process.poll() is None, own(job.run)
    finally:
        for pid in (agent, stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    until(lambda: not any(map(is_alive, [agent, stopped])), "the worker to end")
    failed(job.run, "timed out after 3.0s waiting for a world of at least 2 workers")
    assert not job.journal.exists()


@pytest.mark.slow
def test_a_supervisor_that_starts_the_command_again_continues_the_job(tmp_path: Path) -> None:
    # What systemd does for a service with Restart=on-failure and KillMode=process: another session
    # and id, little environment, no terminal, the root as the working directory.
    (tmp_path / "train.py").write_text(
        TRAIN.replace("AT_EACH_STEP", "").replace('"enough"', f'"{tmp_path}/enough"')
    )
    flags = ["-np", "2", "--min-np", "2", "--journal", str(tmp_path / "journal"), *map(str, QUICK)]
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        *flags,
        sys.executable,
        str(tmp_path / "train.py"),
    ]
    env = {
        name: os.environ[name]
        for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    output = (tmp_path / "out").open("ab")

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**env, "LANG": "C.UTF-8", "INVOCATION_ID": f"{number:032x}"},
            cwd="/",
            start_new_session=True,
        )

    def text() -> str:
        return (tmp_path / "out").read_text()

    service = start(0)
    until(lambda: text().count(":world 2 ") == 2, "the first world")
    try:
        for number in (1, 2):
            service.kill()
            assert service.wait() == -signal.SIGKILL
            service = start(number)
            until(
                lambda n=number: text().count("continues a job that has 2 processes") == n,
                "the job to go on",
            )
        (tmp_path / "enough").touch()
        assert service.wait(60.0) == 0, text()
    finally:
        (tmp_path / "enough").touch()
        service.terminate()
        service.wait()
        output.close()
    assert text().count(":over 2") == 2
    worlds = {line for line in text().splitlines() if ":world " in line}
    assert len(worlds) == 2, f"the same processes in the same world: {worlds}"


@pytest.mark.slow
def test_a_launcher_can_be_killed_again_and_again(launch: Start, tmp_path: Path) -> None:
    job = Job(launch, tmp_path, "-np", 2, "--min-np", 2)
    pids = job.members(2)
    for pause in (0.0, 0.1, 0.3, 1.0, 0.5):
        job.kill()
        time.sleep(pause)
        job.again()
        time.sleep(pause)
    until(lambda: "continues a job that has 2 processes" in own(job.run), "the launcher to go on")
    job.trains()
    assert all(is_alive(pid) for pid in pids)
    finish(job.run, 2)


@pytest.mark.slow
def test_a_journal_is_for_one_launcher_and_one_command(launch: Start, tmp_path: Path) -> None:
    job = Job(launch, tmp_path, "-np", 1, "--min-np", 1)
    job.members(1)
    failed(launch(*job.words), "another launcher uses it")
    other = launch("-np", 1, "--min-np", 1, "--journal", job.journal, sys.executable, "-c", "pass")
    failed(other, "another launcher uses it")
    job.kill()
    failed(
        launch("-np", 1, "--min-np", 1, "--journal", job.journal, "true"), "it is of another job"
    )
    job.again()
    finish(job.run, 1)
