# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Agents in the tasks of a barrier stage, for classic Spark and Spark Connect."""

from __future__ import annotations

import struct
import threading
import uuid
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from farandole.common.counted_noun import format_counted_noun
from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import GangAgents
from farandole.runner.worker_task_outcome import TaskOutcome
from farandole.spark.job.resource_profiles import map_tasks_with_profile
from farandole.spark.job.task_rendezvous import StoredEventReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

    from farandole.runner.agent import WorkerSpec
    from farandole.runner.gang import JobOutput
    from farandole.runner.worker_task_outcome import Row
    from farandole.spark.job.resource_profiles import ResourceProfiledRows
    from farandole.spark.job.session_adapter import SparkSessionAdapter
    from farandole.spark.job.task_rendezvous import TaskRendezvous

BARRIER_REJOIN_SECONDS: Final = 4.0
"""`rejoin_after` of a barrier stage: Spark gives a task two seconds to end before it ends its
Python process.
"""

_NO_SLOTS_ERROR_CODE = "SPARK-24819"
_NO_BARRIER_ERROR_CODE = "SPARK-24942"
_SLOT_RETRY_INTERVAL = 5.0


class SparkAgents(GangAgents):
    """A Spark job of `size` tasks, run by a thread that inherits its caller's job group, tags and
    properties.

    Attributes:
        tag: Tag of the job.

    Args:
        cluster: Spark.
        work: Work of each task.
        size: Number of tasks.
        output: Receives messages for the user.
        profile: Resources of each task, for Spark's stage-level scheduling.
        rendezvous: Rendezvous of the tasks if they cannot connect to the driver; `None` if they
            can.
    """

    def __init__(
        self,
        cluster: SparkSessionAdapter,
        work: WorkerSpec,
        size: int,
        output: JobOutput,
        profile: Any = None,
        rendezvous: TaskRendezvous | None = None,
    ) -> None:
        self._cluster = cluster
        self._work = work
        self._size = size
        self._output = output
        self._profile = profile
        self._rendezvous = rendezvous
        self.tag = f"farandole-{uuid.uuid4().hex[:12]}"
        self._cancelled = threading.Event()
        self._short_of: str | None = None
        self._endings: list[TaskOutcome] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        spill = rendezvous.spill if rendezvous is not None else None
        self._event_reader = StoredEventReader(spill) if spill is not None else None
        self._running = False

    def start_agents(self) -> None:
        """Submits the job."""
        self._thread = self._cluster.make_job_thread(self._run_job, f"{self.tag}-job")
        self._thread.start()

    def all_ended(self) -> bool:
        """Returns whether the job is over."""
        return self._thread is not None and not self._thread.is_alive()

    def cancel_agents(self) -> None:
        """Cancels the job by its tag, and with it Spark's Python processes that ignore it for
        two seconds.
        """
        self._cancelled.set()
        self._cluster.cancel_jobs(self.tag)

    def out_of_band_events(self) -> list[Any]:
        """Returns the events that the first task has written, if it runs the registrar."""
        return list(self._event_reader.new_events()) if self._event_reader is not None else []

    def may_already_run_unregistered(self) -> bool:
        """Returns whether tasks may already run although the driver has no sign of them."""
        return self._rendezvous is not None and self._short_of is None and self._running

    def has_ended_before_registering(self) -> bool:
        """Returns whether Spark has seen a task of this job end."""
        return self._cluster.has_ended_tasks(self.tag)

    def wait_reason(self) -> str | None:
        """Returns the number of missing slots, after Spark has refused the job because of them."""
        return self._short_of

    def task_outcomes(self) -> list[TaskOutcome]:
        """Returns how each task ended.

        Raises:
            FarandoleJobError: Spark did not run the tasks to their end.
        """
        if self._error is None:
            return self._endings
        reason = self._cluster.explain_failure(self._error, "the Spark job")
        raise FarandoleJobError(reason) from self._error

    def _run_job(self) -> None:
        try:
            self._cluster.tag_jobs(
                self.tag, f"farandole: {format_counted_noun(self._size, 'process')}"
            )
            with (
                self._cluster.watch_running_tasks(self._note_tasks_running)
                if self._rendezvous is not None
                else nullcontext()
            ):
                rows = self._collect_with_retries()
            self._endings = read_outcomes(rows)
        except BaseException as error:  # noqa: BLE001 - the driver's thread raises it
            self._error = error

    def _note_tasks_running(self) -> None:
        self._running = True

    def _collect_with_retries(self) -> list[Any]:
        rows = self._gang_agent_frame()
        while True:
            try:
                return rows.collect()
            except Exception as error:
                if _NO_BARRIER_ERROR_CODE in str(error) and self._uses_barrier:
                    # A Connect client may not see this setting of its server.
                    self._work, self._rendezvous = replace(self._work, rejoin_after=0.0), None
                    rows = self._gang_agent_frame()
                    continue
                if _NO_SLOTS_ERROR_CODE not in str(error) or self._cancelled.is_set():
                    raise
                self._running = False
                has = self._cluster.slot_count()
                self._short_of = (
                    f"the job needs {format_counted_noun(self._size, 'task slot')} at once"
                    + (f", Spark has {has}" if has else "")
                )
                self._output.print_message(f"{self._short_of}; trying again")
                # The thread that waits for the gang watches the deadline and cancels.
                if self._cancelled.wait(_SLOT_RETRY_INTERVAL):
                    raise
                # Create a new plan: a plan keeps the result of its stages, so a second collect of
                # the same plan would fail again without a new attempt.
                rows = self._gang_agent_frame()

    @property
    def _uses_barrier(self) -> bool:
        return self._work.rejoin_after != 0.0

    def _gang_agent_frame(self) -> DataFrame | ResourceProfiledRows:
        tasks = self._cluster.session.range(0, self._size, 1, self._size)
        rows = map_tasks_with_profile(
            tasks,
            _make_agent(self._work, self._rendezvous),
            self._profile,
            barrier=self._uses_barrier,
        )
        # Spark retries a barrier stage after it lost an executor only if the stage feeds a shuffle.
        return rows.repartition(1)


