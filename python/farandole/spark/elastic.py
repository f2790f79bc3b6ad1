# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers on Spark that come and go: one Spark job of one task for each, and no barrier stage.

Where Spark has fewer slots than a job may have workers, the jobs of the others wait in Spark's queue, which is what
makes dynamic allocation ask for executors; a worker joins when its task gets a slot. A task that Spark starts again
after it lost an executor ends at once, and its driver's thread submits another one: every worker has a number of its
own. Who is in the world, and when the job is done, the registrar decides.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from farandole.spark.common.errors import FarandoleJobError
from farandole.spark.decommission import VARIABLE as EXECUTOR
from farandole.spark.decommission import Decommissions
from farandole.spark.gang import PROGRESS
from farandole.spark.job import batch
from farandole.spark.outcome import SCHEMA, Ending, failure, results
from farandole.spark.session import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farandole._native.registrar import Event, Registrar
    from farandole.spark.agent import Work
    from farandole.spark.gang import Output
    from farandole.spark.session import Cluster

_WAIT = 0.25
_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_REFUSALS = 3
"""Tasks in a row that could not start a worker, before any world, after which the job is hopeless."""
_ROWS_WITHIN = 15.0
_END_WITHIN = 20.0


class Crew:
    """One thread for each worker that the job may have; each runs one Spark task after the other."""

    def __init__(self, cluster: Cluster, work: Work, most: int, output: Output, profile: Any = None) -> None:
        self._cluster = cluster
        self._work = work
        self._output = output
        self._profile = profile
        self._tag = f"farandole-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [cluster.thread(self._work_on, f"{self._tag}-{number}") for number in range(most)]
        self.endings: dict[int, Ending] = {}
        self.refusals: list[str] = []
        self.dismissed: set[int] = set()

    def start(self) -> None:
        """Submits the first tasks."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Submits nothing any more, and ends what still waits or runs."""
        self._over.set()
        deadline = time.monotonic() + _END_WITHIN
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            self._cluster.cancel(self._tag)
            for thread in self._threads:
                thread.join(0.1)

    def _work_on(self) -> None:
        self._cluster.tag(self._tag, "farandole: an elastic worker")
        pause = _PAUSE
        while not self._over.is_set():
            with self._lock:
                task = next(self._numbers)
            refused = self._one(task)
            if refused is not None:
                self.refusals.append(refused)
            self._over.wait(pause)
            ending = self.endings.get(task)
            if ending is not None and ending.succeeded:
                if task not in self.dismissed:
                    return  # its function has returned
                pause = _PAUSE
            elif refused is None and ending is None:
                pause = _PAUSE  # Spark lost its executor
            else:
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _one(self, task: int) -> str | None:
        """Runs one Spark task to its end; why it had no worker, if it had none."""
        try:
            rows = self._rows(task).collect()
        except Exception as error:  # noqa: BLE001 - Spark's own tries are over: the next task is another worker
            told = self._cluster.explain(error)
            return told if told is not None else f"a Spark job has failed: {headline(error)}"
        told = Ending.from_rows((row["task"], row["kind"], row["chunk"], bytes(row["data"])) for row in rows)
        for ending in told:
            if ending.refused is not None:
                return f"{ending.host}: {ending.refused}"
            self.endings[ending.task] = ending
        return None

    def _rows(self, task: int) -> Any:
        one = self._cluster.session.range(0, 1, 1, 1)
        profile = {} if self._profile is None else {"profile": self._profile}
        return one.mapInArrow(_agent(self._work, task), SCHEMA, **profile)


