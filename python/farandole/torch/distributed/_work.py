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
"""The operations of this backend in progress."""

_NO_TIMEOUT = timedelta(0)
_watched: weakref.WeakKeyDictionary[PendingOperation, tuple[str, float]] | None = None
"""Names of operations and their start times; `None` unless requested."""


class PendingOperation:
    """One operation of the engine in progress.

    Args:
        submission: A function of the engine, and its arguments.
        keep: Owners of the memory that the engine uses.
        finish: Stores the results; called with the outcomes of the members.
    """

    def __init__(
        self, submission: tuple[Any, ...], keep: Any, finish: Callable[[list[Any]], None]
    ) -> None:
        self._handle = table.submit_operation(keep, finish, *submission)
        self._lock = threading.Lock()
        self.done = False
        self.error: Exception | None = None
        if _watched is not None:
            _watched[self] = (_operation_name(submission), time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished, with or without a waiter."""
        try:
            return self.done or table.poll(self._handle)
        except ValueError:  # another thread has waited meanwhile
            return True

    def wait_until_over(self) -> None:
        """Waits until the operation is over, also after an error; raises only interrupts."""
        with self._lock:
            if self.done:
                return
            try:
                table.synchronize(self._handle)
            except Exception as error:  # noqa: BLE001 - kept for all who will ask
                self.error = error
            self.done = True


def watch_operations(*, on: bool = True) -> None:
    """Starts or stops noting the names of operations.

    Args:
        on: Whether to note them.
    """
    global _watched  # noqa: PLW0603 - one for the process, as the table
    _watched = weakref.WeakKeyDictionary() if on else None


def watched_operations() -> list[dict[str, Any]]:
    """Returns the operations that were started since `watch_operations` and are not over: names and
    ages in seconds.
    """
    now = time.monotonic()
    found = [
        (began, name) for work, (name, began) in list((_watched or {}).items()) if not work.is_over
    ]
    return [{"name": name, "seconds": now - began} for began, name in sorted(found)]


def _operation_name(submission: tuple[Any, ...]) -> str:
    """Returns the name of the operation; of a group, the name of its first member."""
    named = submission[1]
    return named if isinstance(named, str) else str(named[0][0])


class BackgroundCompleter:
    """Completes operations of one group in the background, for the holders of futures.

    One per group: members of a group start its operations in one order, so waiting in this order
    blocks no operation.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PendingOperation, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add_operation(self, pending: PendingOperation, then: Callable[[], None]) -> None:
        """Calls `then` when `pending` is over."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._complete_operations, name="farandole-futures", daemon=True
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

    def _complete_operations(self) -> None:
        while (entry := self._queue.get()) is not None:
            pending, then = entry
            pending.wait_until_over()
            then()
            del entry, pending, then  # an idle thread keeps no tensors


def make_future(
    pending: PendingOperation, outputs: list[torch.Tensor], completer: BackgroundCompleter
) -> Any:
    """Returns a future of the tensors an operation writes; C++ waits for it too, so a failure must
    be an error there.

    If Python sets an exception on a future, C++ takes it for a plain value. An exception that a
    callback raises is an error in both, though a `RuntimeError` with the text of the original.
    """
    over: torch.futures.Future[None] = torch.futures.Future()

    def return_outputs(_: Any) -> list[torch.Tensor]:
        if pending.error is not None:
            raise pending.error
        return outputs

    future = over.then(return_outputs)
    if pending.done:
        over.set_result(None)
    else:
        completer.add_operation(pending, lambda: over.set_result(None))
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

    def __init__(
        self, pending: PendingOperation, outputs: list[torch.Tensor], completer: BackgroundCompleter
    ) -> None:
        super().__init__()
        self._pending = pending
        self._outputs = outputs
        self._completer = completer

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the operation is over.

        Raises:
            FarandoleInternalError: When a peer failed or the session was shut down.
            ValueError: When ranks disagree about the operation.
            TimeoutError: When it took longer than `timeout`; it stays in progress.
        """
        if timeout > _NO_TIMEOUT:
            over = threading.Event()
            self._completer.add_operation(self._pending, over.set)
            if not over.wait(timeout.total_seconds()):
                raise TimeoutError(
                    f"operation did not complete within {timeout.total_seconds():.3f} s"
                )
        else:
            self._pending.wait_until_over()
        if self._pending.error is not None:
            raise self._pending.error
        return True

    def get_future(self) -> Any:
        """Returns a future of the tensors the operation writes."""
        return make_future(self._pending, self._outputs, self._completer)


class CompletedWork(Work):
    """Work that is over."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Returns at once."""
        del timeout
        return True

    def get_future(self) -> Any:
        """Returns a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future
