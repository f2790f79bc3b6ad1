# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The session of this process and its operations on memory given by address.

This is the low-level interface of `farandole.torch`: the caller keeps the memory valid until the
handle is consumed. A tensor on a GPU is given by its `device`: the GPU's number, and the handle of
the stream that makes its values.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

_Shape: TypeAlias = tuple[int, ...]
_Device: TypeAlias = tuple[int, int] | None

@final
class World:
    """The place of this process in the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_homogeneous(self) -> bool: ...

@final
class GatheredTensor:
    """Memory an operation has filled, or a GPU is filling; frees itself with its last user.

    On the host it supports the buffer protocol, writable; what is on a GPU is fetched.
    """

    @property
    def ordinal(self) -> int | None:
        """The GPU that it is on, if it is on one."""

    @property
    def rows(self) -> list[int]:
        """Rows each member gave, in member order; after an all-to-all: gave to this rank."""

    def queue_copy_and_free(self, address: int, stream: int, /) -> None:
        """Lets a stream of the GPU move the bytes to an address there, after the work that makes
        them. Once only.
        """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class SharedTensorMemory:
    """Memory that other ranks of this host can work in, where there are any; supports the buffer
    protocol, writable.

    A forked child shares it with its parent: what one writes, both see.
    """

    @property
    def address(self) -> int: ...
    def copy_into(self, offset: int, address: int, bytes: int, /) -> None:  # noqa: A002 - positional only
        """Copies what is at an address to an offset, past the caches."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class RegisteredDeviceMemory:
    """Memory of a GPU that NCCL has given and its communicators register, as bytes by the CUDA
    array interface.
    """

    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...

@final
class PendingDeviceResult:
    """A result that a GPU is still at work on."""

    @property
    def ordinal(self) -> int:
        """The GPU."""

    @property
    def outcome(self) -> GatheredTensor | None: ...
    def make_gpu_stream_wait(self, stream: int, /) -> None:
        """Makes all later work on this stream of the GPU wait for the result. Returns at once."""

    def is_ready(self) -> bool:
        """Returns whether the result is complete."""

def init(
    comm: Sequence[int] | None,
    process_sets: Sequence[Sequence[int]],
    dynamic: bool,
    assigned_rank: tuple[str, int] | None = None,
    /,
) -> bool: ...
def host_registrar(size: int, one_host: bool, /) -> str: ...
def shared_memory_identity() -> str: ...
def rank_not_inherited_variable() -> tuple[str, str] | None: ...
def host_changes() -> list[tuple[float, int]]:
    """Changes of hosts in an elastic job since the last call: when, in seconds, and bits (1
    removed, 2 added).
    """

def announce_leave(reason: str, timeout: float, /) -> bool:
    """Tells the registrar of an elastic job that this worker ends at its next chance; false
    where it is not elastic.
    """

def shutdown() -> None: ...
def announce_clean_exit() -> None: ...
def is_initialized() -> bool: ...
def uses_horovod_gradients() -> bool: ...
def world() -> World: ...
def copy_memory(copies: list[tuple[int, int, int]], /) -> None:
    """Copies memory past the caches: of each copy, the address to write to, that to read from,
    and the bytes.
    """

LARGE_MEMORY: int
PRIORITIZED_LIST_BYTES: int
"""Bytes from which on glibc and the engine take memory from the system anew."""

def advise_large_pages(address: int, bytes: int, /) -> None:  # noqa: A002 - positional only
    """Asks the system for large pages in memory of so many bytes that is not used yet."""

def allreduce(
    name: str,
    dtype: int,
    shape: _Shape,
    source: int,
    target: int,
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    attended: bool,
    device: _Device = None,
    priority: int = 0,
    /,
) -> int: ...
def grouped_allreduce(
    tensors: Sequence[tuple[str, int, _Shape, int, int]],
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    devices: Sequence[_Device] | None = None,
    priority: int = 0,
    /,
) -> list[int]: ...
def broadcast(
    name: str,
    dtype: int,
    shape: _Shape,
    source: int,
    target: int,
    root: int,
    process_set: int,
    attended: bool,
    device: _Device = None,
    /,
) -> int: ...
def allgather(
    name: str,
    dtype: int,
    shape: _Shape,
    source: int,
    process_set: int,
    attended: bool,
    device: _Device = None,
    /,
) -> int: ...
def grouped_allgather(
    tensors: Sequence[tuple[str, int, _Shape, int]],
    process_set: int,
    devices: Sequence[_Device] | None = None,
    /,
) -> list[int]: ...
def alltoall(
    name: str,
    dtype: int,
    shape: _Shape,
    source: int,
    splits: Sequence[int] | None,
    process_set: int,
    attended: bool,
    device: _Device = None,
    /,
) -> int: ...
def reducescatter(
    name: str,
    dtype: int,
    shape: _Shape,
    source: int,
    target: int,
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    attended: bool,
    device: _Device = None,
    /,
) -> int: ...
def grouped_reducescatter(
    tensors: Sequence[tuple[str, int, _Shape, int, int]],
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    devices: Sequence[_Device] | None = None,
    /,
) -> list[int]: ...
def barrier(name: str, process_set: int, /) -> int: ...
def join(allow_gather: bool, /) -> int: ...
def process_sets() -> dict[int, list[int]]: ...
def carried_process_sets() -> list[int] | None: ...
def add_process_set(ranks: Sequence[int], /) -> int: ...
def remove_process_set(id: int, /) -> bool: ...  # noqa: A002 - positional only
def reserve_set_channel() -> int: ...
def add_member_set(ranks: Sequence[int], channel: int, timeout: float, /) -> int: ...
def allocate_shared_memory(bytes: int, /) -> SharedTensorMemory: ...  # noqa: A002 - positional only
def open_device(ordinal: int, packages: Sequence[str], /) -> bool:
    """Takes up a GPU, so that operations may name its memory; false when the configuration says
    not to.
    """

def allocate_registered_memory(
    ordinal: int,
    stream: int,
    bytes: int,  # noqa: A002 - positional only
    /,
) -> RegisteredDeviceMemory | None:
    """Memory that communicators of NCCL register, for work in the order of a stream.

    `None` when none is asked for, or NCCL gives none; `FarandoleInternalError` when there is none
    left.
    """

def is_pending(handle: int, /) -> bool: ...
def poll(handle: int, /) -> bool: ...
def wait(
    handle: int,
    timeout: float | None = None,
    /,
) -> GatheredTensor | PendingDeviceResult | int | None: ...
