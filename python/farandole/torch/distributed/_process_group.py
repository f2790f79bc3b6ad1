# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The group that torch sees.

torch's own group forwards only `wait` and `get_future` to works made in Python: `is_completed`,
`exception` or the source of a message are lost. So a group of this backend returns its own works.
Each call still goes through torch's dispatcher, where profilers, hooks and compilers see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from farandole.torch.distributed._backend import FarandoleBackend

OPERATIONS: Final = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single _allgather_base",
    "allgather_coalesced",
    "all_gather_single_coalesced allgather_into_tensor_coalesced",
    "gather",
    "gather_single gather_into_tensor",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single _reduce_scatter_base",
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
    "alltoall",
    "all_to_all_single alltoall_base",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)
"""Operations of torch's groups. If an operation has two names, the first is of newer versions of
torch. Only one of them may be overridden: C++ calls the override of the other one from the first.
"""


class FarandoleGroup(dist.ProcessGroup):
    """A group of backend `farandole`.

    Args:
        backend: The backend that runs the collectives.
        store: The store of the group.
        devices: Types of the devices of its tensors.
    """

    def __init__(
        self,
        backend: FarandoleBackend,
        store: Any = None,
        devices: Sequence[str] = ("cpu", "cuda"),
    ) -> None:
        if store is None:
            super().__init__(backend.rank(), backend.size())
        else:
            super().__init__(store, backend.rank(), backend.size())
        self._backend = backend
        self._devices = tuple(devices)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in self._devices:
            self._register_backend(torch.device(device), kind, backend)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns the backend's name, as C++ asks for it."""
        return "farandole"

    def name(self) -> str:
        """Returns the backend's name."""
        return "farandole"

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> FarandoleGroup | None:
        """Makes a group of some of this group's members, by torch's `split_group`.

        Args:
            new_ranks: Ranks in this group, in the order of the new group.
            timeout: Timeout of the new group; by default, the timeout of this group.
            opts: Ignored.
            group_name: Name of the new group.
            group_desc: Description of the new group.
            device_types: Types of its devices; by default, all types of this group.

        Returns:
            The group; `None` if this process is no member.
        """
        del opts
        if self.rank() not in new_ranks:
            return None
        name: Any = group_name or f"{self.group_name}:split:{new_ranks}"
        backend = self._backend.split_members(new_ranks, timeout)
        store = PrefixStore(f"{name}/", self.get_group_store())
        device_names = [device.type for device in device_types or []] or self._devices
        group = self._create_member_group(backend, store, device_names)
        group._set_group_name(name)  # noqa: SLF001 - torch's name
        group._set_group_desc(group_desc or "undefined")  # noqa: SLF001 - torch's name
        return group

    def _create_member_group(
        self, backend: FarandoleBackend, store: Any, devices: Sequence[str]
    ) -> FarandoleGroup:
        return FarandoleGroup(backend, store, devices)

    def start_coalescing(self, device: Any = None) -> None:
        """Begins a batch of operations."""
        del device
        self._backend.start_coalescing()

    def end_coalescing(self, device: Any = None) -> Any:
        """Ends a batch; returns the work of all its operations."""
        del device
        return self._backend.end_coalescing()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come.

        Args:
            timeout: Longest wait; by default, the timeout of the group.
            wait_all_ranks: Whether rank 0 names all missing ranks, not only the first one.
        """
        self._backend.run_monitored_barrier(timeout, wait_all_ranks)


def _forward_operation_to_backend(name: str) -> Callable[..., Any]:
    inherited = getattr(dist.ProcessGroup, name)

    def run_operation(self: FarandoleGroup, *arguments: Any, **options: Any) -> Any:
        backend = self._backend
        backend.forget_last_work()
        held = inherited(self, *arguments, **options)
        return backend.last_work() or held

    # pybind11 takes a call of the inherited method for one from its override by the name of the
    # frame's code.
    run_operation.__code__ = run_operation.__code__.replace(co_name=name)
    run_operation.__name__ = name
    run_operation.__doc__ = f"Like `ProcessGroup.{name}`, but returns the backend's own work."
    return run_operation


for _names in OPERATIONS:
    _known = [name for name in _names.split() if hasattr(dist.ProcessGroup, name)]
    for _name in _known[:1]:
        setattr(FarandoleGroup, _name, _forward_operation_to_backend(_name))
