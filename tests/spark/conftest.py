# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One Spark session for the whole directory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession


# Where the tests of estimators have Keras run; it is the backend that is imported anyway. Slow
# tests take the others. Set while modules are collected, which import Keras, and while these tests
# run: others start processes of TensorFlow.
BACKEND = "KERAS_BACKEND"
CHOSEN = os.environ.get(BACKEND, "torch")
GIVEN = BACKEND in os.environ
os.environ[BACKEND] = CHOSEN


def pytest_collection_finish() -> None:
    if not GIVEN:
        del os.environ[BACKEND]


@pytest.fixture(scope="package", autouse=True)
def keras_backend() -> Iterator[None]:
    """Keras's backend in the processes that these tests start."""
    os.environ[BACKEND] = CHOSEN
    yield
    if not GIVEN:
        del os.environ[BACKEND]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A classic session with two slots."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    home = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("farandole-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", str(home / "local"))
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def pids(tmp_path: Path) -> Pids:
    """The directory in which workers of a test leave their process ids."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return Pids(folder)


class Pids:
    """The processes of a test's workers.

    `note` runs in the worker; `wait` and `gone` in the test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    @property
    def note(self) -> Callable[[], None]:
        """A function that picklers carry by value and that notes the process calling it, and its
        rank.
        """
        folder = self.folder

        def note() -> None:
            import os

            name = os.path.join(folder, str(os.getpid()))
            with open(name + ".new", "w") as file:
                file.write(os.environ["RANK"])
            os.rename(name + ".new", name)

        return note

    def seen(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.folder) if name.isdigit())

    def of_rank(self, rank: int) -> int:
        """The process of a rank that has noted itself; a warm worker's is not in
        `/proc/<pid>/environ`.
        """
        (pid,) = [
            pid for pid in self.seen() if Path(self.folder, str(pid)).read_text() == str(rank)
        ]
        return pid

    def wait(
        self, count: int, limit: float = 30.0, driver: subprocess.Popen[str] | None = None
    ) -> list[int]:
        """Waits until so many workers have noted themselves, or the driver that starts them has
        ended.
        """
        deadline = time.monotonic() + limit
        while len(self.seen()) < count:
            told = f"only {len(self.seen())} of {count} workers started"
            if driver is not None and driver.poll() is not None:
                raise AssertionError(
                    f"{told}, and their driver has ended:\n{driver.communicate()[1][-3000:]}"
                )
            assert time.monotonic() < deadline, f"{told} in {limit} s"
            time.sleep(0.01)
        return self.seen()

    def gone(self, count: int, limit: float = 30.0) -> bool:
        """Returns whether the workers, so many of them, are gone within the limit."""
        assert len(self.seen()) == count
        deadline = time.monotonic() + limit
        while any(alive(pid) for pid in self.seen()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
