# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the page requeue.md in a real Slurm: its signal before the time limit, its
requeueing, its arrays.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launch import slurm as slurms
from tests.launcher.conftest import until
from tests.pages import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SCRIPT, ARRAY = [
    block.text for block in blocks_of("docs/user-guide/running/requeue.md") if block.kind == "bash"
]
(PROGRAM,) = [
    block.text
    for block in blocks_of("docs/user-guide/running/requeue.md")
    if block.kind == "python"
]
NO_END = "STEPS = 1_000_000\n"
LIMIT = 180.0
"""Seconds for Slurm, which looks at time limits twice a minute."""


class BatchJob:
    """A job of a script of the page."""

    def __init__(self, slurm: slurms.Slurm, script: str) -> None:
        """Submits the script with a time limit that the test's partition has."""
        self.slurm = slurm
        (slurm.folder / "train.py").write_text(self.program())
        path = slurm.folder / "batch.sh"
        short = script.replace("--time=04:00:00", "--time=00:02:00")
        path.write_text(short.replace("USR1@120", "USR1@30"))
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = slurm.run("sbatch", "--parsable", "--overcommit", str(path), PATH=programs)
        assert done.status == 0, done.err
        self.number = done.out.strip()

    @staticmethod
    def program(steps: str = NO_END) -> str:
        """The program of the page with another number of steps."""
        assert NO_END in PROGRAM
        return PROGRAM.replace(NO_END, steps)

    def end_training(self) -> None:
        """Lets the next start end at its first step."""
        (self.slurm.folder / "train.py").write_text(self.program("STEPS = 0\n"))

    def output(self, element: str = "") -> str:
        """The output of the job so far."""
        path = self.slurm.folder / f"slurm-{self.number}{element}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def field(self, name: str, element: str = "") -> str:
        """A field of the job in Slurm."""
        done = self.slurm.run("scontrol", "--oneliner", "show", "job", f"{self.number}{element}")
        assert done.status == 0, done.err
        return re.findall(rf"\b{name}=(\S+)", done.out)[0]

    def await_output(self, text: str, element: str = "") -> None:
        """Waits for a text in the output."""
        until(lambda: text in self.output(element), f"{text} in {self.output(element)}", LIMIT)

    def await_requeue(self, element: str = "") -> int:
        """Waits until the job is in the queue again; the commit from which it continues."""
        found: list[str] = []

        def is_requeued() -> bool:
            found[:] = re.findall(
                r"is requeued, and continues from commit (\d+)", self.output(element)
            )
            return bool(found) and self.field("JobState", element) == "PENDING"

        until(is_requeued, f"{self.output(element)}", LIMIT)
        assert len(found) == 1, self.output(element)
        assert self.field("Restarts", element) == "1"
        return int(found[0])

    def await_next_start(self, text: str, element: str = "") -> None:
        """Waits until the next start has printed a text. Slurm starts a requeued job when the
        credentials of the earlier start have expired, at the next pass of its scheduler.
        """
        limit = slurms.CREDENTIAL_LIFE + slurms.SCHEDULING_INTERVAL + LIMIT
        until(
            lambda: text in self.output(element),
            f"{text} in {self.output(element)}, {self.field('JobState', element)} "
            f"{self.field('Reason', element)}",
            limit,
        )


@pytest.fixture
def slurm() -> Iterator[slurms.Slurm]:
    reason = slurms.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurms.Slurm() as running:
        yield running


def test_slurms_warning_before_the_limit_requeues_the_job_once_and_it_continues(
    slurm: slurms.Slurm,
) -> None:
    job = BatchJob(slurm, SCRIPT)
    job.await_output("line-0: continues from step 0")
    job.await_output("got SIGUSR1")
    committed = job.await_requeue()
    assert committed > 0
    job.end_training()
    job.await_next_start(f"line-0: {committed} steps")
    until(lambda: job.field("JobState") == "COMPLETED", job.output(), LIMIT)
    assert job.field("Restarts") == "1", "a job that has ended is not requeued"
    assert f"line-0: continues from step {committed}" in job.output()


def test_an_element_of_an_array_is_requeued_alone(slurm: slurms.Slurm) -> None:
    job = BatchJob(slurm, ARRAY.replace("--signal=B:USR1@120", "--comment=none"))
    for element in "01":
        job.await_output(f"line-{element}: continues from step 0", f"_{element}")
    # The last element of an array has the number of the array, which means all of them to scontrol.
    numbers = {element: job.field("JobId", f"_{element}") for element in "01"}
    (last,) = [element for element, number in numbers.items() if number == job.number]
    done = slurm.run("scancel", "--signal=USR1", "--batch", f"{job.number}_{last}")
    assert done.status == 0, done.err
    committed = job.await_requeue(f"_{last}")
    (other,) = {"0", "1"} - {last}
    assert job.field("JobState", f"_{other}") == "RUNNING"
    assert job.field("Restarts", f"_{other}") == "0"
    job.end_training()
    job.await_next_start(f"line-{last}: {committed} steps", f"_{last}")
    assert "requeued" not in job.output(f"_{other}")
