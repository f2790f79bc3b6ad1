# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Signals of a real Slurm to an elastic job: on the node of the script the launcher starts
workers, `srun` elsewhere
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launch import slurm as slurms
from tests.launch.namespace_cluster import until
from tests.launcher.elastic import SLOW, TRAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


class Job:
    """An elastic job of two workers on each node, in a batch script as the page has it for
    signals.
    """

    def __init__(self, slurm: slurms.Slurm) -> None:
        """Submits it."""
        self.slurm = slurm
        self.out, self.err, code = (slurm.folder / name for name in ("out", "err", "train.py"))
        code.write_text(TRAIN.replace("AT_EACH_STEP", "pass"))
        flags = " ".join(map(str, ("--min-np", 1, *SLOW)))
        script = slurm.folder / "batch.sh"
        script.write_text(
            f"#!/bin/bash\nexec {sys.executable} -m farandole run {flags} {sys.executable} {code}\n"
        )
        size = ("-N", str(len(slurm.nodes)), "--ntasks-per-node=2", "--overcommit")
        done = slurm.run(
            "sbatch", "--parsable", *size, "-o", str(self.out), "-e", str(self.err), str(script)
        )
        assert done.status == 0, done.err
        self.number = done.out.strip()

    @property
    def job_output(self) -> str:
        """Returns the output of the job, and its state in Slurm."""
        texts = [path.read_text(errors="replace") for path in (self.out, self.err) if path.exists()]
        return "\n".join([*texts, self.slurm.run("scontrol", "show", "job", self.number).out])

    def members(self, size: int) -> list[int]:
        """Waits for a world of this size; its processes, by rank."""
        found: dict[int, int] = {}

        def fits() -> bool:
            assert not self.is_over(), self.job_output
            lines = self.out.read_text(errors="replace") if self.out.exists() else ""
            said = re.findall(r":world (\d+) rank (\d+) pid (\d+) ", lines)[-size:]
            found.clear()
            found.update((int(rank), int(pid)) for now, rank, pid in said if int(now) == size)
            return len(found) == size

        until(fits, lambda: f"a world of {size}: {self.job_output}")
        return [found[rank] for rank in range(size)]

    def is_over(self) -> bool:
        """Returns whether no process of it is left, as far as Slurm knows."""
        return not self.slurm.run("squeue", "-h", "-j", self.number).out.strip()

    def end(self) -> str:
        """Waits for its end; its exit code, as Slurm writes it: a status, and the number of a
        signal.
        """
        until(self.is_over, lambda: self.job_output)
        (code,) = re.findall(r" ExitCode=(\S+)", self.job_output)
        return code

    def signal(self, name: str, *flags: str) -> None:
        """Has Slurm send a signal, as `sbatch --signal` does."""
        done = self.slurm.run("scancel", f"--signal={name}", *flags, self.number)
        assert done.status == 0, done.err


@pytest.fixture
def job() -> Iterator[Job]:
    reason = slurms.missing()
    if reason is not None:
        pytest.skip(reason)
    host = slurms.Slurm().host
    with slurms.Slurm(host, "another") as running:
        yield Job(running)


def by_srun(pids: list[int]) -> list[int]:
    """Returns the processes among `pids` that a step of Slurm runs."""
    return [
        pid
        for pid in pids
        if b"SLURM_STEP_NODELIST=another\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]


def test_slurms_sigterm_makes_the_workers_on_other_nodes_leave(job: Job) -> None:
    first = job.members(4)
    other = by_srun(first)
    assert len(other) == 2
    job.signal("TERM")
    assert set(job.members(2)) == set(first) - set(other), "the others go on"
    until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in other),
        "the end of those that leave",
    )
    for word in ("was ended by", "exited with", "lost"):
        assert word not in job.err.read_text(), "to leave is no failure"
    (job.slurm.folder / "enough").touch()
    assert job.end() == "0:0"
    assert job.out.read_text().count(":over 2") == 2


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("INT", 2)])
def test_a_signal_to_the_batch_script_ends_the_whole_job(job: Job, name: str, number: int) -> None:
    pids = job.members(4)
    job.signal(name, "--batch")
    assert job.end() == f"{128 + number}:0"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert ("KeyboardInterrupt" in job.err.read_text()) == (name == "INT"), job.job_output
