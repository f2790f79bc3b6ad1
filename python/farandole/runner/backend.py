# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backends: where the workers of a job run. `LocalBackend` runs them on this host."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TextIO

from farandole.common.argument_checks import make_minimum_check
from farandole.common.resource_limits import usable_cores
from farandole.runner import timelines, warm_workers, worker_task_outcome
from farandole.runner.agent import WorkerSpec
from farandole.runner.elastic.driver_loop import run_elastic_job as conduct_elastic
from farandole.runner.gang import JobOutput, pickle_payload, run_gang
from farandole.runner.job_limits import (
    elastic_timeout_seconds,
    elastic_worker_counts,
    start_timeout_seconds,
)
from farandole.runner.job_slot_queue import SlotQueue
from farandole.runner.local import LocalAgentPool, LocalAgents
from farandole.runner.show import training_run_reports
from farandole.runner.streams import OutputStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from farandole._native.registrar import Registrar
    from farandole.runner.gang import GangAgents
    from farandole.stores.store import Store

    OnProgress = Callable[[int, dict[str, Any]], None]


class Backend(ABC):
    """Runs a function on every process of a gang."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Runs the function on `num_processes()` workers.

        Args:
            fn: The function; pickled by cloudpickle.
            args: Its arguments.
            kwargs: Its keyword arguments.
            env: Variables to set in the workers; `None` as a value removes one.
            on_progress: Called on this thread, while the job runs, with the rank and the record of
                every `farandole.spark.task.report`. An exception it raises ends the job.

        Returns:
            The results by rank.

        Raises:
            FarandoleJobError: A worker failed.
            TimeoutError: Not all workers started in time.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Returns the number of workers."""

    def max_processes(self) -> int:
        """Returns the largest number of workers that a job may have at a time."""
        return self.num_processes()

    def min_processes(self) -> int:
        """Returns the smallest number of workers with which an elastic job continues."""
        return self.num_processes()

    def check(self) -> None:
        """Raises what `run` would raise before it starts anything. Estimators call it before they
        prepare data.

        Raises:
            ValueError: There are fewer slots than processes, or a setting forbids the job.
        """
        return

    def through(self, store: Store) -> Backend:
        """Returns a backend like this one that sends large functions and results through the store,
        if it needs that.

        Args:
            store: Store that every worker and this process reach; an estimator's.
        """
        del store
        return self


