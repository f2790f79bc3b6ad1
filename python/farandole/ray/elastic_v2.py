# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs on Ray: `RayExecutor(min_workers=...)`."""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole.ray.adapter import Adapter, BaseParams
from farandole.ray.crew import NOT_FOR_WORKERS, PAUSES, Needs, RayCrew, room
from farandole.ray.drains import Drains
from farandole.ray.utils import needed
from farandole.runner.elastic.discovery import HostDiscovery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

_START_WITHIN = 600.0


@dataclass
class ElasticParams(BaseParams):
    """What an elastic job needs.

    Attributes:
        min_workers: Fewest ranks with which it goes on.
        max_workers: Most ranks; default: as many as the cluster has slots when the job starts.
        reset_limit: How often its world may change.
        cooldown_range: Seconds, at first and at most, without a new worker where one failed.
        elastic_timeout: Seconds for which there may be too few ranks.
        override_discovery: Whether Ray says where there is room, rather than `settings.discovery`.
    """

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other."""
        super().__post_init__()
        if self.min_workers < 1:
            raise ValueError(f"min_workers must be at least 1: {self.min_workers}")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers must not be below min_workers: {self.max_workers} is below {self.min_workers}"
            )

    @property
    def elastic(self) -> bool:
        """True."""
        return True

    @property
    def adapter(self) -> type[ElasticAdapter]:
        """What runs such a job."""
        return ElasticAdapter


class RayHostDiscovery(HostDiscovery):
    """The nodes of the cluster with room for workers, by what is free there now.

    Args:
        use_gpu: Whether a worker needs GPUs.
        cpus_per_worker: CPUs of a worker.
        gpus_per_worker: GPUs of a worker, with `use_gpu`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Workers that fit on each node, by the node's address; nodes without room are left out."""
        return self._slots(_free())

    def of_cluster(self) -> int:
        """Workers that would fit if nothing else ran."""
        nodes = [node for node in needed().nodes() if node["Alive"]]
        return sum(self._slots({node["NodeManagerAddress"]: node["Resources"] for node in nodes}).values())

    def _slots(self, resources: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
        found = {}
        for address, there in resources.items():
            slots = there.get("CPU", 0) // self.cpus_per_worker if self.cpus_per_worker else float("inf")
            if self.use_gpu:
                slots = min(slots, there.get("GPU", 0) // self.gpus_per_worker)
            if 1 <= slots < float("inf"):
                found[address] = int(slots)
        return found


def _free() -> dict[str, dict[str, float]]:
    """What is free on each node that lives, by address."""
    from ray._private.state import available_resources_per_node  # noqa: PLC0415 - Ray has no public door to it

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in needed().nodes() if node["Alive"]}
    found: dict[str, dict[str, float]] = {}
    for node, resources in available_resources_per_node().items():
        if node in addresses:
            # Several nodes of one address are a test's.
            there = found.setdefault(addresses[node], {})
            for name, number in resources.items():
                there[name] = there.get(name, 0.0) + number
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
        _graceful: Accepted for Horovod's sake: a worker leaves at its next commit.
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
        self._least, self._most = min_hosts, max_hosts
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
        there = [host for host in hosts if host not in self._removed]
        if there:
            self._removed.add(random.choice(there))  # noqa: S311 - as above

    def change_hosts(self, hosts: dict[str, int]) -> None:
        """Takes a node away or gives one back, within the limits."""
        there = len([host for host in hosts if host not in self._removed])
        if there <= self._least:
            self.add_host(hosts)
        elif there >= self._most or random.random() < 0.5:  # noqa: PLR2004, S311 - as often as not
            self.remove_host(hosts)
        else:
            self.add_host(hosts)
        if self._verbose:
            logger.info("nodes that were taken away: %s", sorted(self._removed))

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots of the nodes that are not taken away. By what nodes have: its own workers take what would be free."""
        nodes = {node["NodeManagerAddress"]: node["Resources"] for node in needed().nodes() if node["Alive"]}
        hosts = self._slots(nodes)
        if time.monotonic() - self._changed >= self._every:
            self._changed = time.monotonic()
            self.change_hosts(hosts)
        return {host: slots for host, slots in hosts.items() if host not in self._removed}


def _member(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose worker joins the world even if the function does not: results are those of members."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        from farandole.common import basics  # noqa: PLC0415 - in the worker

        worlds: list[bool] = []
        basics.on_init(lambda: worlds.append(True))
        result = fn(*args, **kwargs)
        if not worlds:
            basics.init()
        return result

    return call


class ElasticAdapter(Adapter):
    """A job whose ranks come and go. Each `run` is a job of its own.

    Args:
        settings: `RayExecutor.create_settings`; its `discovery` finds nodes where `override_discovery` is off.
        params: What the job needs.

    Raises:
        ValueError: `override_discovery` is off, and `settings` has no discovery.
    """

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings = settings
        self.params = params
        self._discovery = None if params.override_discovery else getattr(settings, "discovery", None)
        if not params.override_discovery and self._discovery is None:
            raise ValueError("override_discovery is False, and settings.discovery is missing")
        self._executable: tuple[type | None, tuple[Any, ...], dict[str, Any]] = (None, (), {})
        self._env: dict[str, str] = {}

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """As `Adapter.start`; the workers start with each `run`."""
        self._executable = (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        self._env = {name: str(value) for name, value in (extra_env_vars or {}).items()}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """As `Adapter.run`.

        Raises:
            FarandoleJobError: The job failed, or had too few ranks for too long.
            TimeoutError: Ray had no room for `min_workers` in `elastic_timeout` seconds.
        """
        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here
        from farandole.common import logs  # noqa: PLC0415 - as above
        from farandole.runner import environment  # noqa: PLC0415 - as above
        from farandole.runner.agent import Work  # noqa: PLC0415 - as above
        from farandole.runner.elastic.conduct import conduct  # noqa: PLC0415 - as above
        from farandole.runner.gang import Output, payload  # noqa: PLC0415 - as above

        logs.start()
        output = Output(sys.stdout, sys.stderr)
        packed = payload(_member(fn) if callable(fn) else fn, args or (), kwargs)
        most = self._most()
        params = self.params
        taken, _ = environment.chosen(os.environ, (), NOT_FOR_WORKERS)
        needs = Needs(params.cpus_per_worker, params.gpus_per_worker or 0, params.cooldown_range or PAUSES)
        hosts = self._discovery.find_available_hosts_and_slots if self._discovery is not None else None

        def hand_over(_: int, record: dict[str, Any]) -> None:
            for callback in callbacks or ():
                callback(record)

        least = params.min_workers if hosts is None else 0
        with room(needs, least, params.elastic_timeout, output.say):
            registrar = Registrar.elastic(
                params.min_workers,
                params.min_workers,
                most,
                timeout=params.elastic_timeout,
                reset_limit=params.reset_limit,
            )
            work = Work(registrar.ticket, packed, {**taken, **self._env}, None, True, _START_WITHIN, elastic=True)
            crew = RayCrew(registrar, work, most, needs, output, hosts)
            return conduct(registrar, crew, output, hand_over, Drains())

    def _most(self) -> int:
        params = self.params
        if params.max_workers is not None:
            return params.max_workers
        there = RayHostDiscovery(params.use_gpu, params.cpus_per_worker, params.gpus_per_worker or 1).of_cluster()
        return max(params.min_workers, there)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Not for elastic jobs."""
        raise NotImplementedError("an elastic job has no fixed ranks to return references by: use run")

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """As `Adapter.execute`; each worker makes its executable when it starts."""
        made, given, named = self._executable

        def call() -> Any:
            return fn(made(*given, **named) if made is not None else None)

        return self.run(call, callbacks=callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Not for elastic jobs."""
        raise NotImplementedError("an elastic job has no fixed rank 0: use execute")

    def shutdown(self) -> None:
        """As `Adapter.shutdown`; a `run` leaves nothing behind."""
