# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations in progress, as torch.distributed sees them."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from farandole.common.handles import HandleTable
from farandole.torch.distributed._completion import BackgroundCompleter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


table = HandleTable("distributed")
"""The operations of this backend in progress."""

_abandoned_handles: deque[int] = deque()
"""Operations that were dropped without a wait, in the order of the drops. The next submission
consumes those that are over, or the table would keep their tensors."""
_NO_TIMEOUT = timedelta(0)
_watched: weakref.WeakKeyDictionary[PendingOperation, tuple[str, float]] | None = None
"""Names of operations and their start times; `None` unless requested."""


class OperationTimeoutError(TimeoutError, RuntimeError):
    """An operation of torch.distributed did not complete in time.

    It is a `RuntimeError`, too, because Gloo raises that one.
    """


class PendingOperation:
    """One operation of the engine in progress.

    Args:
        submission: A function of the engine, and its arguments. With `None`, the operation is
            submitted later, by `submit` or `fail_deferred`.
        keep: Owners of the memory that the engine uses.
        finish: Stores the results; called with the outcomes of the members.
    """

    def __init__(
        self, submission: tuple[Any, ...] | None, keep: Any, finish: Callable[[list[Any]], None]
    ) -> None:
        self.done = False
        self._handle: int | None = None
        self._lock = threading.Lock()
        self._deferred: tuple[Any, Any, threading.Event] | None = None
        self.began = time.monotonic()
        """Time of the request, in seconds of the monotonic clock."""
        self.error: Exception | None = None
        if submission is None:
            self._deferred = keep, finish, threading.Event()
        else:
            self._start(submission, keep, finish)

    def __del__(self) -> None:
        """Leaves the handle to the next submission: the engine may still use the tensors."""
        if not self.done and self._handle is not None:
            _abandoned_handles.append(self._handle)

    def _start(self, submission: tuple[Any, ...], keep: Any, finish: Any) -> None:
        if _abandoned_handles:
            _consume_abandoned_handles()
        self._handle = table.submit_operation(keep, finish, *submission)
        if _watched is not None:
            _watched[self] = (_submitted_name(submission), self.began)

    def submit(self, submission: tuple[Any, ...]) -> None:
        """Submits a deferred operation."""
        assert self._deferred is not None  # noqa: S101 - only deferred operations are submitted here
        keep, finish, submitted = self._deferred
        try:
            self._start(submission, keep, finish)
        except Exception as error:  # noqa: BLE001 - raised by the waiter
            self.fail_deferred(error)
        else:
            submitted.set()

    def fail_deferred(self, error: Exception) -> None:
        """Ends a deferred operation that cannot be submitted."""
        assert self._deferred is not None  # noqa: S101 - as above
        self.error = error
        self.done = True
        self._deferred[2].set()

    @property
    def is_over(self) -> bool:
        """Whether the engine has finished, with or without a waiter."""
        try:
            return self.done or (self._handle is not None and table.poll(self._handle))
        except ValueError:  # another thread has waited meanwhile
            return True

    def wait_until_over(self, timeout: float | None = None) -> bool:
        """Waits until the operation is over, also after an error; raises only interrupts.

        Args:
            timeout: Longest wait in seconds; `None` for no limit.

        Returns:
            Whether the operation is over.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if self._deferred is not None and not self._deferred[2].wait(timeout):
            return False
        if not self._lock.acquire(timeout=-1 if end is None else _seconds_until(end)):
            return False
        try:
            if self.done:
                return True
            assert self._handle is not None  # noqa: S101 - submitted above
            try:
                table.synchronize(self._handle, None if end is None else _seconds_until(end))
            except TimeoutError:
                return False
            except Exception as error:  # noqa: BLE001 - kept for all who will ask
                self.error = error
            self.done = True
            return True
        finally:
            self._lock.release()


def _consume_abandoned_handles() -> None:
    """Consumes the operations without a waiter that are over, up to the first one that is not."""
    while _abandoned_handles:
        try:
            handle = _abandoned_handles.popleft()
        except IndexError:  # another thread was faster
            return
        try:
            if not table.poll(handle):
                _abandoned_handles.appendleft(handle)
                return
            table.synchronize(handle)
        except Exception:  # noqa: BLE001, S112 - an error without a waiter, or a previous world
            continue


def _seconds_until(end: float) -> float:
    return max(0.0, end - time.monotonic())


def set_operation_watch(*, on: bool = True) -> None:
    """Starts or stops noting the names of operations.

    Args:
        on: Whether to note them.
    """
    global _watched  # noqa: PLW0603 - one for the process, as the table
    _watched = weakref.WeakKeyDictionary() if on else None


def watched_operations() -> list[dict[str, Any]]:
    """Returns the operations that were started since `set_operation_watch` and are not over: names
    and ages in seconds.
    """
    now = time.monotonic()
    found = [
        (began, name) for work, (name, began) in list((_watched or {}).items()) if not work.is_over
    ]
    return [{"name": name, "seconds": now - began} for began, name in sorted(found)]


def _submitted_name(submission: tuple[Any, ...]) -> str:
    """Returns the name of the operation; of a group, the name of its first member."""
    named = submission[1]
    return named if isinstance(named, str) else str(named[0][0])


def make_future(
    pending: PendingOperation,
    outputs: list[torch.Tensor],
    completer: BackgroundCompleter,
    timeout: timedelta,
) -> Any:
    """Returns a future of the tensors an operation writes; C++ waits for it too, so a failure must
    be an error there.

    If Python sets an exception on a future, C++ takes it for a plain value. An exception that a
    callback raises is an error in both, though a `RuntimeError` with the text of the original.
    """
    over: torch.futures.Future[None] = torch.futures.Future()

    def return_outputs(_: Any) -> list[torch.Tensor]:
        if not pending.done:
            raise OperationTimeoutError(timeout_message(timeout))
        if pending.error is not None:
            raise pending.error
        return outputs

    future = over.then(return_outputs)
    if pending.done:
        over.set_result(None)
    else:
        end = pending.began + timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        completer.call_when_complete(pending, lambda: over.set_result(None), end)
    return future


def timeout_message(timeout: timedelta) -> str:
    """Returns the text of an error about an operation that is late."""
    return (
        f"the operation did not complete within {timeout.total_seconds():.3f} s. It stays in "
        "progress: the other ranks of the group have not started it, or are lost"
    )


works_held_for_cpp: dict[Work, None] = {}
"""Works that C++ of torch 2.6 may hold without their Python objects, the oldest first: each is here
until its first wait or request for a future, or until `MIN_HOLD_SECONDS`."""
MIN_HOLD_SECONDS = 30.0
"""Age at which a work without a Python owner loses its tensors. C++ requests a future, which has
the tensors, within microseconds; it may wait at any time, which needs no tensors."""
_LOOKS_PER_OPERATION = 2
_works_without_tensors: set[Work] = set()
_held_works_lock = threading.Lock()


def hold_work_for_cpp(work: Work) -> None:
    """Keeps the Python object of a work, whose `wait` C++ of torch 2.6 may call without a reference
    to it. Releases the tensors of older works that Python has dropped.

    Args:
        work: The work.
    """
    with _held_works_lock:
        works_held_for_cpp[work] = None
        for _ in range(_LOOKS_PER_OPERATION):
            _release_tensors_of_oldest_work()


def _release_tensors_of_oldest_work() -> None:
    """Looks at the work that is held longest. The caller holds the lock."""
    work = next(iter(works_held_for_cpp), None)
    if work is None:
        return
    if not isinstance(work, FarandoleWork | CombinedWork):
        del works_held_for_cpp[work]
        _works_without_tensors.add(work)
        return
    if time.monotonic() - work.began < MIN_HOLD_SECONDS:
        return
    del works_held_for_cpp[work]
    # The other references are of this function and of `getrefcount`.
    if sys.getrefcount(work) > 2 or not work.is_completed():  # noqa: PLR2004
        works_held_for_cpp[work] = None  # behind the others
        return
    work.release_tensors()
    _works_without_tensors.add(work)


def release_work_of_cpp(work: Work) -> None:
    """Drops the reference that `hold_work_for_cpp` has to a work.

    Args:
        work: The work.
    """
    if works_held_for_cpp or _works_without_tensors:
        with _held_works_lock:
            works_held_for_cpp.pop(work, None)
            _works_without_tensors.discard(work)


class FarandoleWork(Work):
    """The result of a collective.

    Args:
        pending: The operation.
        outputs: The tensors it writes, which a future holds.
        completer: Completes it for callers that ask for a future. `None` if the operation may last
            long, and the futures of others must not wait for it.
        timeout: Limit of a wait without a limit; zero for none.
        number: Number of the operation in its group.
    """

    def __init__(
        self,
        pending: PendingOperation,
        outputs: list[torch.Tensor],
        completer: BackgroundCompleter | None,
        timeout: timedelta = _NO_TIMEOUT,
        number: int = 0,
    ) -> None:
        super().__init__()
        self._pending = pending
        self._outputs = outputs
        self._completer = completer
        self._limit = timeout
        self._number = number

    @property
    def began(self) -> float:
        """Time of the request, in seconds of the monotonic clock."""
        return self._pending.began

    def release_tensors(self) -> None:
        """Forgets the results of an operation that is over."""
        self._outputs = []

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the operation is over.

        Args:
            timeout: Longest wait; by default, the timeout of the group.

        Raises:
            FarandoleInternalError: When a peer failed or the session was shut down.
            ValueError: When ranks disagree about the operation.
            OperationTimeoutError: When it took longer than the timeout; it stays in progress.
        """
        release_work_of_cpp(self)
        limit = timeout if timeout > _NO_TIMEOUT else self._limit
        seconds = limit.total_seconds() if limit > _NO_TIMEOUT else None
        if not self._pending.wait_until_over(seconds):
            raise OperationTimeoutError(self._describe_timeout(limit))
        if self._pending.error is not None:
            raise self._pending.error
        return True

    def _describe_timeout(self, limit: timedelta) -> str:
        return timeout_message(limit)

    def is_completed(self) -> bool:
        """Returns whether the operation is over, and its results are stored."""
        return self._pending.is_over and self._pending.wait_until_over()

    def is_success(self) -> bool:
        """Returns whether the operation is over without an error."""
        return self.is_completed() and self._pending.error is None

    def exception(self) -> Exception | None:
        """Returns the error of an operation that is over, or `None`."""
        return self._pending.error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the operation has written.

        Raises:
            RuntimeError: When the operation is not over.
        """
        if not self.is_completed():
            raise RuntimeError("the operation is not completed: call wait() before result()")
        return self._outputs

    def synchronize(self) -> None:
        """Waits like `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits like `wait`: results on a GPU are complete when the wait ends."""
        self.wait()

    def source_rank(self) -> int:
        """Raises an error: only a receive from any rank has a source.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("source_rank() needs the work of a recv() without a source")

    def _source_rank(self) -> int:
        return self.source_rank()

    def _get_sequence_number(self) -> int:
        return self._number

    @property
    def timeout(self) -> timedelta:
        """Limit of a wait without a limit."""
        return self._limit

    def get_future(self) -> Any:
        """Returns a future of the tensors the operation writes."""
        release_work_of_cpp(self)
        completer = self._completer or BackgroundCompleter()
        return make_future(self._pending, self._outputs, completer, self._limit)


class CombinedWork(Work):
    """Several works as one.

    Args:
        works: The works.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works
        self.began = time.monotonic()
        """Time of the request, in seconds of the monotonic clock."""

    def release_tensors(self) -> None:
        """Forgets the results of operations that are over."""
        self._works = [work for work in self._works if work.exception() is not None]

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits for all works.

        Raises:
            Exception: The first error of a work, after all have ended.
        """
        release_work_of_cpp(self)
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        """Returns whether all works are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Returns whether all works are over without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """Returns the first error, or `None`."""
        found = (work.exception() for work in self._works)
        return next((error for error in found if error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the works have written."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Waits like `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Returns a future of the tensors of all works."""
        release_work_of_cpp(self)
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda every: [tensor for one in every.value() for tensor in one.value()]
        )


class CompletedWork(Work):
    """Work that is over."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Returns at once."""
        del timeout
        release_work_of_cpp(self)
        return True

    def get_future(self) -> Any:
        """Returns a future that is done."""
        release_work_of_cpp(self)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future
