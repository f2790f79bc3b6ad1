# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Elastic jobs on Ray: `RayExecutor(min_workers=...)`."""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole.ray.adapter import Adapter, BaseParams
from farandole.ray.agent_pool import (
    ACTOR_RESTART_DELAYS,
    DRIVER_ONLY_VARIABLES,
    ActorResources,
    RayAgentPool,
    hold_minimum_resources,
)
from farandole.ray.discovery import RayHostDiscovery, TestDiscovery
from farandole.ray.node_drains import DrainedNodeDepartures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ElasticAdapter", "ElasticParams", "RayHostDiscovery", "TestDiscovery", "logger"]

logger = logging.getLogger(__name__)

_START_TIMEOUT = 600.0
_UNLIMITED_WORKERS = 2**32 - 1


@dataclass
class ElasticParams(BaseParams):
    """The parameters of an elastic job.

    Attributes:
        min_workers: Smallest number of ranks with which the job continues.
        max_workers: Largest number of ranks; default: the number that `settings.discovery` finds,
            if it is used, else the number of slots of the cluster when a `run` begins.
        reset_limit: Largest number of changes of the world.
        cooldown_range: Seconds, at first and at most, without a new worker where one failed.
        elastic_timeout: Seconds for which there may be too few ranks.
        override_discovery: Whether Ray finds the free resources, instead of `settings.discovery`.
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
                f"max_workers must not be below min_workers: {self.max_workers} is below "
                f"{self.min_workers}"
            )

    @property
    def elastic(self) -> bool:
        """Whether the job is elastic: always."""
        return True

    @property
    def adapter(self) -> type[ElasticAdapter]:
        """The adapter class of an elastic job."""
        return ElasticAdapter


def _with_world_join(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose worker joins the world even if the function does not: only members
    of the world return results.
    """

    @functools.wraps(fn)
    def call_and_join(*args: Any, **kwargs: Any) -> Any:
        from farandole.common import basics  # noqa: PLC0415 - in the worker

        worlds: list[bool] = []
        basics.call_on_each_init(lambda: worlds.append(True))
        result = fn(*args, **kwargs)
        if not worlds:
            basics.init()
        return result

    return call_and_join


class ElasticAdapter(Adapter):
    """A job whose ranks come and go. Each `run` is a separate job.

    Args:
        settings: `RayExecutor.create_settings`; its `discovery` finds nodes where
            `override_discovery` is off.
        params: Parameters of the job.

    Raises:
        ValueError: `override_discovery` is off, and `settings` has no discovery.
    """

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings = settings
        self.params = params
        self._discovery = (
            None if params.override_discovery else getattr(settings, "discovery", None)
        )
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
        """Like `Adapter.start`; the workers start with each `run`."""
        self._executable = (
            executable_cls,
            tuple(executable_args or ()),
            dict(executable_kwargs or {}),
        )
        self._env = {name: str(value) for name, value in (extra_env_vars or {}).items()}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Like `Adapter.run`.

        Raises:
            FarandoleJobError: The job failed, or had too few ranks for too long.
            TimeoutError: Ray had no room for `min_workers` in `elastic_timeout` seconds.
        """
        from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here
        from farandole.common import logs  # noqa: PLC0415 - as above
        from farandole.runner import forwarded_variables  # noqa: PLC0415 - as above
        from farandole.runner.agent import WorkerSpec  # noqa: PLC0415 - as above
        from farandole.runner.elastic.driver_loop import run_elastic_job  # noqa: PLC0415 - as above
        from farandole.runner.gang import JobOutput, pickle_payload  # noqa: PLC0415 - as above

        logs.start_logging()
        output = JobOutput(sys.stdout, sys.stderr)
        packed = pickle_payload(_with_world_join(fn) if callable(fn) else fn, args or (), kwargs)
        max_workers = self._max_workers()
        params = self.params
        taken, _ = forwarded_variables.split_forwarded_variables(
            os.environ, (), DRIVER_ONLY_VARIABLES
        )
        needs = ActorResources(
            params.cpus_per_worker,
            params.gpus_per_worker or 0,
            params.cooldown_range or ACTOR_RESTART_DELAYS,
        )
        hosts = (
            self._discovery.find_available_hosts_and_slots if self._discovery is not None else None
        )

        def pass_to_callbacks(_: int, record: dict[str, Any]) -> None:
            for callback in callbacks or ():
                callback(record)

        reserved_workers = params.min_workers if hosts is None else 0
        with hold_minimum_resources(
            needs, reserved_workers, params.elastic_timeout, output.print_message
        ):
            registrar = Registrar.start_elastic(
                params.min_workers,
                params.min_workers,
                max_workers,
                timeout=params.elastic_timeout,
                reset_limit=params.reset_limit,
            )
            work = WorkerSpec(
                registrar.ticket,
                packed,
                {**taken, **self._env},
                None,
                True,
                _START_TIMEOUT,
                elastic=True,
            )
            agent_pool = RayAgentPool(registrar, work, max_workers, needs, output, hosts)
            return run_elastic_job(
                registrar, agent_pool, output, pass_to_callbacks, DrainedNodeDepartures()
            )

    def _max_workers(self) -> int:
        params = self.params
        if params.max_workers is not None:
            return params.max_workers
        if self._discovery is not None:
            return _UNLIMITED_WORKERS
        slot_count = RayHostDiscovery(
            params.use_gpu, params.cpus_per_worker, params.gpus_per_worker or 1
        ).of_cluster()
        return max(params.min_workers, slot_count)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Raises an error, because an elastic job has no fixed ranks."""
        raise NotImplementedError(
            "an elastic job has no fixed ranks, so it cannot return references by rank: use run"
        )

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Like `Adapter.execute`; each worker makes its executable when it starts."""
        made, given, named = self._executable

        def call_with_executable() -> Any:
            return fn(made(*given, **named) if made is not None else None)

        return self.run(call_with_executable, callbacks=callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Raises an error, because an elastic job has no fixed ranks."""
        raise NotImplementedError("an elastic job has no fixed rank 0: use execute")

    def shutdown(self) -> None:
        """Like `Adapter.shutdown`; a `run` leaves nothing behind."""
