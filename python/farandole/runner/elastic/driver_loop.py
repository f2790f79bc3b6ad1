# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The driver's side of an elastic job on any launcher.

The registrar decides which workers are in the world, and when the job is done. This module starts
workers and receives their records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from farandole.common.counted_noun import format_counted_noun
from farandole.common.exceptions import FarandoleInternalError
from farandole.runner.errors import FarandoleJobError
from farandole.runner.event_handler import EventHandler
from farandole.runner.job_observer import NULL_OBSERVER
from farandole.runner.worker import EXECUTOR_VARIABLE as WHERE
from farandole.runner.worker_task_outcome import TaskOutcome, results_by_rank, task_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native.registrar import Event, Registrar
    from farandole.runner.elastic.agent_pool import ElasticAgentPool
    from farandole.runner.gang import JobOutput
    from farandole.runner.job_observer import JobObserver

_EVENT_WAIT_SECONDS = 0.25
_MAX_REFUSALS = 3
"""Number of consecutive attempts without a worker, in every thread or slot of the pool, after which
a job that has had no world fails. So a bad host does not end a job that other hosts can run.
"""
_RESULT_TIMEOUT = 15.0
"""Seconds to wait for a result whose agent has ended."""
_TRANSFER_TIMEOUT = 3600.0
"""Seconds within which one more result must come while agents still send theirs: a result that is
too large for the registrar comes by Spark's rows, Ray's objects or ssh.
"""
_NETWORK_EXCEPTIONS = (
    f"{FarandoleInternalError.__module__}.{FarandoleInternalError.__qualname__}",
)
"""Exceptions that say that peers or the registrar were lost."""


class PlannedDepartures(Protocol):
    """The workers that are about to lose their hosts."""

    def record_location(self, task: int, where: str) -> None:
        """Takes note of the executor or node that a worker reported."""

    def poll_departures(self) -> list[tuple[int, str]]:
        """Returns the workers that have to leave since the last call, with the reason of each."""
        ...


def run_elastic_job(
    registrar: Registrar,
    agent_pool: ElasticAgentPool,
    output: JobOutput,
    on_progress: Callable[[int, dict[str, Any]], None] | None,
    departures: PlannedDepartures | None = None,
    watcher: JobObserver = NULL_OBSERVER,
    *,
    ends_on_error: bool = False,
) -> list[Any]:
    """Runs an elastic job to its end.

    Args:
        registrar: The job's meeting point; closed when this returns or raises.
        agent_pool: The agent pool, which starts workers.
        output: Receiver of the output lines.
        on_progress: Called with (rank, record) on this thread for every record of a worker.
        departures: Reports workers whose hosts are about to leave, if the cluster announces that.
        watcher: Receives the events of the job.
        ends_on_error: Whether the job ends when the function raises an exception on one rank, and
            not only on all ranks of a world. An error of the network, such as a lost peer, does not
            count.

    Returns:
        The result of the function on each rank of the last world, rank 0 first.

    Raises:
        FarandoleJobError: The job failed, or could not continue.
    """
    job = _ElasticJobRun(
        registrar, output, on_progress, watcher, agent_pool, departures, ends_on_error
    )
    try:
        return job.run()
    finally:
        registrar.close()
        agent_pool.end_workers()
        if output.files is not None:
            output.files.close()


