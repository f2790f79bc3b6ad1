# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Nodes of a Ray cluster that have resources for workers."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from typing import TYPE_CHECKING

from farandole.ray.utils import import_ray
from farandole.runner.elastic.discovery import HostDiscovery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)

_asking_job = threading.local()
"""Its attribute `workers` has the workers of the job that asks, by the address of their node."""


@contextlib.contextmanager
def count_workers_as_free(workers: Mapping[str, int]) -> Iterator[None]:
    """Counts the resources of a job's workers as available while the job asks a discovery.

    Args:
        workers: Workers of the job by the address of their node.
    """
    _asking_job.workers = workers
    try:
        yield
    finally:
        _asking_job.workers = {}


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster with room for workers, according to their free resources.

    While an elastic job asks, the resources of its workers count as free.

    Args:
        use_gpu: Whether a worker needs GPUs.
        cpus_per_worker: CPUs of a worker.
        gpus_per_worker: GPUs of a worker, with `use_gpu`.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1
    ) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the number of workers that fit on each node, by address; omits full nodes."""
        free, own = self._slots_by_address(_free_resources()), getattr(_asking_job, "workers", {})
        # A worker that Ray has not placed yet uses no resources yet, so the sum may exceed the
        # resources of the node.
        return {
            host: min(slots, free.get(host, 0) + own.get(host, 0))
            for host, slots in self._slots_by_address(_node_resources()).items()
            if free.get(host, 0) + own.get(host, 0)
        }

    def of_cluster(self) -> int:
        """Returns the number of workers that would fit in an idle cluster."""
        return sum(self._slots_by_address(_node_resources()).values())

    def _slots_by_address(
        self, resources_by_address: Mapping[str, Mapping[str, float]]
    ) -> dict[str, int]:
        found = {}
        for address, amounts in resources_by_address.items():
            slots = (
                amounts.get("CPU", 0) // self.cpus_per_worker
                if self.cpus_per_worker
                else float("inf")
            )
            if self.use_gpu:
                slots = min(slots, amounts.get("GPU", 0) // self.gpus_per_worker)
            if 1 <= slots < float("inf"):
                found[address] = int(slots)
        return found


def _free_resources() -> dict[str, dict[str, float]]:
    """Returns the free resources of each live node, by address."""
    from ray._private.state import available_resources_per_node  # noqa: PLC0415 - Ray has no public API to it

    addresses = {
        node["NodeID"]: node["NodeManagerAddress"] for node in import_ray().nodes() if node["Alive"]
    }
    found = available_resources_per_node().items()
    return _sum_by_address(
        (addresses[node], resources) for node, resources in found if node in addresses
    )


def _node_resources() -> dict[str, dict[str, float]]:
    """Returns the resources of each live node, by address."""
    return _sum_by_address(
        (node["NodeManagerAddress"], node["Resources"])
        for node in import_ray().nodes()
        if node["Alive"]
    )


def _sum_by_address(
    nodes: Iterable[tuple[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for address, resources in nodes:
        # Several nodes of one address are a test's.
        totals = found.setdefault(address, {})
        for name, number in resources.items():
            totals[name] = totals.get(name, 0.0) + number
    return found


class TestDiscovery(RayHostDiscovery):
    """Takes nodes away and gives them back at random, to try how a job bears it.

    Args:
        min_hosts: Fewest nodes that stay.
        max_hosts: Most nodes.
        change_frequency_s: Seconds between two changes.
        use_gpu: As `RayHostDiscovery`.
        cpus_per_worker: As `RayHostDiscovery`.
        gpus_per_worker: As `RayHostDiscovery`.
        verbose: Whether changes are logged.
        _graceful: Accepted for compatibility with Horovod: a worker leaves at its next commit.
    """

    __test__ = False  # pytest would take it for a test

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        self._min_hosts, self._max_hosts = min_hosts, max_hosts
        self._every = change_frequency_s
        self._verbose = verbose
        self._removed: set[str] = set()
        self._changed = time.monotonic()
        self._seen: dict[str, int] = {}

    def add_host(self, hosts: dict[str, int]) -> None:
        """Gives one of the removed nodes back, if there is one that lives."""
        back = [host for host in self._removed if host in hosts]
        if back:
            self._removed.discard(random.choice(back))  # noqa: S311 - chaos, no secret

    def remove_host(self, hosts: dict[str, int]) -> None:
        """Takes one of the nodes away."""
        present_hosts = [host for host in hosts if host not in self._removed]
        if present_hosts:
            self._removed.add(random.choice(present_hosts))  # noqa: S311 - as above

    def change_hosts(self, hosts: dict[str, int]) -> None:
        """Takes a node away or gives one back, within the limits."""
        host_count = len([host for host in hosts if host not in self._removed])
        if host_count <= self._min_hosts:
            self.add_host(hosts)
        elif host_count >= self._max_hosts or random.random() < 0.5:  # noqa: PLR2004, S311 - as often as not
            self.remove_host(hosts)
        else:
            self.add_host(hosts)
        if self._verbose:
            logger.info("nodes that were taken away: %s", sorted(self._removed))

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots of the nodes that are not taken away."""
        hosts = super().find_available_hosts_and_slots()
        if time.monotonic() - self._changed >= self._every:
            self._changed = time.monotonic()
            self.change_hosts(hosts)
        return {host: slots for host, slots in hosts.items() if host not in self._removed}