class LocalBackend(Backend):
    """Workers as processes of this host, without Spark and without a JVM.

    They get this process's environment and modules, and listen on loopback alone, as this process
    does. Unless `OMP_NUM_THREADS` is set, each gets its fair share of the cores.

    With `min_num_proc` or `max_num_proc` the job is elastic: when a worker is lost, the others
    continue, and another one replaces it.

    Args:
        num_proc: Number of processes; of an elastic job, the number at its beginning; default: the
            number of cores.
        env: Variables to set in the workers; `None` as a value removes one.
        start_timeout: Seconds within which all workers must start; default as in
            `farandole.spark.run`.
        stdout: Receiver of their stdout, each line as `[rank]<stdout>:line`; default: `sys.stdout`.
        stderr: The same for stderr; default: `sys.stderr`.
        verbose: 0 shows only the workers' output, 1 also the reason why the job waits, 2 also the
            host of each rank.
        prefix_output_with_timestamp: Whether those lines also start with the time.
        executable: Python interpreter of the workers; default: this one.
        warm: Whether workers start warm, from a fork server of this process that has imported
            torch; by default they do where this process has imported it, unless
            `FARANDOLE_WARM_WORKERS` says `off`.
        output_folder: Directory that also receives each rank's output, to `rank.<N>/stdout` and
            `rank.<N>/stderr`.
        min_num_proc: Smallest number of processes; default: `num_proc`.
        max_num_proc: Largest number of processes; default: `num_proc`.
        elastic_timeout: Seconds an elastic job may wait for `min_num_proc` workers; default as in
            `farandole.spark.run_elastic`.
        reset_limit: Number of changes of the world after which an elastic job fails; default: no
            limit.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        *,
        start_timeout: float | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        verbose: int = 1,
        prefix_output_with_timestamp: bool = False,
        executable: str | None = None,
        warm: bool | None = None,
        output_folder: str | os.PathLike[str] | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        elastic_timeout: float | None = None,
        reset_limit: int | None = None,
    ) -> None:
        self._requested_num_proc = num_proc
        self._bounds = given_size_bounds(num_proc, min_num_proc, max_num_proc)
        self._num_proc = (
            _core_count() if num_proc is None else make_minimum_check(1)("num_proc", num_proc)
        )
        if num_proc is None and self._bounds:
            self._num_proc = elastic_worker_counts(None, min_num_proc, max_num_proc, _core_count)[0]
        self._limits = given_elastic_limits(self._bounds, elastic_timeout, reset_limit)
        self._env = dict(env or {})
        self._start_timeout = start_timeout
        self._streams = OutputStreams(
            stdout, stderr, prefix_output_with_timestamp, verbose, output_folder
        )
        self._executable = executable
        self._warm = warm

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Any]:
        """Like `Backend.run`."""
        size = self._num_proc
        start_timeout_seconds(self._start_timeout)
        changes: dict[str, str | None] = {**self._env, **(env or {})}
        if "OMP_NUM_THREADS" not in os.environ:
            changes.setdefault("OMP_NUM_THREADS", str(max(1, _core_count() // size)))
        packed = pickle_payload(fn, args, kwargs)
        output = self._streams.make_job_output(size)
        training_run = training_run_reports.current_run()
        changes |= training_run.worker_variables() | timelines.begin_timeline_collection()
        warmth = warm_workers.resolve_warm_worker_settings(self._warm, by_default=True)
        with self._hold_cores(output) as limit:
            registrar, max_workers = make_registrar(
                size, self._bounds, self._limits, limit, **self._registrar_listen_arguments()
            )
            work = WorkerSpec(
                registrar.ticket,
                packed,
                changes,
                self._executable,
                output.streams_worker_lines,
                limit,
                warmth,
                elastic=bool(self._bounds),
            )
            if self._bounds:
                return conduct_elastic(
                    registrar,
                    LocalAgentPool(work, max_workers),
                    output,
                    on_progress,
                    watcher=training_run,
                    ends_on_error=True,
                )
            endings = run_gang(
                registrar,
                self._make_agents(work, size),
                size,
                output,
                on_progress,
                limit,
                "workers to start",
                training_run,
            )
            return worker_task_outcome.results_by_rank(endings, size)

    @contextlib.contextmanager
    def _hold_cores(self, output: JobOutput) -> Iterator[float]:
        """Waits for cores, inside a search of Spark; yields the seconds that are left for the
        start.
        """
        limit = start_timeout_seconds(self._start_timeout)
        if type(self) is not LocalBackend or not warm_workers.is_called_by_parameter_search():
            yield limit
            return
        core_count = self.max_processes()
        with _CORE_SLOTS.hold_slots_within_start_timeout(
            core_count, output.print_message, self._start_timeout, limit
        ) as start_seconds:
            yield start_seconds

    def _registrar_listen_arguments(self) -> dict[str, str | None]:
        """Returns where the registrar listens, as arguments of `Registrar`."""
        # Only this host needs to reach the registrar, so the variables for jobs on several hosts do
        # not apply.
        return {"host": "127.0.0.1", "bind": ""}

    def _make_agents(self, work: WorkerSpec, size: int) -> GangAgents:
        return LocalAgents(work, range(size))

    def plain(self) -> dict[str, Any]:
        """Returns the arguments for a backend of the same kind and numbers: no environment, no
        stream, no path.
        """
        return {
            "num_proc": self._requested_num_proc,
            "start_timeout": self._start_timeout,
            "verbose": self._streams.verbose,
            "prefix_output_with_timestamp": self._streams.timestamp,
            "warm": self._warm,
            **self._bounds,
            **self._limits,
        }

    def num_processes(self) -> int:
        """Returns the number of workers."""
        return self._num_proc

    def max_processes(self) -> int:
        """Returns the largest number of workers that a job may have at a time."""
        return max(self._num_proc, self._bounds.get("max_num_proc", 0))

    def min_processes(self) -> int:
        """Returns the smallest number of workers with which an elastic job continues."""
        return self._bounds.get("min_num_proc", self._num_proc)


def _core_count() -> int:
    return usable_cores()


_CORE_SLOTS = SlotQueue(_core_count, "cores")
"""The cores that the jobs of searches on this host share."""


def given_size_bounds(
    first: int | None, min_workers: int | None, max_workers: int | None
) -> dict[str, int]:
    """Returns the given bounds for the number of processes of an elastic job; nothing for a job of
    fixed size.

    Raises:
        ValueError: The bounds contradict each other or the number of processes.
    """
    given = {"min_num_proc": min_workers, "max_num_proc": max_workers}
    bounds = {name: value for name, value in given.items() if value is not None}
    if bounds and (first is not None or max_workers is not None):
        elastic_worker_counts(first, min_workers, max_workers, lambda: 1)
    for name, value in bounds.items():
        make_minimum_check(1)(name, value)
    return bounds


def given_elastic_limits(
    bounds: Mapping[str, int], timeout: float | None, reset_limit: int | None
) -> dict[str, float]:
    """Returns the given limits of an elastic job, as its backend's arguments.

    Raises:
        ValueError: The job is of fixed size.
    """
    given = {"elastic_timeout": timeout, "reset_limit": reset_limit}
    limits = {name: value for name, value in given.items() if value is not None}
    if limits and not bounds:
        raise ValueError(
            f"these are for elastic jobs, so set min_num_proc, too: {', '.join(limits)}"
        )
    return limits


def make_registrar(
    first: int,
    bounds: Mapping[str, int],
    limits: Mapping[str, float],
    start: float,
    **where: str | None,
) -> tuple[Registrar, int]:
    """Returns the registrar of a job, and the largest number of its workers.

    Args:
        first: Workers that the first world waits for.
        bounds: As `given_size_bounds` returned them; none make a job of fixed size.
        limits: `elastic_timeout` and `reset_limit` of an elastic job, if given.
        start: Seconds that workers may take to start.
        **where: `host` and `bind` of `Registrar`.
    """
    from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here
    from farandole.common import logs  # noqa: PLC0415

    logs.start_logging()
    if not bounds:
        return Registrar(first, start_timeout=start, **where), first
    first, min_workers, max_workers = elastic_worker_counts(
        first, bounds.get("min_num_proc"), bounds.get("max_num_proc"), lambda: first
    )
    wait_seconds, resets = (
        elastic_timeout_seconds(limits.get("elastic_timeout")),
        limits.get("reset_limit"),
    )
    registrar = Registrar.start_elastic(
        first,
        min_workers,
        max_workers,
        timeout=wait_seconds,
        reset_limit=None if resets is None else int(resets),
        start_timeout=start,
        **where,
    )
    return registrar, max_workers
