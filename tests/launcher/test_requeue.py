# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole run --requeue`, with a program in the place of Slurm's `scontrol`.
`tests/launch/test_slurm_requeue.py` has the real one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import until
from tests.programs import program_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

PROGRAM = program_path(__file__, "commit_until_enough")
STATUS = (
    "JobId=7 JobName=train UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0"
)
NO_END = 10**9


class Slurm:
    """The program `scontrol` of a job, which writes down its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scontrol").write_text(
            f'#!/bin/sh\ncd {folder}\necho "$*" >>calls\n'
            'case "$1" in requeue) exec cat refusal >&2 ;; *) cat status ;; esac\n'
        )
        (folder / "scontrol").chmod(0o700)
        (folder / "calls").touch()
        (folder / "refusal").touch()
        self.set_status()

    def set_status(self, **fields: object) -> None:
        """Changes fields of the job's status."""
        text = STATUS
        for name, value in fields.items():
            text = re.sub(rf"\b{name}=\S+", f"{name}={value}", text)
        (self.folder / "status").write_text(f"{text}\n")

    def variables(self, **extra: str) -> dict[str, str]:
        """The variables of the job."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", **extra}

    def requeued(self) -> list[str]:
        """The jobs that were requeued."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [call.removeprefix("requeue ") for call in calls if call.startswith("requeue ")]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    return Slurm(folder)


class Job:
    """Starts of one job, which trains a run of one store."""

    def __init__(self, launch: Callable[..., Launch], slurm: Slurm, store: Path | str) -> None:
        self.slurm, self.store, self._launch = slurm, store, launch
        self.run: Launch | None = None

    def start(
        self,
        *flags: object,
        every: int = 1,
        last: int = NO_END,
        program: Path = PROGRAM,
        **extra: str,
    ) -> Launch:
        """Starts the job once more, and waits until its ranks train."""
        words = ("-np", 2, "--requeue", *flags, sys.executable, program, self.store, "digits")
        env = self.slurm.variables(**extra)
        self.run = self._launch(*words, every, last, env=env, after=self.run)
        until(lambda: self.begun() is not None, f"{self.run.err.read_text()}")
        return self.run

    def begun(self) -> int | None:
        """The step at which the last start of the job has begun."""
        assert self.run is not None
        assert self.run.process.poll() is None, self.run.err.read_text()
        found = re.findall(r"rank 0 begins at (\d+)", self.run.out.read_text())
        return int(found[0]) if found else None

    def suspend(self) -> str:
        """Sends the signal to the launcher, and waits until the launcher has got it."""
        assert self.run is not None
        run = self.run
        run.process.send_signal(signal.SIGUSR1)
        until(lambda: "got SIGUSR1" in run.err.read_text(), run.err.read_text())
        return run.err.read_text()


@pytest.fixture
def job(launch: Callable[..., Launch], slurm: Slurm, tmp_path: Path) -> Job:
    return Job(launch, slurm, tmp_path / "store")


def commit_of(run: Launch) -> int:
    """The commit from which the launcher says that the requeued job continues."""
    (found,) = re.findall(
        r"job \S+ is requeued, and continues from commit (\d+)", run.err.read_text()
    )
    return int(found)


@pytest.mark.parametrize("flags", [(), ("--min-np", 1)], ids=["fixed", "elastic"])
def test_a_suspended_job_is_requeued_once_and_continues_from_its_commit(
    job: Job, flags: tuple[object, ...]
) -> None:
    run = job.start(*flags, every=1000)
    job.suspend()
    run.process.send_signal(signal.SIGUSR1)  # a second one changes nothing
    assert run.wait() == 75, run.err.read_text()
    assert job.slurm.requeued() == ["7"]
    committed = commit_of(run)
    assert committed > 0
    assert "the rest of the script" not in run.out.read_text(), "the script ends at the commit"
    run = job.start(*flags)
    assert job.begun() == committed
    (run.folder / "enough").touch()
    assert run.wait() == 0, run.err.read_text()
    assert run.out.read_text().count("the rest of the script") == 2
    assert job.slurm.requeued() == ["7"], "a job that has ended is not requeued"


