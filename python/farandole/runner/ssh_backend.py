# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A function on several hosts: agents of other hosts are started by ssh, agents of this host are
threads.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.common.counted_noun import format_counted_noun
from farandole.runner.agent import worker_environment_changes
from farandole.runner.backend import LocalBackend
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import GangAgents
from farandole.runner.local import LocalAgents
from farandole.runner.worker_task_outcome import TaskOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from farandole._native.hosts import Remote
    from farandole.runner.agent import WorkerSpec


@dataclass(frozen=True)
class SshOptions:
    """The way to reach other hosts.

    Attributes:
        ssh_command: Program that is called with a host and a command; default: the program of the
            batch system, else `ssh`.
        ssh_port: Port for ssh; default: from ssh's configuration.
        ssh_identity_file: Key for ssh; default: from ssh's configuration.
    """

    ssh_command: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | Path | None = None


class HostsBackend(LocalBackend):
    """Workers on several hosts, without Spark.

    Workers on other hosts get this process's environment, but for `CUDA_VISIBLE_DEVICES`, functions
    of the shell and secrets, and start in the same folder where it is there. Other hosts need the
    package, and at the same path an interpreter of the same minor version.

    Args:
        hosts: Hosts and their slots, in the order of ranks; none means this host alone.
        num_proc: Number of processes.
        ssh_options: The way to reach other hosts.
        bind: Network whose address of this host the registrar listens on; default:
            `FARANDOLE_BIND_ADDRESS`.
        **kwargs: Further arguments of `LocalBackend`.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        num_proc: int,
        ssh_options: SshOptions | None = None,
        *,
        bind: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_proc, **kwargs)
        from farandole._native import hosts as native  # noqa: PLC0415 - `import farandole` stays light

        self._local_tasks, self._remote_hosts = native.place_tasks(hosts, num_proc)
        self._ssh_options = ssh_options or SshOptions()
        self._bind = bind

    def _registrar_listen_arguments(self) -> dict[str, str | None]:
        return {"bind": self._bind} if self._remote_hosts else super()._registrar_listen_arguments()

    def _make_agents(self, work: WorkerSpec, size: int) -> GangAgents:
        if not self._remote_hosts:
            return super()._make_agents(work, size)
        return RemoteHostAgents(work, self._local_tasks, self._remote_hosts, self._ssh_options)


class RemoteHostAgents(GangAgents):
    """One connection for every other host, one thread for every worker of this one.

    Args:
        work: The description of the job.
        local_tasks: Tasks of this host.
        remote_hosts: For every other host its name, its first task and the task after its last.
        ssh_options: The way to reach other hosts.
    """

    def __init__(
        self,
        work: WorkerSpec,
        local_tasks: Sequence[int],
        remote_hosts: Sequence[tuple[str, int, int]],
        ssh_options: SshOptions,
    ) -> None:
        self._local = LocalAgents(work, local_tasks)
        self._work = work
        self._ssh_options = ssh_options
        self._remote_hosts = remote_hosts
        self._remotes: list[tuple[str, range, Remote]] = []
        self._endings: dict[int, TaskOutcome] = {}
        self._ready: set[str] = set()
        self._unusable: dict[str, str] = {}
        self._refused = False

    def start_agents(self) -> None:
        """Starts the threads, and to connect to every host."""
        from farandole._native.hosts import Remote  # noqa: PLC0415 - starts its threads here

        executable = self._work.executable or sys.executable
        assert isinstance(self._work.payload, bytes)  # noqa: S101 - only Spark's tasks find theirs in a store
        for host, first, end in self._remote_hosts:
            remote = Remote(
                self._work.ticket,
                host,
                first,
                end,
                [executable, "-m", "farandole.runner.worker"],
                env=worker_environment_changes(self._work.env, {}),
                payload=self._work.payload,
                python=executable,
                same_python=platform.python_version(),
                ssh_command=self._ssh_options.ssh_command,
                ssh_port=self._ssh_options.ssh_port,
                ssh_identity_file=self._ssh_options.ssh_identity_file,
                start_timeout=self._work.start_timeout,
            )
            self._remotes.append((host, range(first, end), remote))
        self._local.start_agents()

    def all_ended(self) -> bool:
        """Returns whether every task has ended."""
        self._handle_remote_agent_notices()
        remotes_ended = all(
            task in self._endings for _, tasks, _ in self._remotes for task in tasks
        )
        return remotes_ended and self._local.all_ended()

    def has_ended_before_registering(self) -> bool:
        """Returns whether a host cannot be used and all others have answered: the error then
        names all such hosts.
        """
        self._handle_remote_agent_notices()
        answered = all(
            host in self._ready or all(task in self._endings for task in tasks)
            for host, tasks, _ in self._remotes
        )
        return (self._refused or bool(self._unusable)) and answered

    def wait_reason(self) -> str | None:
        """Returns the hosts that have not answered."""
        self._handle_remote_agent_notices()
        silent = [host for host, *_ in self._remote_hosts if host not in self._ready]
        return f"no answer has come from {', '.join(silent)}" if silent else None

    def cancel_agents(self) -> None:
        """Ends the connections."""
        for host, tasks, remote in self._remotes:
            remote.close_connection()
            for task in tasks:
                self._endings.setdefault(task, TaskOutcome(task, host, aborted=True))
        self._local.cancel_agents()

    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns how each task ended.

        Raises:
            FarandoleJobError: Hosts could not be used; the message names all of them.
        """
        self._handle_remote_agent_notices()
        if self._unusable:
            hosts = [host for host, *_ in self._remote_hosts if host in self._unusable]
            reasons = "; ".join(self._unusable[host] for host in hosts)
            raise FarandoleJobError(
                reasons
                if len(hosts) == 1
                else f"{format_counted_noun(len(hosts), 'host')} cannot be used: {reasons}",
                host=hosts[0],
            )
        endings = {outcome.task: outcome for outcome in self._local.task_outcomes()} | self._endings
        return [endings[task] for task in sorted(endings)]

    def _handle_remote_agent_notices(self) -> None:
        for host, tasks, remote in self._remotes:
            for kind, task, value in remote.take_notices():
                if kind == "ready":
                    self._ready.add(host)
                elif kind == "ended" and task is not None:
                    self._endings[task] = TaskOutcome.from_agent(task, host, value)
                elif kind == "refused" and task is not None:
                    self._refused = True
                    self._endings[task] = TaskOutcome(task, host, refused=value)
                elif kind == "gone":
                    self._mark_tasks_aborted(host, tasks, value)

    def _mark_tasks_aborted(self, host: str, tasks: range, cause: str) -> None:
        if host not in self._ready:
            self._unusable[host] = cause
        for task in tasks:
            self._endings.setdefault(
                task,
                TaskOutcome(task, host, aborted=True, reason=f"the connection was lost: {cause}"),
            )
