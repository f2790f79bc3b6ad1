# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups of torch 2.6 to 2.13, in which Python cannot make a backend.

These versions have no constructor for subclasses of `Backend` in Python ("No constructor defined"),
so torch's dispatcher cannot reach a backend of Python. But a function that makes a backend may
return a whole group, and C++ calls these methods of a group in Python: `allreduce`, `broadcast`,
`allgather`, `reduce_scatter`, `barrier`, `send`, `recv`, and the forms of several tensors or one
tensor for all ranks that functional collectives use. DDP, FSDP2 and compiled collectives need no
others, and `torch.distributed` calls all methods in Python.

So each method of a `DirectGroup` calls the backend without the dispatcher. A group with another
backend for some devices cannot be made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from farandole.torch.distributed._process_group import OPERATIONS, FarandoleGroup
from farandole.torch.distributed._work import hold_work_for_cpp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RELEASE: Final = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version: a pre-release compares as lower than its version."""
HAS_PYTHON_BACKENDS: Final = _RELEASE >= (2, 14)
"""Whether Python can make a backend."""
_DROPS_PYTHON_WORKS: Final = _RELEASE < (2, 7)
"""Whether C++ holds a work without its Python object, so a wait there would not end."""
_OPTIONS: Final = {
    "allgather": (c10d.AllgatherOptions, 2),
    "allgather_coalesced": (c10d.AllgatherOptions, 2),
    "allgather_into_tensor_coalesced": (c10d.AllgatherOptions, 2),
    "all_gather_single_coalesced": (c10d.AllgatherOptions, 2),
    "allreduce": (c10d.AllreduceOptions, 1),
    "allreduce_coalesced": (c10d.AllreduceCoalescedOptions, 1),
    "barrier": (c10d.BarrierOptions, 0),
    "broadcast": (c10d.BroadcastOptions, 1),
    "reduce": (c10d.ReduceOptions, 1),
}
"""Options that callers in torch may leave out, and the number of arguments before them."""


class CopyableOptions(c10d.Backend.Options):
    """Options of a group. torch 2.13 copies them when it splits a group on a host with an
    accelerator.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> CopyableOptions:
        return CopyableOptions(self.backend, self._timeout)


class _PythonBackend:
    """Stands in for torch's class of backends.

    Args:
        rank: This process's number in the group.
        size: Number of members.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._group_rank_and_size = rank, size

    def rank(self) -> int:
        """Returns this process's number in the group."""
        return self._group_rank_and_size[0]

    def size(self) -> int:
        """Returns the number of members."""
        return self._group_rank_and_size[1]

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the numbers of a group begin at 0."""


BackendBase: Any = c10d.Backend if HAS_PYTHON_BACKENDS else _PythonBackend
"""The base class of backends."""


class DirectGroup(FarandoleGroup):
    """A group of backend `farandole` on torch 2.6 to 2.13.

    Args:
        backend: The backend that runs the collectives.
        store: The store of the group.
        devices: Types of the devices of its tensors.
    """

    def __init__(
        self, backend: Any, store: Any = None, devices: Sequence[str] = ("cpu", "cuda")
    ) -> None:
        # With a store, torch 2.13 makes a group whose methods C++ does not call in Python.
        dist.ProcessGroup.__init__(self, backend.rank(), backend.size())
        self._backend = backend
        self._devices = tuple(devices)
        self._store = store
        self._name_and_description = ["", ""]

    # C++ keeps these in the backends of a group, and this one has none there.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._devices]

    def _get_backend(self, device: torch.device) -> Any:
        del device
        return self._backend

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Returns the name of the group."""
        return self._name_and_description[0]

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Sets the name of the group."""
        self._name_and_description[0] = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Returns the description of the group."""
        return self._name_and_description[1]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Sets the description of the group."""
        self._name_and_description[1] = description

    def get_group_store(self) -> Any:
        """Returns the store of the group."""
        return self._store

    def _create_member_group(
        self, backend: Any, store: Any, devices: Sequence[str]
    ) -> FarandoleGroup:
        return DirectGroup(backend, store, devices)

    def _get_sequence_number_for_group(self) -> int:
        return self._backend._get_sequence_number_for_group()  # noqa: SLF001 - torch's name

    def set_timeout(self, timeout: Any) -> None:
        """Sets the limit of each operation that starts later."""
        self._backend.set_timeout(timeout)

    def shutdown(self) -> None:
        """Waits for all futures that were returned."""
        self._backend.shutdown()

    def abort(self) -> None:
        """Leaves the world. Operations in progress fail."""
        self._backend.abort()


def _call_backend_directly(name: str) -> Callable[..., Any]:
    make_options, position = _OPTIONS.get(name, (None, 0))
    event = f"c10d::{name}" if name in ("barrier", "send") else f"c10d::{name}_"

    def run_operation(self: DirectGroup, *arguments: Any, **options: Any) -> Any:
        if make_options is not None and len(arguments) == position and "opts" not in options:
            options["opts"] = make_options()
        with torch.profiler.record_function(event):
            work = getattr(self._backend, name)(*arguments, **options)
        if _DROPS_PYTHON_WORKS:
            hold_work_for_cpp(work)
        return work

    run_operation.__name__ = name
    run_operation.__doc__ = f"Like `ProcessGroup.{name}`."
    return run_operation


for _names in OPERATIONS:
    for _name in _names.split():
        setattr(DirectGroup, _name, _call_backend_directly(_name))
