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

from farandole.runner.elastic.agent_pool import ThreadedAgentPool
from farandole.spark.job.agents import read_outcomes, task_numbers, to_record_batch
from farandole.spark.job.resource_profiles import map_tasks_with_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from farandole.runner.agent import WorkerSpec
    from farandole.runner.gang import JobOutput
    from farandole.spark.job.session_adapter import SparkSessionAdapter


class SparkAgentPool(ThreadedAgentPool):
    """Workers in Spark's tasks: one Spark job for each.

    Attributes:
        tag: Tag of these jobs.
    """

    def __init__(
        self,
        cluster: SparkSessionAdapter,
        work: WorkerSpec,
        max_workers: int,
        output: JobOutput,
        profile: Any = None,
    ) -> None:
        super().__init__(max_workers, cluster.make_job_thread)
        self._cluster = cluster
        self._work = work
        self._output = output
        self._profile = profile
        self.tag = f"farandole-{uuid.uuid4().hex[:12]}"

    def _prepare_thread(self) -> None:
        self._cluster.tag_jobs(self.tag, "farandole: an elastic worker")

    def _cancel_workers(self) -> None:
        self._cluster.cancel_jobs(self.tag)

    def _run_worker(self, task: int) -> str | None:
        try:
            rows = self._worker_agent_frame(task).collect()
        except Exception as error:  # noqa: BLE001 - Spark's own tries are over: the next task is another worker
            return self._cluster.explain_failure(error, "a Spark job")
        for outcome in read_outcomes(rows):
            if outcome.refused is not None:
                return f"{outcome.host}: {outcome.refused}"
            self.endings[outcome.task] = outcome
        return None

    def _worker_agent_frame(self, task: int) -> Any:
        single_row = self._cluster.session.range(0, 1, 1, 1)
        return map_tasks_with_profile(
            single_row, _make_worker_agent(self._work, task), self._profile
        )


def _make_worker_agent(work: WorkerSpec, task: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def run_worker_agent(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext  # noqa: PLC0415 - runs in Spark's task

        from farandole.runner import agent as agents  # noqa: PLC0415 - as above
        from farandole.spark import task as tasks  # noqa: PLC0415 - as above
        from farandole.spark.job import decommission  # noqa: PLC0415 - as above

        task_numbers(batches)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return  # the worker of this number is lost: the driver submits another one
        at_work = decommission.with_executor_id(work)
        outcome = agents.run_worker(at_work, task, 0, tasks.task_resources())
        for row in outcome.to_rows():
            yield to_record_batch(row)

    return run_worker_agent
