# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Copies of states: made at once, or in another thread while the next forward and backward pass
run.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from farandole._native import engine


def _copy_past_caches(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair to the first, in this thread, past the caches: the copy
    is not read soon.
    """
    engine.copy_memory(
        [(room.data_ptr(), source.data_ptr(), source.nbytes) for room, source in pairs]
    )


def _are_contiguous_on_host(value: torch.Tensor, room: torch.Tensor) -> bool:
    """Returns whether the elements of both are the same bytes in the same order, in the memory
    of this process.
    """
    return value.device.type == "cpu" and value.is_contiguous() and room.is_contiguous()


class ImmediateCopyBatch:
    """Copies of tensors that are made together."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def accept_tensor(self, value: torch.Tensor, room: torch.Tensor) -> bool:
        """Returns whether `copy_accepted` copies a tensor. If torch uses several threads, torch's
        copy is faster.

        Args:
            value: The tensor.
            room: Memory for the copy.
        """
        if torch.get_num_threads() > 1 or not _are_contiguous_on_host(value, room):
            return False
        self._pairs.append((room, value.detach()))
        return True

    def copy_accepted(self) -> None:
        """Copies all accepted tensors."""
        pairs, self._pairs = self._pairs, []
        _copy_past_caches(pairs)


class BackgroundCopyBatch:
    """Copies of tensors that another thread makes, while only an optimizer's step may change the
    tensors.

    Attributes:
        completion: Future of the last copies: done when they are complete, failed otherwise.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copy_in_progress: Future[None] | None = None
        self._sources: list[tuple[torch.Tensor, int]] = []
        self._addresses: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "farandole-commit")
        self.completion: Future[None] = Future()
        self.completion.set_result(None)

    def follow_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Copies parameters and states of these optimizers. Each optimizer waits for the copies
        before its step.

        Args:
            optimizers: The optimizers; they replace the ones of the last call.
        """
        known = [id(optimizer) for optimizer in self._optimizers]
        for optimizer in optimizers:
            if id(optimizer) not in known:
                optimizer.register_step_pre_hook(self._wait_before_step)
        self._optimizers = optimizers

    def find_optimizer_tensors(self) -> None:
        """Finds the tensors that only the optimizers change; no copies are in progress."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        states = [
            entry
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for entry in state.values()
        ]
        tensors = [tensor for tensor in (*parameters, *states) if isinstance(tensor, torch.Tensor)]
        self._addresses = {
            tensor.data_ptr()
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.numel() > 0
        }
        self._pairs = []

    def accept_tensor(self, value: torch.Tensor, room: torch.Tensor) -> bool:
        """Accepts a tensor for copying in the background, if only optimizers change it; returns
        whether it was accepted.

        Args:
            value: The tensor.
            room: Memory for the copy.
        """
        if value.data_ptr() not in self._addresses or not _are_contiguous_on_host(value, room):
            return False
        self._pairs.append((room, value.detach()))
        return True

    def start_copying(self) -> None:
        """Starts to copy the accepted tensors in the other thread."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return
        self.completion = Future()
        self._sources = [(source, source._version) for _, source in pairs]  # noqa: SLF001 - torch has no other name for it
        # torch's copy would start more threads.
        self._copy_in_progress = self._thread.submit(_copy_past_caches, pairs)

    def wait_for_copies(self) -> None:
        """Waits for the copies.

        Raises:
            RuntimeError: Something other than an optimizer's step has changed a tensor while it was
                copied.
        """
        running_copy, self._copy_in_progress = self._copy_in_progress, None
        if running_copy is None:
            return
        try:
            running_copy.result()
            self._require_unchanged_sources()
        except BaseException as error:
            self.completion.set_exception(error)
            raise
        self.completion.set_result(None)

    def _require_unchanged_sources(self) -> None:
        sources, self._sources = self._sources, []
        if any(source._version != version for source, version in sources):  # noqa: SLF001 - as above
            raise RuntimeError(
                "something other than optimizer.step() changed parameters while a commit copied "
                "them: create the state without in_background=True"
            )

    def _wait_before_step(self, *_: Any) -> None:
        self.wait_for_copies()


def copy_state(value: Any, room: Any, later: BackgroundCopyBatch | None = None) -> Any:
    """Returns a copy of nested mappings, lists and tuples of tensors and other values.

    Args:
        value: The state to copy.
        room: An earlier copy, whose tensors are overwritten if they fit: new memory costs more
            than the copying.
        later: Takes tensors that may be copied later.
    """
    now = ImmediateCopyBatch()
    taken = _copy_nested(value, room, (now,) if later is None else (later, now))
    now.copy_accepted()
    return taken


def _copy_nested(
    value: Any, room: Any, takers: tuple[ImmediateCopyBatch | BackgroundCopyBatch, ...]
) -> Any:
    if isinstance(value, torch.Tensor):
        if (
            isinstance(room, torch.Tensor)
            and (room.shape, room.dtype, room.device) == (value.shape, value.dtype, value.device)
            and room.layout == value.layout == torch.strided
        ):
            is_taken = any(taker.accept_tensor(value, room) for taker in takers)
            return room if is_taken else room.copy_(value.detach())
        return value.detach().clone()
    if isinstance(value, dict):
        rooms = room if isinstance(room, dict) else {}
        taken = copy.copy(value)  # keeps the class, and the entries of a module that are no tensors
        for key, entry in value.items():
            taken[key] = _copy_nested(entry, rooms.get(key), takers)
        return taken
    if type(value) in (list, tuple):
        rooms = (
            room
            if isinstance(room, list | tuple) and len(room) == len(value)
            else [None] * len(value)
        )
        return type(value)(
            _copy_nested(entry, room, takers) for entry, room in zip(value, rooms, strict=True)
        )
    return copy.deepcopy(value)
