# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The strategies: DistributedDataParallel and FSDP2 over the backend `"farandole"`, in processes
that a launcher started.

Lightning has two packages with the same code, `lightning.pytorch` and `pytorch_lightning`, whose
classes do not know each other. The strategies are created for the first, and for the other one on
demand.
"""

# ruff: noqa: PLC0415 - whichever of the two packages is there

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch

import farandole.torch as hvd
from farandole.torch.functions import broadcast_value

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

STRATEGY_NAMES = ("farandole", "horovod")
"""Values for `Trainer(strategy=...)` with which each rank has the whole model."""
SHARDING_STRATEGY_NAME = "farandole_fsdp"
"""The value with which the model is divided among ranks."""

_FABRIC_PACKAGES = {
    "lightning.pytorch": "lightning.fabric",
    "pytorch_lightning": "lightning_fabric",
}


class _SessionClusterEnvironment:
    """Ranks and sizes of the session, which starts with the first question."""

    @property
    def creates_processes_externally(self) -> bool:
        """Processes are there already."""
        return True

    @property
    def main_address(self) -> str:
        """Unused address: ranks connect through the session."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Unused port: ranks connect through the session."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Returns whether this process is a rank of some world."""
        return hvd.is_initialized()

    def world_size(self) -> int:
        """Returns the number of ranks."""
        _ensure_initialized()
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the job sets the value."""

    def global_rank(self) -> int:
        """Returns this rank."""
        _ensure_initialized()
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the job sets the value."""

    def local_rank(self) -> int:
        """Returns this rank's number on its host."""
        _ensure_initialized()
        return hvd.local_rank()

    def node_rank(self) -> int:
        """Returns the number of this rank's host."""
        _ensure_initialized()
        return hvd.cross_rank()


class _PlainValueBroadcast:
    """Sends plain values without pickle. Lightning broadcasts paths and decisions, and pickles
    all objects.
    """

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns one rank's object on every rank.

        Args:
            obj: Value to send; ignored on other ranks.
            src: The rank that sends.
        """
        return broadcast_value(obj, src, "lightning.broadcast") if hvd.is_initialized() else obj


class _RefusesCpuSyncBatchNorm:
    """Mixed in before a strategy: refuses batch norms that work on GPUs only."""

    def configure_ddp(self: Any) -> None:
        """Wraps the module.

        Raises:
            ValueError: The device is a CPU, and the module has layers of torch's `SyncBatchNorm`.
        """
        if self.root_device.type == "cpu":
            for name, layer in self.model.named_modules():
                if isinstance(layer, torch.nn.SyncBatchNorm):
                    raise ValueError(
                        f"the layer {name!r} is torch's SyncBatchNorm, which works on GPUs only. "
                        "On CPUs, use farandole.torch.SyncBatchNorm.convert_sync_batchnorm(module) "
                        "in place of it and of sync_batchnorm=True"
                    )
        super().configure_ddp()  # type: ignore[misc]


class _ExactIntegerMeans:
    """Reduces tensors. Lightning divides the mean of sums over ranks by the mean of counts of
    rows, and a mean of integers would be rounded.
    """

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks, like `DDPStrategy.reduce`. The mean of integers is a
        float64.
        """
        is_mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return cast("Any", super()).reduce(tensor, group, reduce_op)


class _RanksOfSession:
    """Mixed in before a strategy: the session gives ranks, hosts and devices."""

    _package: str

    @property
    def root_device(self: Any) -> torch.device:
        """The device of this rank: of several, the one with its local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def num_processes(self) -> int:
        """Ranks of this host."""
        _ensure_initialized()
        return hvd.local_size()

    def set_world_ranks(self: Any) -> None:
        """Sets this rank in Lightning's helpers."""
        for name in (self._package, _FABRIC_PACKAGES[self._package]):
            rank_zero = import_module(f"{name}.utilities.rank_zero").rank_zero_only
            rank_zero.rank = self.global_rank

    def _configure_launcher(self) -> None:
        self._launcher = None

    def _start_world(self) -> None:
        """Starts the world, and torch.distributed in it."""
        import torch.distributed as dist

        import farandole.torch.distributed  # noqa: F401 - registers the backend

        _ensure_initialized()
        self.set_world_ranks()
        if not dist.is_initialized():
            dist.init_process_group("farandole", init_method="farandole://")