@dataclass
class _ElasticJobRun(EventHandler):
    pool: ElasticAgentPool
    departures: PlannedDepartures | None
    ends_on_error: bool
    worlds: int = 0
    exits: dict[int, Event] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    failed: Event | None = None
    finished: bool = False
    last_lost_task: int | None = None

    def run(self) -> list[Any]:
        self.pool.start_workers()
        while not self.finished:
            self.handle_waiting_events(_EVENT_WAIT_SECONDS)
            self.watcher.handle_tick()
            if self.failed is not None:
                self.handle_waiting_events(_EVENT_WAIT_SECONDS)  # a result may come with the exit
                error, origin = self.job_failure(self.failed)
                raise error from origin
            if self.ends_on_error:
                self.raise_function_error()
            if not self.worlds and self.pool.fewest_consecutive_refusals() >= _MAX_REFUSALS:
                raise FarandoleJobError(f"no worker could be started: {self.pool.refusals[-1]}")
            for task, reason in (
                self.departures.poll_departures() if self.departures is not None else ()
            ):
                self.output.print_message(f"worker {task} is asked to leave: {reason}")
                self.registrar.dismiss_task(task, reason)
        return self.collect_results()

    def raise_function_error(self) -> None:
        """Raises the exception that the function has raised on some rank, if it has."""
        for task, event in list(self.exits.items()):
            if not event.exit_code or task not in self.results:
                continue  # it has returned, was ended by a signal, or was ended without a word
            error, origin = task_failure(self.task_outcome(task))
            if error.exception_type not in _NETWORK_EXCEPTIONS:
                raise error from origin
            del self.exits[task], self.results[task]

    def collect_results(self) -> list[Any]:
        seats = sorted(self.registrar.rank_assignment() or [], key=lambda seat: seat["rank"])
        missing = {seat["task"] for seat in seats}
        progress = seen_running = time.monotonic()
        while True:
            # Asked before the results: an agent that ends leaves its result first.
            running = any(self.pool.is_running(task) for task in missing)
            unfinished = {task for task in missing if self.task_outcome(task).result is None}
            now = time.monotonic()
            progress = now if unfinished != missing else progress
            seen_running = now if running else seen_running
            if not unfinished or now >= min(
                progress + _TRANSFER_TIMEOUT, max(progress, seen_running) + _RESULT_TIMEOUT
            ):
                break
            missing = unfinished
            self.handle_waiting_events(_EVENT_WAIT_SECONDS)
            self.watcher.handle_tick()
        endings = [self.task_outcome(seat["task"], seat["rank"], seat["host"]) for seat in seats]
        return results_by_rank(endings, len(seats))

    def task_outcome(self, task: int, rank: int | None = None, host: str = "") -> TaskOutcome:
        by_rows, event = self.pool.endings.get(task), self.exits.get(task)
        result = self.results.get(task)
        if result is None and by_rows is not None:
            result = by_rows.result
        return TaskOutcome(
            task,
            host or (by_rows.host if by_rows is not None else ""),
            rank=rank if rank is not None or event is None else event.rank,
            exit_code=event.exit_code
            if event is not None
            else (by_rows.exit_code if by_rows is not None else None),
            stderr_tail=(event.stderr_tail or "") if event is not None else "",
            result=result,
        )

    def job_failure(self, event: Event) -> tuple[FarandoleJobError, BaseException | None]:
        task = event.task
        if (
            task is None
            and self.last_lost_task is not None
            and (event.text or "").startswith(f"worker {self.last_lost_task} ")
        ):
            task = self.last_lost_task  # whose error says more than its exit code
        if task is not None and task in self.exits:
            return task_failure(self.task_outcome(task))
        text = event.text or "the job failed"
        if not self.worlds and self.pool.refusals:
            text += f"; a worker could not be started: {self.pool.refusals[-1]}"
        return FarandoleJobError(text), None

    def handle_exit(self, event: Event) -> None:
        if event.task is not None:
            self.exits[event.task] = event
        self.show_exit(event)

    def handle_result(self, event: Event) -> None:
        self.results[event.task or 0] = event.data or b""

    def handle_aborted(self, event: Event) -> None:
        self.failed = self.failed or (None if self.finished else event)

    def handle_finished(self, _event: Event) -> None:
        self.finished = True

    def handle_dismissed(self, event: Event) -> None:
        self.pool.dismissed.add(event.task or 0)
        self.handle_lost(event)

    def handle_lost(self, event: Event) -> None:
        self.last_lost_task = event.task
        who = f"worker {event.task}" if event.rank is None else f"rank {event.rank}"
        if event.kind == "dismissed":
            who += " leaves:"
        self.output.print_message(f"{who} {event.text}")
        left_on_request = event.kind == "dismissed"
        record = self.watcher.add_event if left_on_request else self.watcher.record_loss
        record(f"{who} is gone", event.text)
        if event.task is not None:
            self.watcher.mark_worker_gone(event.task, "lost" if event.kind == "lost" else "ended")

    def handle_metric(self, event: Event) -> None:
        if event.text == WHERE and event.task is not None and event.data is not None:
            self.watcher.record_location(event.task, event.data.decode())
            if self.departures is not None:
                self.departures.record_location(event.task, event.data.decode())
        else:
            super().handle_metric(event)

    def handle_assigned(self, _event: Event) -> None:
        self.worlds += 1
        seats = self.registrar.rank_assignment() or []
        self.output.print_message(
            f"world {self.worlds} has {format_counted_noun(len(seats), 'rank')}"
        )
        self.show_placements(seats, "worker")
        if self.worlds > 1:
            self.watcher.record_restart(
                f"world {self.worlds} has {format_counted_noun(len(seats), 'rank')}"
            )

    def handle_log(self, event: Event) -> None:
        if self.output.streams_worker_lines:
            super().handle_log(event)