def _agent(work: Work, task: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def agent(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext  # noqa: PLC0415 - runs in Spark's task

        from farandole.spark import agent as agents  # noqa: PLC0415 - as above
        from farandole.spark import decommission  # noqa: PLC0415 - as above
        from farandole.spark import task as tasks  # noqa: PLC0415 - as above

        agents.tasks_of(batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return  # the worker of this number is lost: the driver submits another one
        at_work = decommission.told(work)
        ending = agents.serve(at_work, task, 0, tasks.resources())
        for row in ending.rows():
            yield batch(row)

    return agent


def conduct(
    registrar: Registrar,
    crew: Crew,
    cluster: Cluster,
    output: Output,
    on_progress: Callable[[int, dict[str, Any]], None] | None,
) -> list[Any]:
    """Runs an elastic job to its end.

    Returns:
        What the function returned on each rank of the last world, rank 0 first.

    Raises:
        FarandoleJobError: The job failed, or could not go on.
    """
    job = _Job(registrar, crew, cluster, output, on_progress)
    try:
        return job.run()
    finally:
        registrar.close()
        crew.end()
        if output.files is not None:
            output.files.close()


class _Job:
    def __init__(
        self,
        registrar: Registrar,
        crew: Crew,
        cluster: Cluster,
        output: Output,
        on_progress: Callable[[int, dict[str, Any]], None] | None,
    ) -> None:
        self.registrar = registrar
        self.crew = crew
        self.output = output
        self.on_progress = on_progress
        self.decommissions = Decommissions(cluster)
        self.worlds = 0
        self.exits: dict[int, Event] = {}
        self.results: dict[int, bytes] = {}
        self.failed: Event | None = None
        self.finished = False

    def run(self) -> list[Any]:
        self.crew.start()
        while not self.finished:
            self.pump(_WAIT)
            if self.failed is not None:
                self.pump(_WAIT)  # a result may come with the exit
                error, origin = self.failure(self.failed)
                raise error from origin
            if not self.worlds and len(self.crew.refusals) >= _REFUSALS:
                raise FarandoleJobError(f"no worker could be started: {self.crew.refusals[-1]}")
            for task, reason in self.decommissions.news():
                self.output.say(f"the executor of worker {task} is being decommissioned ({reason}): the worker leaves")
                self.registrar.dismiss(task, reason)
        return self.returned()

    def returned(self) -> list[Any]:
        seats = sorted(self.registrar.assignment() or [], key=lambda seat: seat["rank"])
        deadline = time.monotonic() + _ROWS_WITHIN
        missing = [seat for seat in seats if self.ending(seat["task"]).result is None]
        while missing and time.monotonic() < deadline:
            # Results beyond what the registrar takes come in Spark's rows.
            self.pump(_WAIT)
            missing = [seat for seat in seats if self.ending(seat["task"]).result is None]
        endings = [self.ending(seat["task"], seat["rank"], seat["host"]) for seat in seats]
        return results(endings, len(seats))

    def ending(self, task: int, rank: int | None = None, host: str = "") -> Ending:
        by_rows, event = self.crew.endings.get(task), self.exits.get(task)
        result = self.results.get(task)
        if result is None and by_rows is not None:
            result = by_rows.result
        return Ending(
            task,
            host or (by_rows.host if by_rows is not None else ""),
            rank=rank if rank is not None or event is None else event.rank,
            exit_code=event.exit_code if event is not None else (by_rows.exit_code if by_rows is not None else None),
            stderr_tail=(event.stderr_tail or "") if event is not None else "",
            result=result,
        )

    def failure(self, event: Event) -> tuple[FarandoleJobError, BaseException | None]:
        if event.task is not None and event.task in self.exits:
            return failure(self.ending(event.task))
        return FarandoleJobError(event.text or "the job failed"), None

    def pump(self, timeout: float) -> None:
        try:
            for event in self.registrar.events(timeout):
                self.take(event)
        finally:
            self.output.flush()

    def take(self, event: Event) -> None:
        match event.kind:
            case "log":
                self.log(event)
            case "metric":
                self.metric(event)
            case "assigned":
                self.assigned()
            case "exit":
                if event.task is not None:
                    self.exits[event.task] = event
            case "result":
                self.results[event.task or 0] = event.data or b""
            case "lost" | "dismissed":
                self.gone(event)
            case "aborted":
                self.failed = self.failed or (None if self.finished else event)
            case "finished":
                self.finished = True

    def gone(self, event: Event) -> None:
        who = f"worker {event.task}" if event.rank is None else f"rank {event.rank}"
        if event.kind == "dismissed":
            self.crew.dismissed.add(event.task or 0)
            who += " leaves:"
        self.output.say(f"{who} {event.text}")

    def metric(self, event: Event) -> None:
        if event.data is None:
            return
        if event.text == EXECUTOR and event.task is not None:
            self.decommissions.worker(event.task, event.data.decode())
        elif event.text == PROGRESS and self.on_progress is not None:
            self.on_progress(event.rank or 0, json.loads(event.data))

    def assigned(self) -> None:
        self.worlds += 1
        seats = self.registrar.assignment() or []
        self.output.say(f"world {self.worlds} has {len(seats)} ranks")
        for seat in seats:
            self.output.say(f"rank {seat['rank']} is worker {seat['task']} on {seat['host']}", level=2)

    def log(self, event: Event) -> None:
        if event.dropped:
            self.output.say(f"{event.dropped} lines of workers were dropped: the driver could not keep up")
        if self.output.streaming:
            self.output.line(event.rank, event.stream, event.text or "")
