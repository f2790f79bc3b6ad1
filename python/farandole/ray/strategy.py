# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Placement groups for the actors of a static job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from farandole.common.counted_noun import format_counted_noun
from farandole.ray.utils import import_ray, map_blocking
from farandole.ray.worker import BaseHorovodWorker
from farandole.runner.job_slot_queue import MAX_SLOT_WAIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

_RESERVATION_POLL_INTERVAL = 0.5
_WAIT_REPORT_INTERVAL = 15.0


class _RunningJobCounter:
    """Counts the jobs of this process that hold resources until they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0

    def running_job_count(self) -> int:
        """Returns the number of these jobs."""
        with self._lock:
            return self._jobs

    @contextlib.contextmanager
    def count_running_job(self) -> Iterator[None]:
        """Counts one job."""
        with self._lock:
            self._jobs += 1
        try:
            yield
        finally:
            with self._lock:
                self._jobs -= 1


_RUNNING_JOBS = _RunningJobCounter()


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
    report_wait: Callable[[str], None] = logger.info,
    before: Callable[[], int] = lambda: 0,
) -> tuple[Any, list[Any]]:
    """Reserves resources of the cluster: all of them at once, or nothing.

    Args:
        resources_per_bundle: Resources of a bundle, such as `{"CPU": 1, "GPU": 1}`.
        num_bundles: Number of bundles.
        pg_timeout: Seconds that Ray may take to reserve them.
        pg_strategy: Ray's name of how bundles are spread, such as `"PACK"`.
        report_wait: Receives the reason for the wait, every 15 s.
        before: Returns the number of jobs that hold resources and end by themselves. While there
            are such jobs, the time does not count, for a day at most.

    Returns:
        The placement group and its bundles.

    Raises:
        TimeoutError: Ray could not reserve all resources in time; the message names both amounts.
    """
    ray = import_ray()
    from ray.util.placement_group import placement_group, remove_placement_group  # noqa: PLC0415 - as Ray itself

    wanted = {name: number for name, number in resources_per_bundle.items() if number}
    group = placement_group([dict(wanted) for _ in range(num_bundles)], strategy=pg_strategy)
    available: Any = None
    try:
        in_time = _wait_for_placement_group(
            group,
            pg_timeout,
            lambda held: report_wait(f"{num_bundles} bundles of {wanted} wait; {held}"),
            before,
        )
        if not in_time:
            available = ray.available_resources()
    except BaseException:
        remove_placement_group(group)
        raise
    if not in_time:
        remove_placement_group(group)
        raise TimeoutError(
            f"Ray did not reserve {num_bundles} bundles of {wanted} ({pg_strategy}) within "
            f"{pg_timeout:g} s. Resources that were free: {available}; of the cluster: "
            f"{ray.cluster_resources()}"
        )
    return group, group.bundle_specs


def _wait_for_placement_group(
    group: Any, limit: float, report_wait: Callable[[str], None], before: Callable[[], int]
) -> bool:
    """Waits until a group's resources are reserved; returns whether they are, in time."""
    ray = import_ray()
    ready = [group.ready()]
    began = counted = time.monotonic()
    next_report_at = began + _WAIT_REPORT_INTERVAL
    while True:
        now = time.monotonic()
        remaining = min(limit - (now - counted), MAX_SLOT_WAIT - (now - began))
        if ray.wait(ready, timeout=max(0.0, min(_RESERVATION_POLL_INTERVAL, remaining)))[0]:
            return True
        if remaining <= 0:
            return False
        held = before()
        if held:
            counted = time.monotonic()
        if now >= next_report_at:
            next_report_at = now + _WAIT_REPORT_INTERVAL
            report_wait(
                "resources are held by "
                f"{format_counted_noun(held, 'other job')} of this process, free are "
                f"{ray.available_resources()}"
            )


@contextlib.contextmanager
def hold_placement_group(
    cpus: float,
    gpus: float,
    number: int,
    limit: float,
    report_wait: Callable[[str], None] = logger.info,
) -> Iterator[Any]:
    """Reserves resources for a number of workers at once, and releases them afterwards. So two jobs
    never hold half of their resources each.

    Args:
        cpus: CPUs of a worker.
        gpus: GPUs of a worker.
        number: Number of workers.
        limit: Seconds that Ray may take. Time in which other jobs of this process hold resources
            does not count, for a day at most: the trials of a search wait for each other.
        report_wait: As `create_placement_group`.

    Yields:
        The placement group, with a bundle for each worker.

    Raises:
        TimeoutError: As `create_placement_group`.
    """
    from ray.util.placement_group import remove_placement_group  # noqa: PLC0415 - as Ray itself

    group, _ = create_placement_group(
        {"CPU": cpus, "GPU": gpus},
        number,
        limit,
        "PACK",
        report_wait,
        _RUNNING_JOBS.running_job_count,
    )
    with _RUNNING_JOBS.count_running_job():
        try:
            yield group
        finally:
            remove_placement_group(group)


