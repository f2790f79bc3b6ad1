# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tensors as the engine sees them (an address, a dtype and a shape), and the handles of
operations in progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from farandole.common.exceptions import FarandoleUsageError
from farandole.common.handles import Finish, HandleTable, Outcome
from farandole.torch import _gpu_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farandole._native import engine


ENGINE_DTYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.uint16: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 9,
    torch.bfloat16: 10,
    torch.uint32: 11,
    torch.uint64: 12,
    torch.complex64: 13,
    torch.complex128: 14,
    torch.float8_e4m3fn: 15,
    torch.float8_e5m2: 16,
}
"""The engine's number of every dtype it knows."""
_BYTE_COPIED_DTYPES = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")  # the last: 2.7
MOVABLE_DTYPES = ENGINE_DTYPES | {
    getattr(torch, name): ENGINE_DTYPES[torch.uint8]
    for name in _BYTE_COPIED_DTYPES
    if hasattr(torch, name)
}
"""`ENGINE_DTYPES`, and dtypes that are only moved, as bytes: the engine cannot add them."""


class _TorchHandleTable(HandleTable):
    """Operations on tensors in progress. The current stream of the GPU waits for results that the
    GPU is still computing.
    """

    def __init__(self, family: str) -> None:
        self._locations: dict[int, tuple[int, int] | list[_gpu_tensors.DeviceLocation]] = {}
        super().__init__(family)

    def _reset_for_world(self) -> None:
        super()._reset_for_world()
        self._locations.clear()

    def submit_operation(
        self, keep: Any, finish: Finish, call: Callable[..., int | list[int]], *arguments: Any
    ) -> int:
        """Like `HandleTable.submit_operation`; the last argument of an operation on tensors has
        their locations.
        """
        handle = super().submit_operation(keep, finish, call, *arguments)
        if arguments and isinstance(arguments[-1], (tuple, list)):
            self._locations[handle] = arguments[-1]
        return handle

    def synchronize(self, handle: int, timeout: float | None = None) -> Any:
        """Like `HandleTable.synchronize`, from any stream."""
        spots = self._locations.get(handle)
        if spots is None:
            return super().synchronize(handle, timeout)
        _gpu_tensors.keep_memory_for_streams(self._entries[handle][1], spots)
        try:
            return super().synchronize(handle, timeout)
        finally:
            if handle not in self._entries:
                self._locations.pop(handle, None)

    def wait_for_gpu_result(self, reached: engine.PendingDeviceResult) -> Outcome:
        """Lets the current stream wait for a result, and not the host.

        Args:
            reached: The result that the engine returned.
        """
        reached.make_gpu_stream_wait(_gpu_tensors.current_stream_handle(reached.ordinal))
        return reached.outcome


table = _TorchHandleTable("noname")
"""The operations on tensors that are in progress."""

TensorDescription: TypeAlias = tuple[str, int, tuple[int, ...], int]
"""An operation's name, and its input's dtype, shape and address."""


def describe_tensor(name: str, source: torch.Tensor) -> TensorDescription:
    """Describes an operation's input for the engine; it must be contiguous and usable in place."""
    return name, MOVABLE_DTYPES[source.dtype], source.shape, source.data_ptr()


def to_engine_tensor(
    tensor: torch.Tensor, dtypes: Mapping[torch.dtype, int] = ENGINE_DTYPES
) -> torch.Tensor:
    """Returns `tensor` as contiguous memory that the engine can use: the tensor itself if it is
    contiguous, else a copy.

    A tensor on a GPU that the engine can use stays there.

    Args:
        tensor: Any tensor.
        dtypes: Permitted dtypes: `MOVABLE_DTYPES` for an operation that reduces nothing.

    Raises:
        ValueError: When the engine does not support the dtype, or the tensor is sparse.
    """
    if tensor.dtype not in dtypes:
        also = (
            "; it can be broadcast, gathered and exchanged"
            if tensor.dtype in MOVABLE_DTYPES
            else ""
        )
        raise ValueError(f"dtype is not supported: {tensor.dtype}{also}")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor must be dense: {tensor.layout}")
    if not needs_engine_copy(tensor):
        return tensor
    plain = tensor.detach().resolve_conj()
    return (
        (plain if _gpu_tensors.is_usable_in_place(plain) else plain.cpu())
        .contiguous()
        .resolve_neg()
    )


def needs_engine_copy(tensor: torch.Tensor) -> bool:
    """Returns whether the engine cannot work on the tensor's own memory."""
    usable_there = tensor.is_cpu or _gpu_tensors.is_usable_in_place(tensor)
    return not usable_there or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj()


def require_contiguous_tensor(tensor: torch.Tensor) -> None:
    """Refuses tensors that an in-place operation cannot write to.

    Raises:
        ValueError: When the tensor is not contiguous.
    """
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"in-place operations need a contiguous tensor: shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}"
        )


def require_dimension(operation: str, tensor: torch.Tensor) -> None:
    """Refuses scalars where rows are cut or joined.

    Raises:
        FarandoleUsageError: When the tensor has no dimension.
    """
    if tensor.dim() == 0:
        raise FarandoleUsageError(f"{operation} needs a tensor of at least one dimension: shape ()")


def copy_without_autograd(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copies a result to `target`, without autograd; returns `target`."""
    if source is not target:
        target.detach().copy_(source)
    return target


def wrap_collected_rows(
    gathered: engine.GatheredTensor | int | None, like: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Returns the rows an operation has collected, as a tensor that holds the engine's memory: no
    copy.

    Tensors on a GPU are copied by the current stream.

    Args:
        gathered: The rows that the engine returned.
        like: The operation's input: dtype and dimensions but the first.
        device: Device of the result.
    """
    if gathered is None or isinstance(gathered, int):
        return torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=device)
    shape = (sum(gathered.rows), *like.shape[1:])
    if len(gathered) == 0:
        return torch.empty(shape, dtype=like.dtype, device=device)
    if (ordinal := gathered.ordinal) is not None:
        result = torch.empty(shape, dtype=like.dtype, device=device)
        gathered.queue_copy_and_free(result.data_ptr(), _gpu_tensors.current_stream_handle(ordinal))
        return result
    return torch.frombuffer(gathered, dtype=like.dtype).view(shape).to(device)


def must_record_gradient(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd must record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def poll(handle: int) -> bool:
    """Returns whether `synchronize(handle)` would return at once.

    Raises:
        ValueError: When the handle was consumed already, or never given out.
    """
    return table.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result.

    The handle is consumed, whether the operation succeeded or failed. Horovod returns `None` for a
    handle that was consumed before; here that is an error, since it is always a mistake. Ctrl-C
    interrupts the wait and leaves the handle valid.

    Args:
        handle: The handle that an `*_async` function returned.

    Returns:
        The tensor, the list of tensors of a grouped operation, or the pair `(tensor,
        received_splits)` of an alltoall.

    Raises:
        ValueError: When the handle was consumed already, or never given out; or when ranks disagree
            about the operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    return table.synchronize(handle)
