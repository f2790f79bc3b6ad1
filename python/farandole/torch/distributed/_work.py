# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations in progress, as torch.distributed sees them."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from farandole.common.handles import HandleTable

if TYPE_CHECKING:
    from collections.abc import Callable

table = HandleTable("distributed")
"""The operations of this backend under way."""

_NO_LIMIT = timedelta(0)
_watched: weakref.WeakKeyDictionary[Pending, tuple[str, float]] | None = None
"""Names of operations and their start times; `None` unless requested."""


class Pending:
    """One operation of the engine, until it was awaited.

    Args:
        submission: A function of the engine, and its arguments.
        keep: Whatever owns the memory the engine works on.
        finish: Puts results where they belong; gets the outcomes of the members.
    """

    def __init__(
        self, submission: tuple[Any, ...], keep: Any, finish: Callable[[list[Any]], None]
    ) -> None:
        self._handle = table.submit(keep, finish, *submission)
        self._lock = threading.Lock()
        self.done = False
        self.error: Exception | None = None
        if _watched is not None:
            _watched[self] = (_name(submission), time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished, with or without a waiter."""
        try:
            return self.done or table.poll(self._handle)
        except ValueError:  # somebody has waited meanwhile
            return True

    def complete(self) -> None:
        """Waits until the operation is over, well or not; only interrupts are raised."""
        with self._lock:
            if self.done:
                return
            try:
                table.synchronize(self._handle)
            except Exception as error:  # noqa: BLE001 - kept for all who will ask
                self.error = error
            self.done = True


def watch(*, on: bool = True) -> None:
    """Begins to note the names of operations, or ends it.

    Args:
        on: Whether to note them.
    """
    global _watched  # noqa: PLW0603 - one for the process, as the table
    _watched = weakref.WeakKeyDictionary() if on else None


def under_way() -> list[dict[str, Any]]:
    """Operations that were started since `watch` and are not over: the name of each, and for how
    many seconds.
    """
    now = time.monotonic()
    found = [
        (began, name) for one, (name, began) in list((_watched or {}).items()) if not one.is_over
    ]
    return [{"name": name, "seconds": now - began} for began, name in sorted(found)]


def _name(submission: tuple[Any, ...]) -> str:
    """Returns the operation's name; that of its first member if it is a group."""
    named = submission[1]
    return named if isinstance(named, str) else str(named[0][0])


class Completer:
    """Completes operations of one group in the background, for the holders of futures.

    One per group: members of a group start its operations in one order, so waiting in this order
    blocks no operation.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Pending, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, pending: Pending, then: Callable[[], None]) -> None:
        """Calls `then` when `pending` is over."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="farandole-futures", daemon=True
                )
                self._thread.start()
            self._queue.put((pending, then))

    def close(self) -> None:
        """Ends the thread after all given operations."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            pending, then = entry
            pending.complete()
            then()
            del entry, pending, then  # an idle thread keeps no tensors


def promise(pending: Pending, outputs: list[torch.Tensor], completer: Completer) -> Any:
    """Returns a future of the tensors an operation writes; C++ waits for it too, so a failure must
    be an error there.

    Setting an exception from Python would be a plain value to C++. What a callback raises is an
    error to both, though a `RuntimeError` with the text of the original.
    """
    over: torch.futures.Future[None] = torch.futures.Future()

    def settle(_: Any) -> list[torch.Tensor]:
        if pending.error is not None:
            raise pending.error
        return outputs

    future = over.then(settle)
    if pending.done:
        over.set_result(None)
    else:
        completer.add(pending, lambda: over.set_result(None))
    return future


class FarandoleWork(Work):
    """The result of a collective.

    torch forwards only `wait` and `get_future` to works made in Python. Its `is_completed` always
    returns `False`, so a program that polls must call `get_future().done()`.

    Args:
        pending: The operation.
        outputs: The tensors it writes, which a future holds.
        completer: Completes it for callers that ask for a future.
    """

    def __init__(self, pending: Pending, outputs: list[torch.Tensor], completer: Completer) -> None:
        super().__init__()
        self._pending = pending
        self._outputs = outputs
        self._completer = completer

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits until the operation is over.

        Raises:
            FarandoleInternalError: When a peer failed or the session was shut down.
            ValueError: When ranks disagree about the operation.
            TimeoutError: When it took longer than `timeout`; it stays in progress.
        """
        if timeout > _NO_LIMIT:
            over = threading.Event()
            self._completer.add(self._pending, over.set)
            if not over.wait(timeout.total_seconds()):
                raise TimeoutError(
                    f"operation did not complete within {timeout.total_seconds():.3f} s"
                )
        else:
            self._pending.complete()
        if self._pending.error is not None:
            raise self._pending.error
        return True

    def get_future(self) -> Any:
        """Returns a future of the tensors the operation writes."""
        return promise(self._pending, self._outputs, self._completer)


class Done(Work):
    """Work that is over."""

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Returns at once."""
        del timeout
        return True

    def get_future(self) -> Any:
        """Returns a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future
