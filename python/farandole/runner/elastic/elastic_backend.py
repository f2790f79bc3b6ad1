# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A function on workers that come and go. The native driver runs them; this module writes their
output.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farandole.common.counted_noun import format_counted_noun
from farandole.common.resource_limits import usable_cores
from farandole.runner import event_handler, timelines, worker_task_outcome
from farandole.runner.agent import worker_environment_changes
from farandole.runner.backend import LocalBackend
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import JobOutput, pickle_payload
from farandole.runner.job_limits import start_timeout_seconds
from farandole.runner.show import training_run_reports
from farandole.runner.worker_task_outcome import TaskOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole._native.elastic import ElasticJob
    from farandole._native.launcher import Outcome
    from farandole.runner.elastic.discovery import HostDiscovery
    from farandole.runner.job_observer import JobObserver
    from farandole.runner.ssh_backend import SshOptions

_EVENT_WAIT_SECONDS: Final = 0.25
_SHUTDOWN_TIMEOUT: Final = 30.0
"""Seconds that an interrupted job may take to end its workers."""


@dataclass(frozen=True)
class ElasticRunOptions:
    """The elastic arguments of `farandole.run`.

    Attributes:
        discovery: A program that prints hosts, or an object that finds them.
        min_num_proc: Smallest number of processes.
        max_num_proc: Largest number of processes.
        slots: Slots of hosts without a number.
        reset_limit: Largest number of changes of the world.
        cooldown_range: Seconds without a new process on a host after a failure there, at first and
            at most.
        spares: Processes beyond the largest number.
        timeout: Seconds for which there may be too few processes.
    """

    discovery: str | Path | HostDiscovery | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    spares: int | None = None
    timeout: float | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the job is elastic."""
        return self.discovery is not None or self.min_num_proc is not None

    def refuse_contradictions(self, **hosts: object) -> None:
        """Refuses settings that contradict each other.

        Args:
            **hosts: Hosts that were named, by argument.

        Raises:
            ValueError: An argument has no effect, or two exclude each other.
        """
        if not self.is_elastic:
            others = {name: value for name, value in self.__dict__.items() if value is not None}
            if others:
                raise ValueError(
                    f"these are for elastic jobs, so set min_num_proc, too: {', '.join(others)}"
                )
            return
        named = [name for name, value in hosts.items() if value is not None]
        if self.discovery is not None and named:
            raise ValueError(f"{named[0]} and host_discovery_script exclude each other")

    def given_driver_settings(self) -> dict[str, str]:
        """Returns the given arguments, as settings."""
        settings = {
            "min_num_proc": self.min_num_proc,
            "max_num_proc": self.max_num_proc,
            "slots_per_host": self.slots,
            "reset_limit": self.reset_limit,
            "blacklist_cooldown_range": None
            if self.cooldown_range is None
            else "{} {}".format(*self.cooldown_range),
            "spares": self.spares,
            "elastic_timeout": self.timeout,
            "host_discovery_script": self.discovery
            if isinstance(self.discovery, str | Path)
            else None,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}

    def discovery_object(self) -> HostDiscovery | None:
        """Returns the object that finds hosts, if it is one.

        Raises:
            TypeError: It is neither a program nor such an object.
        """
        if self.discovery is None or isinstance(self.discovery, str | Path):
            return None
        if not callable(getattr(self.discovery, "find_available_hosts_and_slots", None)):
            raise TypeError(
                "host_discovery_script is a program, or an object with "
                "find_available_hosts_and_slots(): "
                f"{self.discovery!r}"
            )
        return self.discovery


class ElasticHostsBackend(LocalBackend):
    """Workers that come and go, without Spark.

    Args:
        elastic: The elastic arguments of the job.
        num_proc: Number of processes at the beginning of the job.
        ssh_options: The way to reach other hosts.
        hosts: Hosts and slots, in the order of ranks.
        hostfile: A file with a host a line, which may change while the job runs.
        bind: Network whose address of this host the registrar listens on.
        **kwargs: Further arguments of `LocalBackend`.
    """

    def __init__(
        self,
        elastic: ElasticRunOptions,
        num_proc: int,
        ssh_options: SshOptions,
        *,
        hosts: str | None = None,
        hostfile: str | Path | None = None,
        bind: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_proc, **kwargs)
        self._elastic = elastic
        self._ssh_options = ssh_options
        self._hosts = hosts
        self._hostfile = hostfile
        self._bind = bind

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[Any]:
        """Like `Backend.run`, with the results of the last world. `on_progress` is not called."""
        del on_progress
        from farandole._native.elastic import ElasticJob  # noqa: PLC0415 - starts its threads here
        from farandole.common import logs  # noqa: PLC0415

        logs.start_logging()
        size = self._num_proc
        changes: dict[str, str | None] = {**self._env, **(env or {})}
        if "OMP_NUM_THREADS" not in os.environ:
            changes.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // size)))
        observer = training_run_reports.current_run()
        changes |= observer.worker_variables() | timelines.begin_timeline_collection()
        options = self._elastic.given_driver_settings() | {
            "start_timeout": str(start_timeout_seconds(self._start_timeout))
        }
        if self._bind is not None:
            options["bind_address"] = self._bind
        output = self._streams.make_job_output(size)
        executable = self._executable or sys.executable
        job = ElasticJob(
            size,
            [executable, "-m", "farandole.runner.worker"],
            env=worker_environment_changes(changes, {}),
            payload=pickle_payload(fn, args, kwargs),
            python=executable,
            same_python=platform.python_version(),
            options=options,
            discovery=self._elastic.discovery_object(),
            hosts=self._hosts,
            hostfile=self._hostfile,
            ssh_command=self._ssh_options.ssh_command,
            ssh_port=self._ssh_options.ssh_port,
            ssh_identity_file=self._ssh_options.ssh_identity_file,
        )
        return _NativeJobRun(job, output, observer).run()


class _NativeJobRun:
    """Handles the events of a job until the job has ended."""

    def __init__(self, job: ElasticJob, output: JobOutput, watcher: JobObserver) -> None:
        self._job = job
        self._output = output
        self._watcher = watcher
        self._hosts: list[str] = []
        self._workers: set[int] = set()
        self._outcomes: list[Outcome] | None = None

    def run(self) -> list[Any]:
        try:
            while self._outcomes is None:
                self._handle_events(_EVENT_WAIT_SECONDS)
        except BaseException:
            # The first request gives workers time for last checkpoints. The second request shortens
            # that time, so that the job ends as soon as a job with a fixed number of workers.
            self._job.request_end()
            self._job.request_end()
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT
            while self._outcomes is None and time.monotonic() < deadline:
                self._handle_events(_EVENT_WAIT_SECONDS)
            raise
        finally:
            if self._output.files is not None:
                self._output.files.close()
        return self._collect_results(self._outcomes)

    def _handle_events(self, timeout: float) -> None:
        for kind, value in self._job.take_events(timeout):
            match kind:
                case "line":
                    self._output.write_line(*value)
                case "metric":
                    task, rank, name, data = value
                    event_handler.dispatch_worker_record((task, rank), name, data, self._watcher)
                case "loss":
                    self._output.print_message(value)
                    self._watcher.record_loss("a worker or a host is out", value)
                case "world":
                    generation, places = value
                    self._hosts = [host for _, host in places]
                    before, self._workers = self._workers, {task for task, _ in places}
                    description = _describe_new_world(generation, self._workers, before)
                    self._output.print_message(description, 1 if generation > 1 else 2)
                    self._watcher.set_placements(
                        [
                            {"rank": rank, "task": task, "host": host}
                            for rank, (task, host) in enumerate(places)
                        ]
                    )
                    if generation > 1:
                        self._watcher.record_restart(description)
                    for rank, host in enumerate(self._hosts):
                        self._output.print_message(f"rank {rank} is on {host}", level=2)
                case "ended":
                    self._outcomes = value
                case _:
                    self._outcomes = []
                    raise value
        self._output.flush()

    def _collect_results(self, outcomes: list[Outcome]) -> list[Any]:
        """Returns the results by rank, or the job's failure.

        Raises:
            FarandoleJobError: The job failed.
        """
        first = outcomes[0]
        if first.aborted and first.exit_code is None and first.signal is None:
            # No worker failed by itself: there were too few workers, or too many changes.
            raise FarandoleJobError(first.reason or "the job was ended")
        endings = [
            TaskOutcome.from_agent(
                task,
                self._hosts[exit_info.rank]
                if exit_info.rank is not None and exit_info.rank < len(self._hosts)
                else "",
                exit_info,
            )
            for task, exit_info in enumerate(outcomes)
        ]
        return worker_task_outcome.results_by_rank(endings, len(endings))


def _describe_new_world(generation: int, workers: set[int], before: set[int]) -> str:
    """Describes a new world for the user. If no worker of the world before is in it, state that
    only workers had is lost.

    Args:
        generation: Number of the world, from 1.
        workers: Workers of the world.
        before: Workers of the world before; empty when unknown.
    """
    description = f"world {generation} has {format_counted_noun(len(workers), 'rank')}"
    if not before or workers & before:
        return description
    return f"{description}, all of them new: state that the script has not stored is lost"