class BaseStrategy(ABC):
    """Makes the actors of a job, rank 0 first."""

    placement_group: Any = None
    """The placement group of the actors."""
    workers: list[Any]
    """The actors, by rank."""

    def __init__(self) -> None:
        self.workers = []
        self._owned = False
        self.env_vars: dict[str, str] = {}

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Starts the actors.

        Returns:
            The actors by rank, and one of each node.
        """

    def get_node_workers(self, workers: list[Any]) -> list[Any]:
        """Returns one actor of each node, in the order of ranks."""
        nodes = map_blocking(lambda worker: worker.node_id.remote(), workers)
        return [worker for index, worker in enumerate(workers) if nodes[index] not in nodes[:index]]

    def shutdown(self) -> None:
        """Releases the placement group if this object created it."""
        if self._owned and self.placement_group is not None:
            from ray.util.placement_group import remove_placement_group  # noqa: PLC0415 - as Ray itself

            remove_placement_group(self.placement_group)
        self.workers = []
        self.placement_group = None

    def _create_actor(self, rank: int, bundle: int, cpus: float, gpus: float) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - as Ray itself

        remote = import_ray().remote(BaseHorovodWorker)
        placed = PlacementGroupSchedulingStrategy(
            self.placement_group,
            placement_group_bundle_index=bundle,
            placement_group_capture_child_tasks=False,
        )
        environment = {"runtime_env": {"env_vars": dict(self.env_vars)}} if self.env_vars else {}
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": placed,
            "max_restarts": 0,
            **environment,
        }
        return remote.options(**options).remote(rank, self.num_workers)


class ColocatedStrategy(BaseStrategy):
    """The same number of ranks on each of several nodes; ranks of a node follow each other.

    Args:
        settings: `RayExecutor.create_settings`.
        num_hosts: Number of nodes.
        num_workers_per_host: Ranks of each.
        use_gpu: Whether ranks get GPUs.
        cpus_per_worker: CPUs of a rank.
        gpus_per_worker: GPUs of a rank, with `use_gpu`.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.num_hosts = num_hosts
        self.num_workers_per_host = num_workers_per_host
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = (gpus_per_worker or 1) if use_gpu else 0

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.num_workers_per_host

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Like `BaseStrategy.create_workers`; one bundle holds all ranks of a node."""
        each = self.num_workers_per_host
        bundle = {"CPU": self.cpus_per_worker * each, "GPU": self.gpus_per_worker * each}
        limit = self.settings.placement_group_timeout_s
        self.placement_group, _ = create_placement_group(
            bundle, self.num_hosts, limit, "STRICT_SPREAD"
        )
        self._owned = True
        self.workers = [
            self._create_actor(rank, rank // each, self.cpus_per_worker, self.gpus_per_worker)
            for rank in range(self.num_workers)
        ]
        return self.workers, self.get_node_workers(self.workers)


class PGStrategy(BaseStrategy):
    """Places as many ranks as requested, on any nodes with room, in the current placement group if
    there is one.

    Args:
        settings: `RayExecutor.create_settings`.
        num_workers: Number of ranks.
        use_gpu: Whether ranks get GPUs.
        cpus_per_worker: CPUs of a rank.
        gpus_per_worker: GPUs of a rank, with `use_gpu`.
        placement_group: The group for the actors; default: the current one, else a new one.
        force_create_placement_group: Whether a new group is created even inside of another one.
    """

    def __init__(
        self,
        *,
        settings: Any,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
        placement_group: Any = None,
        force_create_placement_group: bool = False,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._num_workers = num_workers
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = (gpus_per_worker or 1) if use_gpu else 0
        self._given = (
            None if force_create_placement_group else placement_group or current_placement_group()
        )

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return self._num_workers

    def resources_per_worker(self) -> dict[str, float]:
        """Returns the resources that Ray reserves for a rank."""
        return {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Like `BaseStrategy.create_workers`."""
        if self._given is not None:
            self.placement_group = self._given
        else:
            limit = self.settings.placement_group_timeout_s
            self.placement_group, _ = create_placement_group(
                self.resources_per_worker(), self.num_workers, limit, "PACK"
            )
            self._owned = True
        self.workers = [
            self._create_actor(rank, -1, self.cpus_per_worker, self.gpus_per_worker)
            for rank in range(self.num_workers)
        ]
        return self.workers, self.get_node_workers(self.workers)


def current_placement_group() -> Any:
    """Returns the placement group that the caller runs in; `None` outside of one."""
    from ray.util.placement_group import get_current_placement_group  # noqa: PLC0415 - as Ray itself

    return get_current_placement_group()
