# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The older interface of elastic jobs on Ray, which Horovod replaced with
`RayExecutor(min_workers=...)`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.ray import elastic_v2
from farandole.ray.adapter import resolve_deprecated_argument, resolve_gpu_count
from farandole.ray.runner import RayExecutor
from farandole.ray.utils import import_ray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery", "TestDiscovery"]

logger = logging.getLogger(__name__)


class RayHostDiscovery(elastic_v2.RayHostDiscovery):
    """Like `farandole.ray.elastic_v2.RayHostDiscovery`, with the older names.

    Args:
        use_gpu: Whether a worker needs GPUs.
        cpus_per_slot: CPUs of a worker.
        gpus_per_slot: GPUs of a worker, with `use_gpu`.
    """

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


class TestDiscovery(elastic_v2.TestDiscovery):
    """Like `farandole.ray.elastic_v2.TestDiscovery`, with the older names.

    Args:
        min_hosts: Fewest nodes that stay.
        max_hosts: Most nodes.
        change_frequency_s: Seconds between two changes.
        use_gpu: As `RayHostDiscovery`.
        cpus_per_slot: As `RayHostDiscovery`.
        gpus_per_slot: As `RayHostDiscovery`.
        verbose: Whether changes are logged.
        _graceful: Accepted for compatibility with Horovod: a worker leaves at its next commit.
    """

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(
            min_hosts,
            max_hosts,
            change_frequency_s,
            use_gpu,
            cpus_per_slot,
            gpus_per_slot,
            verbose,
            _graceful,
        )


@dataclass
class ElasticSettings:
    """The result of `ElasticRayExecutor.create_settings`.

    Attributes:
        min_num_proc: Fewest ranks with which the job continues.
        max_num_proc: Most ranks; default: as `max_workers` of `RayExecutor`.
        reset_limit: Largest number of changes of the world.
        elastic_timeout: Seconds for which there may be too few ranks.
        timeout_s: Accepted for compatibility with Horovod.
        ssh_identity_file: Accepted for compatibility with Horovod; no ssh is used.
        nics: Accepted for compatibility with Horovod; addresses are found without them.
        discovery: Finds hosts, for `override_discovery=False`.
        more: Further settings of Horovod's launcher, accepted for its sake.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    ssh_identity_file: str | None = None
    nics: set[str] | None = None
    discovery: Any = None
    more: dict[str, Any] = field(default_factory=dict)


class ElasticRayExecutor:
    """Runs a function on Ray actors whose number may change.

    Args:
        settings: `ElasticRayExecutor.create_settings()`.
        use_gpu: Whether ranks get GPUs.
        cpus_per_slot: CPUs of a rank.
        gpus_per_slot: GPUs of a rank; 1 by default with `use_gpu`.
        env_vars: Variables of the workers' environment.
        override_discovery: Whether Ray finds the free resources, instead of `settings.discovery`.
    """

    @classmethod
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: set[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Returns the settings of an executor.

        Args:
            min_num_proc: As `ElasticSettings`.
            max_num_proc: As `ElasticSettings`.
            reset_limit: As `ElasticSettings`.
            elastic_timeout: As `ElasticSettings`.
            timeout_s: As `ElasticSettings`.
            ssh_identity_file: As `ElasticSettings`.
            nics: As `ElasticSettings`.
            min_np: The older name of `min_num_proc`.
            max_np: The older name of `max_num_proc`.
            **kwargs: Further settings of Horovod's launcher.
        """
        return ElasticSettings(
            resolve_deprecated_argument("min_np", min_np, "min_num_proc", min_num_proc),
            resolve_deprecated_argument("max_np", max_np, "max_num_proc", max_num_proc),
            reset_limit,
            elastic_timeout,
            timeout_s,
            str(Path(ssh_identity_file or "~/ray_bootstrap_key.pem").expanduser()),
            nics,
            kwargs.pop("discovery", None),
            kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        import_ray()
        self.settings = settings
        self.env_vars = dict(env_vars or {})
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=resolve_gpu_count(gpus_per_slot, use_gpu, "gpus_per_slot") or None,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Prepares the executor; the workers start with each `run`. With Ray Client, an actor in
        the cluster runs the driver of `run`.
        """
        self._executor.shutdown()
        self._executor.start(extra_env_vars=self.env_vars)

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Calls `worker_fn()` on every worker.

        Args:
            worker_fn: The function; it takes no arguments.
            callbacks: Called here with each record that a worker sends by
                `farandole.ray.ray_logger.log`.

        Returns:
            The results by rank of the last world.

        Raises:
            FarandoleJobError: The job failed, or had too few ranks for too long.
            RuntimeError: `start` was not called.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)
