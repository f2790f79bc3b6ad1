# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`RayExecutor`: actors that stay, and functions that run on all of them."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farandole.ray.adapter import Adapter, BaseParams, resolve_deprecated_argument
from farandole.ray.elastic_v2 import ElasticParams
from farandole.ray.results import ResultWaiter, drain_records
from farandole.ray.strategy import ColocatedStrategy, PGStrategy, current_placement_group
from farandole.ray.utils import import_ray, is_ray_client, map_blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.ray.strategy import BaseStrategy

logger = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT = 100.0
_LEAVE_TIMEOUT = 10.0
_CALL_POLL_INTERVAL = 0.1


@dataclass
class MiniSettings:
    """Settings of `RayExecutor` besides its own arguments.

    Attributes:
        nics: Accepted for compatibility with Horovod; addresses are found without them.
        verbose: Accepted for compatibility with Horovod.
        key: Accepted for compatibility with Horovod; each world has its own token.
        ssh_port: Accepted for compatibility with Horovod; no ssh is used.
        ssh_identity_file: As `ssh_port`.
        timeout_s: Seconds within which the workers must start after their resources were reserved.
        placement_group_timeout_s: Seconds within which Ray must reserve the resources.
        elastic: Whether the job is elastic.
        discovery: For an elastic job with `override_discovery=False`: finds hosts and their slots.
    """

    nics: set[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = _PLACEMENT_TIMEOUT
    elastic: bool = False
    discovery: Any = None

    @property
    def start_timeout(self) -> float:
        """Seconds within which the workers must start."""
        return self.timeout_s


@dataclass
class StaticParams(BaseParams):
    """The parameters of a static job.

    Attributes:
        num_workers: Number of ranks. Ray chooses their nodes.
        num_hosts: Number of nodes with `num_workers_per_host` ranks each.
        num_workers_per_host: Ranks of a node.
        use_current_placement_group: Whether the placement group that the caller runs in is used.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other."""
        super().__post_init__()
        if self.num_workers is not None and self.num_hosts is not None:
            raise ValueError(
                f"pass num_workers or num_hosts, not both: num_workers={self.num_workers}, "
                f"num_hosts={self.num_hosts}"
            )
        for name in ("num_workers", "num_hosts", "num_workers_per_host"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1: {number}")

    @property
    def elastic(self) -> bool:
        """Whether the job is elastic: never."""
        return False

    @property
    def adapter(self) -> type[StaticAdapter]:
        """The adapter class of a static job."""
        return StaticAdapter


class StaticAdapter(Adapter):
    """A job whose ranks are there from the beginning to the end.

    Args:
        settings: `RayExecutor.create_settings`.
        params: Parameters of the job.
    """

    def __init__(self, settings: Any, params: StaticParams) -> None:
        self.settings = settings
        self.params = params
        self.workers: list[Any] = []
        self.strategy: BaseStrategy | None = None
        self.nodes: list[str] = []

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Like `Adapter.start`.

        Raises:
            TimeoutError: Ray did not reserve the resources, or did not start the workers, in time.
        """
        if self.workers:
            raise RuntimeError("the workers have been started already; call shutdown first")
        self.strategy = self._make_strategy()
        self.strategy.env_vars = {
            name: str(value) for name, value in (extra_env_vars or {}).items()
        }
        try:
            self.workers, _ = self.strategy.create_workers()
            self._form_world()
            map_blocking(
                lambda worker: worker.start_executable.remote(
                    executable_cls, executable_args, executable_kwargs
                ),
                self.workers,
            )
        except BaseException:
            self.shutdown()
            raise

    def _make_strategy(self) -> BaseStrategy:
        params = self.params
        common = {
            "settings": self.settings,
            "use_gpu": params.use_gpu,
            "cpus_per_worker": params.cpus_per_worker,
            "gpus_per_worker": params.gpus_per_worker,
        }
        group = current_placement_group() if params.use_current_placement_group else None
        if params.num_workers is None and params.num_hosts is None:
            raise ValueError("the number of workers is missing: pass num_workers or num_hosts")
        if params.num_workers is not None or group is not None:
            number = params.num_workers or (params.num_hosts or 1) * params.num_workers_per_host
            fresh = not params.use_current_placement_group
            return PGStrategy(
                **common,
                num_workers=number,
                placement_group=group,
                force_create_placement_group=fresh,
            )
        return ColocatedStrategy(
            **common,
            num_hosts=params.num_hosts or 1,
            num_workers_per_host=params.num_workers_per_host,
        )

    def _form_world(self) -> None:
        """Waits until the actors run, and gives each its variables and its rank in the world."""
        ray = import_ray()
        limit = max(getattr(self.settings, "timeout_s", _PLACEMENT_TIMEOUT), _PLACEMENT_TIMEOUT)
        asked = [worker.where.remote() for worker in self.workers]
        ready, late = ray.wait(asked, num_returns=len(asked), timeout=limit)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(asked)} workers did not start within {limit:g} s. Resources "
                f"that are free: {ray.available_resources()}; of the cluster: "
                f"{ray.cluster_resources()}"
            )
        del ready
        hosts = ray.get(asked)
        addresses = map_blocking(lambda worker: worker.hostname.remote(), self.workers)
        self.nodes = [f"node {address}" for address in addresses]
        gpus = map_blocking(lambda worker: worker.get_gpu_ids.remote(), self.workers)
        for worker, variables in zip(
            self.workers, placement_variables_by_rank(hosts, gpus), strict=True
        ):
            worker.update_env_vars.remote(variables)
        ticket = ray.get(self.workers[0].host.remote(len(set(hosts)) == 1))
        map_blocking(lambda worker: worker.take_place.remote(ticket), self.workers)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Like `Adapter.execute`."""
        with ResultWaiter(self.workers, self.nodes, callbacks) as waiting:
            return waiting.wait_for_results(self._call_on_all_workers(fn))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Like `Adapter.run`."""
        with ResultWaiter(self.workers, self.nodes, callbacks) as waiting:
            return waiting.wait_for_results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Like `Adapter.run_remote`; `callbacks` are for `run`, which waits."""
        del callbacks
        given, named = tuple(args or ()), dict(kwargs or {})
        return self._call_on_all_workers(lambda _: fn(*given, **named))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like `Adapter.execute_single`."""
        self._require_started()
        return import_ray().get(self.workers[0].execute.remote(fn))

    def _call_on_all_workers(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._require_started()
        return [worker.execute.remote(fn) for worker in self.workers]

    def _require_started(self) -> None:
        if not self.workers:
            raise RuntimeError("the workers have not been started: call start first")

    def shutdown(self) -> None:
        """Like `Adapter.shutdown`."""
        ray = import_ray()
        if ray.is_initialized():
            leaving = [worker.leave.remote() for worker in self.workers]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_TIMEOUT)
            for worker in self.workers:
                ray.kill(worker)
            if self.strategy is not None:
                self.strategy.shutdown()
        self.workers, self.strategy, self.nodes = [], None, []


def placement_variables_by_rank(
    hosts: Sequence[str], gpus: Sequence[Sequence[Any]]
) -> list[dict[str, str]]:
    """Returns the variables that give ranks their placement.

    Args:
        hosts: Unique identifiers of the hosts, by rank.
        gpus: The GPUs that Ray assigned, by rank.

    Returns:
        Horovod's variables by rank. Where there are GPUs, `CUDA_VISIBLE_DEVICES` lists all GPUs
        of the job on the host, first the GPUs of local rank 0, so that ranks of a host can reach
        each other's memory.
    """
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    sizes = [hosts.count(host) for host in hosts]
    order = list(dict.fromkeys(hosts))
    found = []
    for rank, host in enumerate(hosts):
        peers = [other for other in order if hosts.count(other) > local[rank]]
        placement = {
            "HOROVOD_LOCAL_RANK": str(local[rank]),
            "HOROVOD_LOCAL_SIZE": str(sizes[rank]),
            "HOROVOD_CROSS_RANK": str(peers.index(host)),
            "HOROVOD_CROSS_SIZE": str(len(peers)),
        }
        visible = [
            str(gpu) for other, given in enumerate(gpus) if hosts[other] == host for gpu in given
        ]
        if visible:
            placement["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(visible))
        found.append(placement)
    return found


class RayExecutor:
    """Starts ranks as Ray actors, and runs functions on all of them.

    Args:
        settings: `RayExecutor.create_settings()`.
        num_workers: Number of ranks. Ray chooses their nodes.
        num_hosts: Alternative to `num_workers`: number of nodes with `num_workers_per_host` ranks
            each.
        num_workers_per_host: Ranks of a node.
        cpus_per_worker: CPUs that Ray reserves for a rank.
        use_gpu: Whether ranks get GPUs.
        gpus_per_worker: GPUs of a rank; 1 by default with `use_gpu`.
        use_current_placement_group: Whether the placement group that the caller runs in is used, if
            there is one.
        min_workers: Makes the job elastic: the smallest number of ranks.
        max_workers: Largest number of ranks of an elastic job; default: the number of slots of
            the cluster when a `run` begins, free or not; with `override_discovery=False`, the
            number that is found at any time.
        reset_limit: Number of changes of the world after which an elastic job fails.
        cooldown_range: Seconds for which a node gets no new worker after a failure there: after the
            first one, and at most.
        elastic_timeout: Seconds with too few ranks after which an elastic job fails.
        override_discovery: Whether Ray finds the free resources of an elastic job, instead of
            `settings.discovery`.
        num_slots: The older name of `num_workers_per_host`.
        cpus_per_slot: The older name of `cpus_per_worker`.
        gpus_per_slot: The older name of `gpus_per_worker`.

    Raises:
        ValueError: Arguments contradict each other; the message names them.
        ImportError: Ray is not installed.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = _PLACEMENT_TIMEOUT,
        nics: set[str] | None = None,
        *,
        verbose: int = 1,
    ) -> MiniSettings:
        """Returns the settings of an executor.

        Args:
            timeout_s: Seconds within which the workers must start after their resources were
                reserved.
            ssh_identity_file: Accepted for compatibility with Horovod; no ssh is used.
            ssh_str: As `ssh_identity_file`; it is not written anywhere.
            placement_group_timeout_s: Seconds within which Ray must reserve the resources.
            nics: Accepted for compatibility with Horovod; addresses are found without them.
            verbose: Accepted for compatibility with Horovod's guide.
        """
        del ssh_str
        return MiniSettings(
            nics=nics,
            verbose=verbose,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        *,
        num_slots: int | None = None,
        cpus_per_slot: int | None = None,
        gpus_per_slot: int | None = None,
    ) -> None:
        import_ray()
        self.settings = settings
        num_workers_per_host = resolve_deprecated_argument(
            "num_slots", num_slots, "num_workers_per_host", num_workers_per_host
        )
        cpus_per_worker = resolve_deprecated_argument(
            "cpus_per_slot", cpus_per_slot, "cpus_per_worker", cpus_per_worker
        )
        gpus_per_worker = resolve_deprecated_argument(
            "gpus_per_slot", gpus_per_slot, "gpus_per_worker", gpus_per_worker
        )
        if max_workers is not None and min_workers is None:
            raise ValueError(
                "max_workers is for elastic jobs, which need min_workers: "
                f"max_workers={max_workers}"
            )
        if min_workers is not None and num_workers is not None:
            raise ValueError(
                f"pass min_workers, for an elastic job, or num_workers: {min_workers=}, "
                f"{num_workers=}"
            )
        self.params: ElasticParams | StaticParams
        if min_workers is not None:
            self.params = ElasticParams(
                cpus_per_worker,
                use_gpu,
                gpus_per_worker,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
            )
        else:
            self.params = StaticParams(
                cpus_per_worker,
                use_gpu,
                gpus_per_worker,
                num_workers,
                num_hosts,
                num_workers_per_host,
                use_current_placement_group,
            )
        self.adapter: Any = None
        self._remote = False

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers, with the arguments of `Adapter.start`.

        Raises:
            TimeoutError: Ray did not reserve the resources, or did not start the workers, in time.
        """
        if self.adapter is not None:
            raise RuntimeError("the workers have been started already; call shutdown first")
        # The registrar of an elastic job must be on a host that the workers can reach.
        self._remote = self.params.elastic and is_ray_client()
        if self._remote:
            remote: Any = import_ray().remote(num_cpus=0)(self.params.adapter)
            self.adapter = remote.remote(self.settings, self.params)
        else:
            made: Any = self.params.adapter
            self.adapter = made(self.settings, self.params)
        try:
            self._call_adapter(
                "start", executable_cls, executable_args, executable_kwargs, extra_env_vars
            )
        except BaseException:
            self.adapter = None
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every worker and waits.

        Args:
            fn: A function, which calls `init` as any training script does; pickled by cloudpickle.
            args: Its arguments.
            kwargs: Its keyword arguments.
            callbacks: Called here with each record that a worker sends by
                `farandole.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            FarandoleJobError: A worker's process or node died; the message names it.
            RayTaskError: The function raised an exception. The error is also of the type of that
                exception.
        """
        return self._call_with_callbacks("run", (fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Like `run`, and returns references to the results at once, by rank.

        Raises:
            NotImplementedError: In an elastic job, whose ranks change.
        """
        return self._call_adapter("run_remote", fn, args, kwargs)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on every worker, waits, and returns the results by rank.
        `callbacks` are as for `run`.
        """
        return self._call_with_callbacks("execute", (fn,), callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 and waits.

        Raises:
            NotImplementedError: In an elastic job, whose ranks change.
        """
        return self._call_adapter("execute_single", fn)

    def shutdown(self) -> None:
        """Ends the workers and releases their resources. Later calls do nothing."""
        if self.adapter is None:
            return
        self._call_adapter("shutdown")
        if self._remote:
            import_ray().kill(self.adapter)
        self.adapter = None

    def _call_with_callbacks(
        self, method: str, args: tuple[Any, ...], callbacks: Sequence[Callable[..., Any]] | None
    ) -> list[Any]:
        """Returns the result of a method that takes callbacks, and calls them in this process."""
        if not self._remote or not callbacks:
            return self._call_adapter(method, *args, callbacks)
        from ray.util.queue import Queue  # noqa: PLC0415 - Ray may be absent

        ray = import_ray()
        queue = Queue(actor_options={"num_cpus": 0})
        try:
            asked = getattr(self.adapter, method).remote(*args, [queue.put])
            ended: list[Any] = []
            while not ended:
                ended, _ = ray.wait([asked], timeout=_CALL_POLL_INTERVAL)
                drain_records(queue, callbacks)
            return ray.get(asked)
        finally:
            queue.shutdown()

    def _call_adapter(self, method: str, *args: Any) -> Any:
        if self.adapter is None:
            raise RuntimeError("the workers have not been started: call start first")
        asked = getattr(self.adapter, method)
        return import_ray().get(asked.remote(*args)) if self._remote else asked(*args)
