# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures for tests of launched processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 120.0
"""Seconds for the longest command: it imports torch and transformers in each rank."""


class Launch:
    """A running `farandole run`, its output in files so that no pipe can fill up."""

    def __init__(
        self, folder: Path, arguments: list[str], env: dict[str, str] | None, again: str = ""
    ) -> None:
        self.folder = folder
        self.out = folder / f"out{again}"
        self.err = folder / f"err{again}"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farandole", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
                cwd=folder,
            )

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(LIMIT)

    def lines(self) -> list[str]:
        """Lines of stdout so far, sorted: ranks write as they please."""
        return sorted(self.out.read_text().splitlines())

    def until(self, *wanted: str) -> None:
        """Waits until stdout has these lines."""
        until(lambda: set(wanted) <= set(self.lines()), f"{wanted} in {self.out.read_text()}")

    def pids(self, prefix: str = "pid ") -> list[int]:
        """Numbers that workers printed after a prefix."""
        texts = (line.split(":", 1)[1] for line in self.lines())
        return [int(text.removeprefix(prefix)) for text in texts if text.startswith(prefix)]


def until(fits: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + limit
    while not fits():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Starts `farandole run` with the given arguments; what is still running at the end is killed.

    One that is started after another, which has ended, runs in the same folder.
    """
    started: list[Launch] = []

    def start(
        *arguments: object, env: dict[str, str] | None = None, after: Launch | None = None
    ) -> Launch:
        folder = after.folder if after else tmp_path / str(len(started))
        folder.mkdir(exist_ok=True)
        again = f"-{len(started)}" if after else ""
        started.append(Launch(folder, [str(argument) for argument in arguments], env, again))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
            one.process.wait()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a Python script and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + text)
        return path

    return write