def _make_agent(
    work: WorkerSpec, rendezvous: TaskRendezvous | None
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def run_agents(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext, TaskContext  # noqa: PLC0415 - runs in Spark's task

        from farandole.runner import agent as agents  # noqa: PLC0415 - as above
        from farandole.runner import warm_workers  # noqa: PLC0415 - as above
        from farandole.spark import task as tasks  # noqa: PLC0415 - as above
        from farandole.spark.job import task_rendezvous as meetings  # noqa: PLC0415 - as above

        context = TaskContext.get()
        fence = context.taskAttemptId() if context is not None else 0
        owner = warm_workers.fork_server_owner_pid() if work.warm is not None else None
        for number in task_numbers(batches):
            at_work, host = work, None
            if rendezvous is not None:
                at_work, host = meetings.agree_on_registrar(
                    work, rendezvous, number, BarrierTaskContext.get()
                )
            outcome = agents.run_worker(at_work, number, fence, tasks.task_resources(), owner)
            if host is not None:
                host.wait_and_close()
            for row in outcome.to_rows():
                yield to_record_batch(row)

    return run_agents


def read_outcomes(rows: Iterable[Any]) -> list[TaskOutcome]:
    """Returns how tasks ended, by the rows of `to_record_batch` as Spark returns them."""
    return TaskOutcome.from_rows(
        (row["task"], row["kind"], row["chunk"], bytes(row["data"])) for row in rows
    )


def task_numbers(batches: Iterable[object]) -> list[int]:
    """Returns the task numbers in a partition's Arrow batches, read to the end as Spark expects."""
    return [int(value) for batch in batches for value in batch.column(0).to_pylist()]  # pyright: ignore[reportAttributeAccessIssue]


def to_record_batch(row: Row) -> Any:
    """Returns one row as a record batch, made of buffers: `pyarrow.array` would import pandas,
    which takes a second.
    """
    import pyarrow  # noqa: PLC0415, ICN001 - runs in Spark's task

    def int_array(value: int) -> Any:
        return pyarrow.Array.from_buffers(
            pyarrow.int32(), 1, [None, pyarrow.py_buffer(struct.pack("=i", value))]
        )

    def bytes_array(kind: Any, value: bytes) -> Any:
        offsets = pyarrow.py_buffer(struct.pack("=ii", 0, len(value)))
        return pyarrow.Array.from_buffers(kind, 1, [None, offsets, pyarrow.py_buffer(value)])

    task, kind, chunk, data = row
    return pyarrow.RecordBatch.from_arrays(
        [
            int_array(task),
            bytes_array(pyarrow.string(), kind.encode()),
            int_array(chunk),
            bytes_array(pyarrow.binary(), data),
        ],
        names=["task", "kind", "chunk", "data"],
    )
