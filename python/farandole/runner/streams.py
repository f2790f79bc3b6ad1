# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The streams to which a backend and its workers write."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from farandole.runner.gang import JobOutput
from farandole.runner.rank_files import RankOutputFiles

if TYPE_CHECKING:
    import os


@dataclass(frozen=True)
class OutputStreams:
    """Output arguments of every backend.

    Attributes:
        stdout: Receiver of the workers' stdout, each line as `[rank]<stdout>:line`; default:
            `sys.stdout`.
        stderr: The same for stderr; default: `sys.stderr`.
        timestamp: Whether those lines also start with the time.
        verbose: 0 shows only the workers' output, 1 also the reason why the job waits, 2 also the
            host of each rank.
        folder: Directory that also receives each rank's output, to `rank.<N>/stdout` and
            `rank.<N>/stderr`.
    """

    stdout: TextIO | None = None
    stderr: TextIO | None = None
    timestamp: bool = False
    verbose: int = 1
    folder: str | os.PathLike[str] | None = None

    def make_job_output(self, size: int) -> JobOutput:
        """Returns the output of one job. It uses the present `sys.stdout`, because notebooks
        replace it.

        Args:
            size: Number of ranks.
        """
        made = JobOutput(
            self.stdout or sys.stdout, self.stderr or sys.stderr, self.timestamp, self.verbose
        )
        if self.folder is not None:
            made.files = RankOutputFiles(Path(self.folder), size)
        return made
