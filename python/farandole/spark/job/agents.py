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

from farandole.runner.errors import FarandoleJobError
from farandole.runner.gang import Agents
from farandole.runner.outcome import Ending
from farandole.spark.job.meeting import Tail
from farandole.spark.job.profiles import mapped
from farandole.spark.job.session import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

    from farandole.runner.agent import Work
    from farandole.runner.gang import Output
    from farandole.runner.outcome import Row
    from farandole.spark.job.meeting import Meeting
    from farandole.spark.job.profiles import Profiled
    from farandole.spark.job.session import Cluster

LEFT_ALONE: Final = 4.0
"""`rejoin_after` of a barrier stage: Spark gives a task two seconds to end before it ends its
Python process.
"""

_NO_SLOTS = "SPARK-24819"
_NO_BARRIER = "SPARK-24942"
_RETRY_EVERY = 5.0


class SparkAgents(Agents):
    """A Spark job of `size` tasks, run by a thread that inherits its caller's job group, tags and
    properties.

    Attributes:
        tag: Of the job.

    Args:
        cluster: Spark.
        work: What each task runs.
        size: Number of tasks.
        output: Where news go.
        profile: What each task needs, for Spark's stage-level scheduling.
        meeting: How tasks find a place to meet where the driver cannot be dialled; `None` where it
            can.
    """

    def __init__(
        self,
        cluster: Cluster,
        work: Work,
        size: int,
        output: Output,
        profile: Any = None,
        meeting: Meeting | None = None,
    ) -> None:
        self._cluster = cluster
        self._work = work
        self._size = size
        self._output = output
        self._profile = profile
        self._meeting = meeting
        self.tag = f"farandole-{uuid.uuid4().hex[:12]}"
        self._cancelled = threading.Event()
        self._short_of: str | None = None
        self._endings: list[Ending] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        spill = meeting.spill if meeting is not None else None
        self._tail = Tail(spill) if spill is not None else None
        self._running = False

    def start(self) -> None:
        """Submits the job."""
        self._thread = self._cluster.thread(self._run, f"{self.tag}-job")
        self._thread.start()

    def done(self) -> bool:
        """Returns whether the job is over."""
        return self._thread is not None and not self._thread.is_alive()

    def cancel(self) -> None:
        """Cancels the job by its tag, and with it Spark's Python processes that ignore it for
        two seconds.
        """
        self._cancelled.set()
        self._cluster.cancel(self.tag)

    def news(self) -> list[Any]:
        """Returns the events that the gang's host has written, if the gang meets at an executor."""
        return list(self._tail.events()) if self._tail is not None else []

    def meets_elsewhere(self) -> bool:
        """Returns whether tasks may already run although the driver has no sign of them."""
        return self._meeting is not None and self._short_of is None and self._running

    def gave_up(self) -> bool:
        """Returns whether Spark has seen a task of this job end."""
        return self._cluster.has_ended_tasks(self.tag)

    def short_of(self) -> str | None:
        """Returns the number of missing slots, after Spark has refused the job because of them."""
        return self._short_of

    def endings(self) -> list[Ending]:
        """Returns how each task ended.

        Raises:
            FarandoleJobError: Spark did not run the tasks to their end.
        """
        if self._error is None:
            return self._endings
        told = self._cluster.explain(self._error)
        reason = told if told is not None else f"the Spark job has failed: {headline(self._error)}"
        raise FarandoleJobError(reason) from self._error

    def _run(self) -> None:
        try:
            self._cluster.tag(self.tag, f"farandole: {self._size} processes")
            with (
                self._cluster.watching(self._at_work)
                if self._meeting is not None
                else nullcontext()
            ):
                rows = self._collected()
            self._endings = Ending.from_rows(
                (row["task"], row["kind"], row["chunk"], bytes(row["data"])) for row in rows
            )
        except BaseException as error:  # noqa: BLE001 - the driver's thread raises it
            self._error = error

    def _at_work(self) -> None:
        self._running = True

    def _collected(self) -> list[Any]:
        rows = self._rows()
        while True:
            try:
                return rows.collect()
            except Exception as error:
                if _NO_BARRIER in str(error) and self._is_barrier:
                    # A Connect client may not see this setting of its server.
                    self._work, self._meeting = replace(self._work, rejoin_after=0.0), None
                    rows = self._rows()
                    continue
                if _NO_SLOTS not in str(error) or self._cancelled.is_set():
                    raise
                self._running = False
                has = self._cluster.slots()
                self._short_of = f"the job needs {self._size} task slots at once" + (
                    f", Spark has {has}" if has else ""
                )
                self._output.say(f"{self._short_of}; trying again")
                # The thread that waits for the gang watches the deadline and cancels.
                if self._cancelled.wait(_RETRY_EVERY):
                    raise
                # A plan keeps what became of its stages: collected again, it would fail again
                # without a look at Spark.
                rows = self._rows()

    @property
    def _is_barrier(self) -> bool:
        return self._work.rejoin_after != 0.0

    def _rows(self) -> DataFrame | Profiled:
        tasks = self._cluster.session.range(0, self._size, 1, self._size)
        rows = mapped(
            tasks, _agent(self._work, self._meeting), self._profile, barrier=self._is_barrier
        )
        # Spark retries a barrier stage after it lost an executor only if the stage feeds a shuffle.
        return rows.repartition(1)


def _agent(work: Work, meeting: Meeting | None) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def agent(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext, TaskContext  # noqa: PLC0415 - runs in Spark's task

        from farandole.runner import agent as agents  # noqa: PLC0415 - as above
        from farandole.runner import warm  # noqa: PLC0415 - as above
        from farandole.spark import task as tasks  # noqa: PLC0415 - as above
        from farandole.spark.job import meeting as meetings  # noqa: PLC0415 - as above

        context = TaskContext.get()
        fence = context.taskAttemptId() if context is not None else 0
        owner = warm.executor() if work.warm is not None else None
        for number in tasks_of(batches):
            at_work, host = work, None
            if meeting is not None:
                at_work, host = meetings.settle(work, meeting, number, BarrierTaskContext.get())
            ending = agents.serve(at_work, number, fence, tasks.resources(), owner)
            if host is not None:
                host.finish()
            for row in ending.rows():
                yield batch(row)

    return agent


def tasks_of(batches: Iterable[object]) -> list[int]:
    """Returns the task numbers in a partition's Arrow batches, read to the end as Spark expects."""
    return [int(value) for batch in batches for value in batch.column(0).to_pylist()]  # pyright: ignore[reportAttributeAccessIssue]


def batch(row: Row) -> Any:
    """Returns one row as a record batch, made of buffers: `pyarrow.array` would import pandas,
    which takes a second.
    """
    import pyarrow  # noqa: PLC0415, ICN001 - runs in Spark's task

    def number(value: int) -> Any:
        return pyarrow.Array.from_buffers(
            pyarrow.int32(), 1, [None, pyarrow.py_buffer(struct.pack("=i", value))]
        )

    def octets(kind: Any, value: bytes) -> Any:
        offsets = pyarrow.py_buffer(struct.pack("=ii", 0, len(value)))
        return pyarrow.Array.from_buffers(kind, 1, [None, offsets, pyarrow.py_buffer(value)])

    task, kind, chunk, data = row
    return pyarrow.RecordBatch.from_arrays(
        [
            number(task),
            octets(pyarrow.string(), kind.encode()),
            number(chunk),
            octets(pyarrow.binary(), data),
        ],
        names=["task", "kind", "chunk", "data"],
    )
