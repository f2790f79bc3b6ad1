# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Handles the registrar's events in the driver of any job: writes lines of output, and passes
records on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole.common.counted_noun import format_counted_noun
from farandole.runner import report_validation, timelines
from farandole.runner.job_observer import EVENT_KIND, RANK_KIND
from farandole.stores import run_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from farandole._native.registrar import Event, Registrar
    from farandole.runner.gang import JobOutput
    from farandole.runner.job_observer import JobObserver

PROGRESS_KIND = "progress"
"""Kind of the records that `farandole.spark.task.report` sends."""
LINES_IN_TASK_LOG_NOTE = "(farandole: the lines of this rank are in the log of its task)"
LAST_LINES_NOTE = "(farandole: the last lines of stderr follow)"


@dataclass
class EventHandler:
    """Takes the events of a job.

    Attributes:
        registrar: The job's meeting point.
        output: Receiver of the output lines.
        on_progress: Called with (rank, record) for every record of a worker.
        watcher: Receives the events of the job.
    """

    registrar: Registrar
    output: JobOutput
    on_progress: Callable[[int, dict[str, Any]], None] | None
    watcher: JobObserver

    def handle_event(self, event: Event) -> None:
        """Passes an event to the method of its kind, such as `handle_exit`, if there is one."""
        handle = getattr(self, f"handle_{event.kind}", None)
        if handle is not None:
            handle(event)

    def out_of_band_events(self) -> Iterable[Any]:
        """Returns events that did not come by the registrar."""
        return ()

    def handle_waiting_events(self, timeout: float) -> None:
        """Handles the events that are waiting, or that come within `timeout` seconds."""
        try:
            for event in (*self.registrar.events(timeout), *self.out_of_band_events()):
                self.handle_event(event)
        finally:
            self.output.flush()

    def handle_metric(self, event: Event) -> None:
        """Passes on the report of a worker, or answers a request for the key of a run."""
        if event.text == run_keys.KEY_REQUEST_KIND:
            run_keys.publish_run_key(self.registrar, event.data or b"")
            return
        if event.data is not None and event.text is not None:
            dispatch_worker_record(
                (event.task or 0, event.rank),
                event.text,
                event.data,
                self.watcher,
                self.on_progress,
            )

    def handle_log(self, event: Event) -> None:
        """Writes a line of a worker."""
        if event.dropped:
            self.output.print_message(
                "dropped "
                f"{format_counted_noun(event.dropped, 'line')} of workers: the driver could not "
                "keep up"
            )
        self.output.write_line(event.rank, event.stream, event.text or "")
        if event.rank is not None:
            self.watcher.write_line(event.rank, event.stream or "stderr", event.text or "")

    def show_placements(self, seats: Iterable[Mapping[str, Any]], kind: str) -> None:
        """Shows where each rank runs.

        Args:
            seats: One for each rank.
            kind: `task` or `worker`, which has the number of a seat.
        """
        self.watcher.set_placements(seats)
        for seat in seats:
            self.output.print_message(
                f"rank {seat['rank']} is {kind} {seat['task']} on {seat['host']}", level=2
            )

    def show_exit(self, event: Event) -> None:
        """Shows that a worker ended by itself, and the end of its stderr if its lines stay in the
        log of its task.

        Args:
            event: Event of the worker's exit.
        """
        if event.task is not None:
            has_succeeded = event.exit_code == 0 and event.signal is None
            self.watcher.mark_worker_gone(event.task, "ended" if has_succeeded else "failed")
        if self.output.streams_worker_lines or event.rank is None:
            return
        self.watcher.write_line(event.rank, "stdout", LINES_IN_TASK_LOG_NOTE)
        for line in (
            LINES_IN_TASK_LOG_NOTE,
            LAST_LINES_NOTE,
            *(event.stderr_tail or "").splitlines(),
        ):
            self.watcher.write_line(event.rank, "stderr", line)


def dispatch_worker_record(
    who: tuple[int, int | None],
    kind: str,
    data: bytes,
    watcher: JobObserver,
    on_progress: Callable[[int, dict[str, Any]], None] | None = None,
) -> None:
    """Passes on a record of a worker or of its agent. A malformed record is dropped with a warning.

    Args:
        who: Task of the worker, and its rank if it has one.
        kind: Kind of the record.
        data: Content of the record.
        watcher: Receives the worker's events and progress.
        on_progress: Called with (rank, record) for progress.
    """
    task, rank = who
    if kind == timelines.TIMELINE_KIND:
        timelines.collect_timeline_piece(task, data)
    if kind not in (RANK_KIND, EVENT_KIND, PROGRESS_KIND):
        return
    try:
        report = report_validation.parse_worker_report(data)
    except report_validation.MalformedReportError as error:
        report_validation.warn_dropped_report(
            f"task {task}" if rank is None else f"rank {rank}", error
        )
        return
    if kind == RANK_KIND:
        watcher.update_rank_facts(task, report)
        return
    if kind == EVENT_KIND:
        event_text, reason = (str(report.get(name) or "") for name in ("what", "reason"))
        watcher.add_event(event_text or "an event", reason)
        return
    watcher.record_progress(report)
    if on_progress is not None:
        on_progress(rank or 0, report)