@cache
def cluster_environment_class(package: str) -> type[Any]:
    """Returns the class of Lightning's view of Farandole's world, for one of its packages.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    base = import_module(f"{_FABRIC_PACKAGES[package]}.plugins").ClusterEnvironment
    return type(
        "FarandoleEnvironment",
        (_SessionClusterEnvironment, base),
        {"__doc__": _SessionClusterEnvironment.__doc__, "__module__": __name__},
    )


@cache
def strategy_class(package: str) -> type[Any]:
    """Returns the strategy for one of Lightning's packages.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    base: type[DDPStrategy] = import_module(f"{package}.strategies").DDPStrategy

    class FarandoleStrategy(
        _PlainValueBroadcast, _RefusesCpuSyncBatchNorm, _ExactIntegerMeans, _RanksOfSession, base
    ):
        """Trains one model on all ranks of Farandole's world.

        Args:
            **kwargs: as for Lightning's `DDPStrategy`, such as `find_unused_parameters=True`, or a
                hook of `farandole.torch.ddp_comm_hook` as `ddp_comm_hook`.
        """

        strategy_name = "farandole"
        _package = package

        def __init__(self, **kwargs: Any) -> None:
            kwargs.setdefault("cluster_environment", cluster_environment_class(package)())
            super().__init__(process_group_backend="farandole", **kwargs)

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """The arguments of a sampler."""
            return {"num_replicas": self.world_size, "rank": self.global_rank}

        def _register_ddp_hooks(self) -> None:
            # Lightning's own leaves them out on CPUs, where they work as well here.
            _register_hook(
                self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
            )

        def setup_distributed(self) -> None:
            """Starts the world, and torch.distributed in it."""
            self._start_world()

    FarandoleStrategy.__qualname__ = "FarandoleStrategy"
    return FarandoleStrategy


@cache
def sharding_strategy_class(package: str) -> type[Any]:
    """Returns the strategy that divides models, for one of Lightning's packages.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """
    base: type[ModelParallelStrategy] = import_module(f"{package}.strategies").ModelParallelStrategy

    class FarandoleShardingStrategy(
        _PlainValueBroadcast, _ExactIntegerMeans, _RanksOfSession, base
    ):
        """Divides a model among all ranks of Farandole's world, where its `configure_model` calls
        `fully_shard(..., mesh=self.device_mesh["data_parallel"])` of torch (FSDP2).

        Args:
            **kwargs: as for Lightning's `ModelParallelStrategy`. Without sizes, all ranks divide
                the data, and tensors are not divided further.
        """

        _package = package

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(process_group_backend="farandole", **kwargs)
            self.cluster_environment = cluster_environment_class(package)()

        def _setup_distributed(self) -> None:
            self._start_world()
            if self._tensor_parallel_size == "auto":
                self._tensor_parallel_size = 1
            if self._data_parallel_size == "auto":
                self._data_parallel_size = self.world_size // self._tensor_parallel_size

    FarandoleShardingStrategy.__qualname__ = "FarandoleShardingStrategy"
    return FarandoleShardingStrategy


def _register_hook(model: Any, state: Any, hook: Any, wrapper: Any) -> None:
    if hook is not None:
        model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))


def register() -> None:
    """Registers the strategies under their names with each imported package of Lightning, or else
    with each installed package.

    The import of the second package takes seconds, and few programs use both.
    """
    imported = [package for package in _FABRIC_PACKAGES if package in sys.modules]
    for package in imported or [
        module_name
        for module_name in _FABRIC_PACKAGES
        if find_spec(module_name.partition(".")[0]) is not None
    ]:
        registry = import_module(f"{package}.strategies").StrategyRegistry
        for name in STRATEGY_NAMES:
            registry.register(
                name,
                strategy_class(package),
                description="one process per rank of Farandole's world",
                override=True,
            )
        registry.register(
            SHARDING_STRATEGY_NAME,
            sharding_strategy_class(package),
            description="one part of the model per rank of Farandole's world",
            override=True,
        )


def _ensure_initialized() -> None:
    if not hvd.is_initialized():
        hvd.init(process_sets="dynamic")


_DEFAULT_PACKAGE = next(
    (package for package in _FABRIC_PACKAGES if package in sys.modules),
    next(
        package for package in _FABRIC_PACKAGES if find_spec(package.partition(".")[0]) is not None
    ),
)

FarandoleEnvironment = cluster_environment_class(_DEFAULT_PACKAGE)
"""The cluster environment of Lightning in a world of Farandole: its ranks and its size."""
FarandoleStrategy = strategy_class(_DEFAULT_PACKAGE)
"""Lightning's strategy: `DistributedDataParallel` over Farandole's engine. Its names are
`farandole` and `horovod`.
"""
FarandoleShardingStrategy = sharding_strategy_class(_DEFAULT_PACKAGE)
"""Lightning's strategy for models that are divided among ranks by FSDP2. Its name is
`farandole_fsdp`.
"""