def test_a_job_without_progress_is_not_requeued_again(job: Job) -> None:
    run = job.start(last=1)
    job.suspend()
    assert run.wait() == 75, run.err.read_text()
    run = job.start(last=1)
    assert job.begun() == 1
    job.suspend()
    assert run.wait() == 1, run.err.read_text()
    assert "job 7 is not requeued: this start has made no progress" in run.err.read_text()
    assert job.slurm.requeued() == ["7"]


def test_a_job_is_requeued_a_limited_number_of_times(job: Job) -> None:
    job.slurm.set_status(Restarts=100)
    run = job.start()
    job.suspend()
    assert run.wait() == 1, run.err.read_text()
    reason = "job 7 could not be requeued: it has had 100 requeues, and --max-requeues is 100"
    assert reason in run.err.read_text()
    assert job.slurm.requeued() == []
    run = job.start("--max-requeues", "101")
    job.suspend()
    assert run.wait() == 75, run.err.read_text()
    assert job.slurm.requeued() == ["7"]


def test_an_element_of_an_array_is_requeued_without_the_others(job: Job) -> None:
    run = job.start(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert "job 7_3 is requeued" in job.suspend()
    assert run.wait() == 75, run.err.read_text()
    assert job.slurm.requeued() == ["7_3"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"Restarts": 1}, "something else has requeued it"),
        ({"JobState": "COMPLETING"}, "its state is COMPLETING"),
    ],
)
def test_a_job_that_something_else_has_requeued_is_not_requeued_twice(
    job: Job, fields: dict[str, object], reason: str
) -> None:
    run = job.start()
    job.slurm.set_status(**fields)
    job.suspend()
    assert run.wait() == 1, run.err.read_text()
    assert f"job 7 could not be requeued: {reason}" in run.err.read_text()
    assert job.slurm.requeued() == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"Requeue": 0}, "submit it with sbatch --requeue"),
        ({"BatchFlag": 0}, "sbatch has not started it"),
    ],
)
def test_a_job_that_slurm_would_not_requeue_does_not_start(
    launch: Callable[..., Launch], slurm: Slurm, fields: dict[str, object], reason: str
) -> None:
    slurm.set_status(**fields)
    run = launch("-np", 1, "--requeue", "touch", "started", env=slurm.variables())
    assert run.wait() != 0
    assert reason in run.err.read_text()
    assert not (run.folder / "started").exists()


def test_outside_of_slurm_the_flag_is_an_error(launch: Callable[..., Launch]) -> None:
    run = launch("-np", 1, "--requeue", "touch", "started", env={"SLURM_JOB_ID": ""})
    assert run.wait() != 0
    assert "SLURM_JOB_ID is not set" in run.err.read_text()
    assert not (run.folder / "started").exists()


def test_an_elastic_job_that_loses_a_rank_and_then_ends_is_not_requeued(job: Job) -> None:
    flags = ("--min-np", 1, "--blacklist-cooldown-range", 600, 600)
    run = job.start(*flags, program=program_path(__file__, "lose_rank_in_suspension"))
    job.suspend()
    assert run.wait() == 0, run.err.read_text()
    assert (run.folder / "gone").exists()
    assert run.out.read_text().count("the rest of the script") == 1
    assert "job 7 is not requeued: its program has ended before a commit" in run.err.read_text()
    assert job.slurm.requeued() == []


def test_a_job_whose_commit_cannot_be_written_fails_and_is_not_requeued(job: Job) -> None:
    run = job.start(every=NO_END)
    assert not isinstance(job.store, str)
    # Directories in the places of the commit and of the one before cannot be replaced by files.
    for name in ("checkpoint", "checkpoint.previous"):
        (job.store / "runs/digits" / name / "full").mkdir(parents=True)
    job.suspend()
    assert run.wait() not in (0, 75), run.err.read_text()
    assert "job 7 is not requeued: it has failed" in run.err.read_text()
    assert job.slurm.requeued() == []


def test_a_state_without_a_store_is_named_and_its_job_continues(
    launch: Callable[..., Launch], slurm: Slurm
) -> None:
    job = Job(launch, slurm, "none")
    run = job.start()
    assert "call its save_to(store, run_id)" in job.suspend()
    (run.folder / "enough").touch()
    assert run.wait() == 0, run.err.read_text()
    assert "job 7 is not requeued: its program has ended before a commit" in run.err.read_text()
    assert slurm.requeued() == []
