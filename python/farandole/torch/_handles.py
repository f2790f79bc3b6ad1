# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Handles of operations under way, and tensors as the engine sees them: an address, a dtype, a shape.

The engine writes to addresses without the GIL, so whatever they belong to is kept in the table here until the engine
is done with it, also when the caller drops everything or Ctrl-C ends a wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from farandole._native import engine
from farandole.common import basics

DTYPES: dict[torch.dtype, int] = {
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
}
"""The engine's number of every dtype it knows."""

Finish = Callable[[engine.Gathered | None], Any]
"""Turns what the engine has finished into what the caller gets."""

_pending: dict[int, tuple[Any, Finish]] = {}
_groups: dict[int, list[int]] = {}  # members not yet waited for, by the first one's handle
_numbers = itertools.count()


def _reset() -> None:
    global _numbers  # noqa: PLW0603 - as the world, there is one per process
    _pending.clear()
    _groups.clear()
    _numbers = itertools.count()


basics.on_init(_reset)


def operation_name(operation: str, name: str | None) -> str:
    """The name ranks agree on: the user's, or a number that counts the unnamed operations of this process.

    Ranks issue unnamed operations in the same order, so the numbers agree. Call this after all checks: a refused
    operation must not use up a number.
    """
    return f"{operation}.{name}" if name is not None else f"{operation}.noname.{next(_numbers)}"


def host_input(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as contiguous host memory: itself if it is that already, else a copy.

    Raises:
        ValueError: When the engine has no dtype for it, or it is sparse.
    """
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype is not supported: {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor must be dense: {tensor.layout}")
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.detach().cpu().contiguous().resolve_neg() if needs_copy(tensor) else tensor


def needs_copy(tensor: torch.Tensor) -> bool:
    """Whether the engine cannot work on the tensor's own memory."""
    return not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg() or tensor.is_conj()


def require_in_place(tensor: torch.Tensor) -> None:
    """Refuses what an in-place operation cannot write to.

    Raises:
        ValueError: When the tensor is not contiguous.
    """
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"in-place operations need a contiguous tensor: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )


def copy_back(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Moves a result from host memory to where it belongs, past autograd; returns `target`."""
    target.detach().copy_(source)
    return target


def track(handle: int, keep: Any, finish: Finish) -> int:
    """Keeps `keep` alive until `handle` is consumed; `finish` makes its result."""
    _pending[handle] = (keep, finish)
    return handle


def track_group(handles: list[int], keep: Any, finish: Finish) -> int:
    """As `track` for operations that are waited for together; `finish` gets `None`."""
    _groups[handles[0]] = handles
    return track(handles[0], keep, finish)


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once.

    Raises:
        ValueError: When the handle was consumed already, or never given out.
    """
    _entry(handle)
    return all(engine.poll(member) for member in _groups.get(handle, (handle,)))


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result.

    The handle is consumed, whether the operation succeeded or failed. Horovod returns `None` for a handle that was
    consumed before; here that is an error, since it is always a mistake. Ctrl-C interrupts the wait and leaves the
    handle valid.

    Args:
        handle: What an `*_async` function returned.

    Returns:
        The tensor, or the list of tensors of a grouped operation.

    Raises:
        ValueError: When the handle was consumed already, or never given out; or when ranks disagree about the
            operation.
        FarandoleInternalError: When a peer failed or the session was shut down.
    """
    _, finish = _entry(handle)
    group = _groups.get(handle)
    try:
        gathered = engine.wait(handle) if group is None else _wait_for_all(group)
    except BaseException:
        # A failed operation is over; an interrupted wait is not, and its memory is still being written.
        if not any(map(engine.is_pending, group or (handle,))):
            _forget(handle)
        raise
    _forget(handle)
    return finish(gathered)


def _entry(handle: int) -> tuple[Any, Finish]:
    entry = _pending.get(handle)
    if entry is None:
        raise ValueError(f"no operation has this handle; each can be synchronized once: {handle!r}")
    return entry


def _forget(handle: int) -> None:
    _pending.pop(handle, None)
    _groups.pop(handle, None)


def _wait_for_all(group: list[int]) -> None:
    """Waits for every member, then raises the first failure; members that are done leave the list."""
    failure: Exception | None = None
    while group:
        try:
            engine.wait(group[0])
        except Exception as error:
            if engine.is_pending(group[0]):
                raise
            failure = failure or error
        del group[0]
    if failure is not None:
        raise failure
