# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ray Train: trainers whose workers are ranks of one world.

`FarandoleConfig` is the backend of any data-parallel trainer of Ray Train V2, and `HorovodTrainer`
is the trainer that Ray had for Horovod. With `elastic=True`, Ray replaces only a worker that
failed, and the new worker joins the world.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from farandole.ray.utils import import_ray

import_ray()

from ray.train.backend import Backend, BackendConfig  # noqa: E402 - after the check that names the extra to install
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402

from farandole.ray import membership  # noqa: E402
from farandole.ray.elastic_train import ElasticTrainController  # noqa: E402
from farandole.ray.runner import placement_variables_by_rank  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ray.train import DataConfig, Result, RunConfig, ScalingConfig

__all__ = ["FarandoleConfig", "HorovodConfig", "HorovodTrainer"]


@dataclass(eq=False)
class FarandoleConfig(BackendConfig):
    """Lets the workers of a trainer form a world, which `init` in the training function joins.

    It is the `backend_config` of `DataParallelTrainer`, and the `torch_config` of `TorchTrainer`.

    Attributes:
        backend: Name that `TorchTrainer` takes for a backend of `torch.distributed`; no such
            backend is set up.
        elastic: Whether a worker that fails is replaced while the others keep their state: the
            training function is then one for elastic jobs, with a `State`. Otherwise Ray starts all
            workers again, from their last checkpoint. Both count as failures for
            `ray.train.FailureConfig(max_failures=...)`.
        min_workers: Elastic: smallest number of ranks that train; default: all. `ray.train.report`
            waits for all in any case.
        reset_limit: Elastic: largest number of changes of the world.
        elastic_timeout: Elastic: seconds for which there may be too few ranks.

    Raises:
        ValueError: A number is out of range, or this version of Ray always restarts all workers.
    """

    backend: ClassVar[str] = "farandole"
    elastic: bool = False
    min_workers: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600

    def __post_init__(self) -> None:
        """Refuses invalid settings, before anything starts."""
        if not self.elastic and (self.min_workers is not None or self.reset_limit is not None):
            raise ValueError(
                f"min_workers and reset_limit are for elastic=True: {self.min_workers=}, "
                f"{self.reset_limit=}"
            )
        if self.min_workers is not None and self.min_workers < 1:
            raise ValueError(f"min_workers must be at least 1: {self.min_workers}")
        if self.elastic and not hasattr(Backend, "has_replica_groups"):
            raise ValueError(
                "elastic=True needs a Ray that replaces single workers, this is "
                f"{import_ray().__version__}"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that sets up the workers."""
        return _ElasticTrainBackend if self.elastic else _StaticTrainBackend

    @property
    def train_func_context(self) -> Any:
        """The context of a worker's training function."""
        return membership.report_exit_at_end if self.elastic else membership.leave_world_at_end

    @property
    def framework(self) -> None:
        """`None`: Ray counts the use of some frameworks, and Farandole is none of them."""
        return

    def to_dict(self) -> dict[str, Any]:
        """Returns the representation of this configuration in Ray."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, bool | int | float | str)
        }


@dataclass(eq=False)
class HorovodConfig(FarandoleConfig):
    """`FarandoleConfig` that also accepts the names of Ray's configuration for Horovod.

    Attributes:
        nics: Not used: addresses are found without them.
        verbose: Not used.
        key: Not used: each world has its own token.
        ssh_port: Not used: there is no ssh.
        ssh_identity_file: Not used.
        ssh_str: Not used, and written nowhere.
        timeout_s: Not used: `FARANDOLE_START_TIMEOUT` bounds how long ranks wait for each other.
        placement_group_timeout_s: Not used: Ray Train reserves resources.
    """

    nics: set[str] | None = None
    verbose: int = 1
    key: str | None = field(default=None, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = field(default=None, repr=False)
    timeout_s: int = 300
    placement_group_timeout_s: int = 100


class _StaticTrainBackend(Backend):
    """Workers of one attempt; if one fails, Ray starts all of them again."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Sends the workers the address of their world; rank 0 holds its registrar."""
        del backend_config
        hosts = worker_group.execute(membership.host_identity)
        ticket = worker_group.execute_single(
            0, membership.run_world_registrar, len(hosts), len(set(hosts)) == 1
        )
        started = [
            worker_group.execute_single_async(
                rank, membership.assign_world_ticket, ticket, rank, variables
            )
            for rank, variables in enumerate(
                placement_variables_by_rank(hosts, [[] for _ in hosts])
            )
        ]
        import_ray().get(started)


class _ElasticTrainBackend(Backend):
    """Workers that are replaced one by one."""

    share_cuda_visible_devices = True
    has_replica_groups = True
    _controllers: ClassVar[WeakKeyDictionary[BackendConfig, ElasticTrainController]] = (
        WeakKeyDictionary()
    )

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Begins the job with all workers, or adds a replacement that Ray has started."""
        if hasattr(worker_group, "get_replica_groups"):
            self.on_shutdown(worker_group, backend_config)
            assert isinstance(backend_config, FarandoleConfig)  # noqa: S101 - which names this class
            self._controllers[backend_config] = ElasticTrainController(
                worker_group,
                min_workers=backend_config.min_workers,
                timeout=backend_config.elastic_timeout,
                reset_limit=backend_config.reset_limit,
            )
        self._controllers[backend_config].add_workers(worker_group)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Ends the job, unless only one worker ends."""
        if hasattr(worker_group, "get_replica_groups"):
            regime = self._controllers.pop(backend_config, None)
            if regime is not None:
                regime.close()


class HorovodTrainer(DataParallelTrainer):
    """The trainer that Ray had for Horovod, for Ray Train V2.

    Args:
        train_loop_per_worker: Runs on every worker; it calls `init` of the framework it uses.
        train_loop_config: Passed to the function, if it takes an argument.
        horovod_config: Configuration of the world; default: `HorovodConfig()`.
        scaling_config: Number and resources of the workers.
        dataset_config: Configuration of the split of data sets.
        run_config: Storage of the results, and handling of failures.
        datasets: Ray data sets by name, for `ray.train.get_dataset_shard`.
        metadata: Refused by Ray Train V2.
        resume_from_checkpoint: Refused by Ray Train V2: pass a path in `train_loop_config`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: FarandoleConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=horovod_config or HorovodConfig(),
            scaling_config=scaling_config,  # pyright: ignore[reportArgumentType] - Ray exports the one of this version
            dataset_config=dataset_config,
            run_config=run_config,  # pyright: ignore[reportArgumentType] - as above
            datasets=dict(datasets or {}),
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    def fit(self) -> Result:
        """Trains like every trainer of Ray Train V2, and then restores the SIGINT handler.

        Ray's own trainers leave their handler behind, and Ctrl-C then does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return super().fit()
        before = signal.getsignal(signal.SIGINT)
        try:
            return super().fit()
        finally:
            signal.signal(signal.SIGINT, before)
