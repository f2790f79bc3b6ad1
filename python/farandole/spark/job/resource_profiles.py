# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rows of tasks with a resource profile.

From pyspark 4.0 on, `mapInArrow` takes the profile. In pyspark 3.5 only RDDs take one, so the plan
becomes an RDD, and the profile of an RDD holds for its whole stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from farandole.runner.worker_task_outcome import TASK_ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row

    Agent = Callable[[Iterable[Any]], Iterator[Any]]

_PLAN_PROFILES_SINCE_MAJOR: Final = 4


def supports_plan_resource_profiles() -> bool:
    """Returns whether the plans of this pyspark take a profile."""
    import pyspark  # noqa: PLC0415 - `import farandole.spark` loads no pyspark

    return int(pyspark.__version__.partition(".")[0]) >= _PLAN_PROFILES_SINCE_MAJOR


def map_tasks_with_profile(
    tasks: DataFrame, agent: Agent, profile: ResourceProfile | None, **more: Any
) -> DataFrame | ResourceProfiledRows:
    """Returns the rows that an agent makes in each task.

    Args:
        tasks: One row for each task.
        agent: Function that each task runs.
        profile: Resources of each task; `None` is Spark's default.
        **more: Other arguments of `mapInArrow`.
    """
    if profile is None:
        return tasks.mapInArrow(agent, TASK_ROW_SCHEMA, **more)
    if supports_plan_resource_profiles():
        return tasks.mapInArrow(agent, TASK_ROW_SCHEMA, profile=profile, **more)
    return ResourceProfiledRows.from_frame(
        tasks.mapInArrow(agent, TASK_ROW_SCHEMA, **more), profile
    )


class ResourceProfiledRows:
    """Rows of a classic session of pyspark 3.5, made by tasks with a profile.

    Args:
        context: The `SparkContext`.
        pickled: Pickled rows, as an RDD of the JVM.
    """

    def __init__(self, context: Any, pickled: Any) -> None:
        self._context = context
        self._pickled_rdd = pickled

    @classmethod
    def from_frame(cls, frame: DataFrame, profile: ResourceProfile) -> ResourceProfiledRows:
        """Returns the rows of a frame.

        Args:
            frame: One stage without shuffles.
            profile: Resources that each task needs.
        """
        context = frame.sparkSession.sparkContext
        classic: Any = frame
        pickled = classic._jdf.javaToPython()  # noqa: SLF001 - what `frame.rdd` is made of
        _to_rdd(context, pickled).withResources(profile)  # changes the JVM's object
        return cls(context, pickled)

    def repartition(self, number: int) -> ResourceProfiledRows:
        """Like `DataFrame.repartition`.

        Args:
            number: Number of partitions.
        """
        return ResourceProfiledRows(self._context, self._pickled_rdd.repartition(number))

    def collect(self) -> list[Row]:
        """Like `DataFrame.collect`."""
        return _to_rdd(self._context, self._pickled_rdd).collect()


def _to_rdd(context: Any, pickled: Any) -> Any:
    from pyspark import RDD  # noqa: PLC0415 - as above
    from pyspark.serializers import BatchedSerializer, CPickleSerializer  # noqa: PLC0415 - as above

    return RDD(pickled, context, BatchedSerializer(CPickleSerializer()))
