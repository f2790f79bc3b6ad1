# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sparks of their own, as people deploy them, each started from the installed pyspark and gone
with its test.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from tests.programs import program_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HOME = Path(pyspark.__path__[0])
MAJOR = int(pyspark.__version__.partition(".")[0])
PATIENCE = float(os.environ.get("FARANDOLE_TEST_PATIENCE", "1"))
"""By how much longer everything may take on a machine that is slow, or busy."""
STARTS = 90.0 * PATIENCE

SESSION = program_text(__file__, "driver_session")
"""The beginning of a driver's program that is a text."""


def drive(
    code: str | Path, directory: Path, limit: float, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a driver's program to its end, and ends what is left of it when the time is over."""
    with driver(code, directory, *arguments, **env) as process:
        try:
            out, err = process.communicate(timeout=limit * PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"not done in {limit} s\n{out[-3000:]}\n{err[-6000:]}") from None
    assert process.returncode == 0, f"{out[-3000:]}\n{err[-6000:]}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def driver(
    code: str | Path, directory: Path, *arguments: str, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """A driver's program, a file or a text, running; it can be told something by its stdin."""
    program = [str(code)] if isinstance(code, Path) else ["-c", SESSION + code]
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=directory,
        env={
            "PYSPARK_PYTHON": sys.executable,
            **os.environ,
            "SPARK_HOME": str(home(directory)),
            **env,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def home(directory: Path) -> Path:
    """Spark's home as a folder of links, because executors of a local cluster always work inside
    it.
    """
    made = directory / "spark-home"
    made.mkdir(exist_ok=True)
    for entry in HOME.iterdir():
        if entry.name != "work" and not (made / entry.name).exists():
            (made / entry.name).symlink_to(entry)
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Service:
    """A JVM of Spark's that says on its output when it is ready."""

    def __init__(
        self,
        arguments: list[str],
        directory: Path,
        env: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.lines: list[str] = []
        self._news: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [*inside, str(HOME / "bin" / arguments[0]), *arguments[1:]],
            cwd=directory,
            env=os.environ
            | {"SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable}
            | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._news.put(line)

    def until(self, pattern: str) -> re.Match[str]:
        """Waits for a line that fits."""
        deadline = time.monotonic() + STARTS
        while True:
            try:
                line = self._news.get(timeout=max(0.01, min(1.0, deadline - time.monotonic())))
            except queue.Empty:
                told = "".join(self.lines[-40:])
                assert self.process.poll() is None, f"it ended:\n{told}"
                assert time.monotonic() < deadline, f"no {pattern!r} in {STARTS} s:\n{told}"
                continue
            found = re.search(pattern, line)
            if found is not None:
                return found

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def standalone(
    directory: Path, *envs: Mapping[str, str], cores: int = 1, inside: Sequence[Sequence[str]] = ()
) -> Iterator[str]:
    """A standalone master and a worker for each environment, all on 127.0.0.1; gives the master's
    URL.

    A worker may be started by a command of its own, as a pod's is: `inside` has one for each.
    """
    with contextlib.ExitStack() as stack:

        def start(
            name: str, arguments: list[str], env: Mapping[str, str], within: Sequence[str] = ()
        ) -> Service:
            service = Service(["spark-class", *arguments], directory / name, env, within)
            stack.callback(service.end)
            return service

        env = {"SPARK_LOCAL_IP": "127.0.0.1"}
        arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = start("master", ["org.apache.spark.deploy.master.Master", *arguments], env)
        url = master.until(r"Starting Spark master at (spark://\S+)")[1]
        workers = [
            start(
                f"worker-{number}",
                [
                    "org.apache.spark.deploy.worker.Worker",
                    *[
                        "--host",
                        "127.0.0.1",
                        "--cores",
                        str(cores),
                        "--memory",
                        "1g",
                        "--webui-port",
                        "0",
                    ],
                    *["--work-dir", str(directory / f"worker-{number}" / "work"), url],
                ],
                # Spark takes a container for YARN's, which tells it where its folders are.
                {**env, "LOCAL_DIRS": str(directory / f"worker-{number}"), **more},
                inside[number] if inside else (),
            )
            for number, more in enumerate(envs)
        ]
        for worker in workers:
            worker.until("Successfully registered with master")
        yield url


@contextlib.contextmanager
def connect_server(directory: Path, master: str = "local[2]", **settings: str) -> Iterator[str]:
    """A Spark Connect server; gives its URL."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.local.dir": str(directory),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        **settings,
    }
    arguments = [
        "spark-submit",
        "--master",
        master,
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    arguments += [
        word for name, value in settings.items() for word in ("--conf", f"{name}={value}")
    ]
    server = Service([*arguments, "spark-internal"], directory / "connect")
    try:
        server.until("Spark Connect server started")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.end()


def pod(name: str) -> list[str]:
    """Starts a command as in a pod: under a host name and in an IPC namespace of its own."""
    return [
        "unshare",
        "--uts",
        "--ipc",
        "--map-root-user",
        "sh",
        "-c",
        f'hostname {name}; exec "$@"',
        "sh",
    ]


def can_unshare() -> bool:
    """Returns whether this machine lets processes have namespaces of their own."""
    return subprocess.run([*pod("probe"), "true"], check=False, capture_output=True).returncode == 0
