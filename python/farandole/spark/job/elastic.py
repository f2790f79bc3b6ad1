# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers on Spark that come and go: one Spark job of one task for each, and no barrier stage.

If Spark has fewer slots than the job may have workers, the Spark jobs of the other workers wait in
Spark's queue, so dynamic allocation requests executors. A worker joins when its task gets a slot. A
task that Spark starts again after it lost an executor ends at once, and the driver submits a new
one, because every worker has its own number. The registrar decides which workers are in the world,
and when the job is done.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from farandole.runner.elastic.crew import Crew
from farandole.runner.outcome import Ending
from farandole.spark.job.agents import batch, tasks_of
from farandole.spark.job.profiles import mapped
from farandole.spark.job.session import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farandole.runner.agent import Work
    from farandole.runner.gang import Output
    from farandole.spark.job.session import Cluster


class SparkCrew(Crew):
    """Workers in Spark's tasks: one Spark job for each.

    Attributes:
        tag: Of these jobs.
    """

    def __init__(
        self, cluster: Cluster, work: Work, most: int, output: Output, profile: Any = None
    ) -> None:
        super().__init__(most, cluster.thread)
        self._cluster = cluster
        self._work = work
        self._output = output
        self._profile = profile
        self.tag = f"farandole-{uuid.uuid4().hex[:12]}"

    def _begin(self) -> None:
        self._cluster.tag(self.tag, "farandole: an elastic worker")

    def _cancel(self) -> None:
        self._cluster.cancel(self.tag)

    def _one(self, task: int) -> str | None:
        try:
            rows = self._rows(task).collect()
        except Exception as error:  # noqa: BLE001 - Spark's own tries are over: the next task is another worker
            told = self._cluster.explain(error)
            return told if told is not None else f"a Spark job has failed: {headline(error)}"
        told = Ending.from_rows(
            (row["task"], row["kind"], row["chunk"], bytes(row["data"])) for row in rows
        )
        for ending in told:
            if ending.refused is not None:
                return f"{ending.host}: {ending.refused}"
            self.endings[ending.task] = ending
        return None

    def _rows(self, task: int) -> Any:
        one = self._cluster.session.range(0, 1, 1, 1)
        return mapped(one, _agent(self._work, task), self._profile)


def _agent(work: Work, task: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def agent(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext  # noqa: PLC0415 - runs in Spark's task

        from farandole.runner import agent as agents  # noqa: PLC0415 - as above
        from farandole.spark import task as tasks  # noqa: PLC0415 - as above
        from farandole.spark.job import decommission  # noqa: PLC0415 - as above

        tasks_of(batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return  # the worker of this number is lost: the driver submits another one
        at_work = decommission.told(work)
        ending = agents.serve(at_work, task, 0, tasks.resources())
        for row in ending.rows():
            yield batch(row)

    return agent
