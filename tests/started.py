# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Processes that no launcher of ours has started, each with the variables that another one would
have set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT: Final = 120.0
"""Seconds for the longest of them."""
STARTERS: Final = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "JSM_",
    "HOROVOD_",
    "FARANDOLE_",
    "TORCHELASTIC_",
    "LSB_",
    "PBS_",
)
"""Prefixes of variables that tell of a start."""
PLAIN: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI_LOCALNRANKS",
    # Ranks share a pipe, and an unbuffered print writes a line in parts.
    "PYTHONUNBUFFERED",
)
PAGE: Final = Path(__file__).parents[1] / "docs" / "user-guide" / "running" / "other-launchers.md"
SUM: Final = """
import sys
import numpy as np
import farandole.numpy as hvd
hvd.init()
places = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
total = hvd.allreduce(np.full(3, 2.0 ** hvd.rank()), op=hvd.Sum)[0]
assert "mpi4py" not in sys.modules
sys.stdout.write(" ".join(map(str, ("place", *places, int(total)))) + "\\n")
"""  # noqa: E501
"""Says where this rank sits and which ranks took part in a sum, as bits."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int
    out: str
    err: str

    @property
    def place(self) -> list[int]:
        """The printed place: rank, size, local rank and size, cross rank and size, and the sum
        over all ranks.
        """
        lines = [line.split()[1:] for line in self.out.splitlines() if line.startswith("place ")]
        assert self.status == 0, self.err
        assert len(lines) == 1, self.out + self.err
        return [int(number) for number in lines[0]]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what any starter has left in it."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(STARTERS) and name not in PLAIN
    }
    return {**own, "OMP_NUM_THREADS": "1", "FARANDOLE_START_TIMEOUT": "60", **(extra or {})}


def script(code: str | Path) -> list[str]:
    """A command that runs these lines, or the program at this path."""
    return [sys.executable, str(code)] if isinstance(code, Path) else [sys.executable, "-c", code]


def on_host(name: str) -> list[str]:
    """A command before another one that makes it a process of a host of this name; needs root."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]


def together(
    environments: Sequence[Mapping[str, str]],
    code: str | Path = SUM,
    prefixes: Sequence[Sequence[str]] | None = None,
    arguments: Sequence[str] = (),
) -> list[Ended]:
    """Runs one process for each environment at the same time, to their ends; with a command
    before each, if given, and the same arguments for all.
    """
    with tempfile.TemporaryDirectory(prefix="farandole-started-") as folder:
        files = [
            (Path(folder) / f"{index}.out", Path(folder) / f"{index}.err")
            for index in range(len(environments))
        ]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for (out, err), extra, prefix in zip(
                files, environments, prefixes or [()] * len(environments), strict=True
            ):
                with out.open("wb") as output, err.open("wb") as errors:
                    running.append(
                        subprocess.Popen(
                            [*prefix, *script(code), *arguments],
                            env=environment(extra),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=errors,
                        )
                    )
            statuses = [process.wait(LIMIT) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [
            Ended(status, out.read_text(), err.read_text())
            for status, (out, err) in zip(statuses, files, strict=True)
        ]


def run(
    command: Sequence[str],
    extra: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit: float = LIMIT,
) -> Ended:
    """Runs a starter to its end."""
    ended = subprocess.run(
        list(command),
        env=environment(extra),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def blocks(page: Path, language: str) -> list[str]:
    """The pieces of code of a page."""
    pieces = page.read_text().split("```")[1::2]
    return [
        piece.removeprefix(f"{language}\n") for piece in pieces if piece.startswith(f"{language}\n")
    ]


def places(ended: Ended) -> list[list[int]]:
    """Returns the places that all ranks printed, by rank."""
    assert ended.status == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines() if "place " in line]
    return sorted([int(number) for number in line[line.index("place") + 1 :]] for line in lines)


def world(size: int) -> list[list[int]]:
    """Returns the places that the ranks of one host print."""
    return [[rank, size, rank, size, 0, 1, 2**size - 1] for rank in range(size)]
