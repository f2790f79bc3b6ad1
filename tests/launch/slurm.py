# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A real Slurm on this host, in a folder of its own: munged, slurmctld, and a slurmd for each
node, on free ports.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tests.started import LIMIT, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.started import Ended

DAEMONS: Final = ("munged", "slurmctld", "slurmd")
PROGRAMS: Final = (*DAEMONS, "srun", "sbatch", "sinfo", "squeue", "scancel")
SEARCH: Final = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
CPUS: Final = 4
"""Processors of all nodes together."""
START: Final = 60.0
"""Seconds until the node is ready."""
CREDENTIAL_LIFE: Final = 30
"""Seconds that Slurm waits before it starts a requeued job again; 120 by default."""
SCHEDULING_INTERVAL: Final = 5
"""Seconds from one pass of the scheduler over all jobs to the next; 60 by default. Only such a pass
starts a job whose time has come.
"""
CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credentials}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval={scheduling}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PlugStackConfig=/dev/null
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def free_ports(count: int) -> list[int]:
    """Ports of this host on which nothing listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def missing() -> str | None:
    """Returns the reason why Slurm cannot run here; `None` if it can."""
    if os.geteuid() != 0:
        return "a Slurm of a test needs root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]
    return (
        f"not installed (Debian: slurmctld slurmd slurm-client munge): {', '.join(absent)}"
        if absent
        else None
    )


class Slurm:
    """Runs while the context lasts."""

    def __init__(self, *nodes: str) -> None:
        """Chooses the names of the nodes, all of which are this host; without names, one node
        has the host's.
        """
        self.host = socket.gethostname().split(".")[0]
        self.nodes = nodes or (self.host,)

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="frn-slurm-"))
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._running) == len(DAEMONS) - 1 + len(self.nodes):
            # Steps do not end with the daemon that has started them.
            self.run("scancel", "--user=root")
            end = time.monotonic() + START
            while self.run("squeue", "-h").out.strip() and time.monotonic() < end:
                time.sleep(0.1)
        for _name, process in reversed(self._running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        folder = self.folder
        controller, *ports = free_ports(1 + len(self.nodes))
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (folder / "state").mkdir()
        for node in self.nodes:
            (folder / f"spool.{node}").mkdir()
        self.configuration = folder / "slurm.conf"
        nodes = [
            (
                f"NodeName={node} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={CPUS // len(self.nodes)}"
            )
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        text = CONFIGURATION.format(
            host=self.host,
            controller=controller,
            credentials=CREDENTIAL_LIFE,
            scheduling=SCHEDULING_INTERVAL,
            nodes="\n".join(nodes),
            folder=folder,
        )
        self.configuration.write_text(text)
        own = [
            f"--{name}={folder}/munge.{name.split('-')[0]}"
            for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._spawn("munged", "--foreground", "--force", f"--key-file={key}", *own)
        self._until("munged", (folder / "munge.socket").exists)
        self._spawn("slurmctld", "-D", "-i")
        for node in self.nodes:
            self._spawn("slurmd", "-D", "-N", node)
        idle = ["idle"] * len(self.nodes)
        self._until(
            "slurmctld and slurmd",
            lambda: self.run("sinfo", "-h", "-N", "-o", "%t").out.split() == idle,
        )

    def _spawn(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=SEARCH)
        assert path is not None
        with (self.folder / f"{program}-{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(
                [path, *arguments],
                env={**os.environ, "SLURM_CONF": str(self.configuration)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append((program, process))

    def _until(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START
        while not ready():
            ended = [name for name, process in self._running if process.poll() is not None]
            if ended or time.monotonic() > end:
                logs = "\n".join(
                    path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")
                )
                raise RuntimeError(f"{what} did not come up, ended are {ended}: {logs}")
            time.sleep(0.1)

    def run(self, *command: str, limit: float = LIMIT, **extra: str) -> Ended:
        """Runs a command of Slurm to its end."""
        return run(
            command, {"SLURM_CONF": str(self.configuration), **extra}, cwd=self.folder, limit=limit
        )
