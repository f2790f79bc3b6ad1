# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Functions in threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls a function with each of several lists of arguments, several at a time.

    Args:
        fn: The function.
        args_list: Its arguments, a list for every call.
        block_until_all_done: Whether to wait for all calls.
        max_concurrent_executions: The most threads.

    Returns:
        The results by number of the call; `None` without waiting.

    Raises:
        RuntimeError: A call raised; the message names the function, and the first error is the
            cause.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(args_list)):
        waiting.put(number)
    results: dict[int, Any] = {}
    failures: list[Exception] = []

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                try:
                    results[number] = fn(*args_list[number])
                except Exception as error:  # noqa: BLE001 - raised below
                    failures.append(error)

    count = min(max_concurrent_executions, len(args_list))
    threads = [in_thread(work, daemon=not block_until_all_done) for _ in range(count)]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if failures:
        name = getattr(fn, "__name__", repr(fn))
        raise RuntimeError(
            f"Some threads for func {name} did not complete successfully."
        ) from failures[0]
    return results


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls a function in a thread of its own.

    Args:
        target: The function.
        args: Its arguments.
        name: The thread's name.
        daemon: Whether the process may end before the thread.
        silent: Whether errors of the function are dropped.

    Returns:
        The thread, which runs.

    Raises:
        ValueError: `args` is no tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, for a single argument (arg,): {args!r}")

    def quiet(*given: Any) -> None:
        with contextlib.suppress(Exception):
            target(*given)

    thread = threading.Thread(
        target=quiet if silent else target, args=args, name=name, daemon=daemon
    )
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls a function in a thread of its own when an event is set.

    Args:
        event: The event.
        func: The function.
        args: Its arguments.
        stop: Another event: when it is set first, the function is not called, and the thread ends.
        check_stop_interval_s: Seconds between two looks at `stop`.
        daemon: Whether the process may end before the thread; without `stop` it must.
        silent: Whether errors of the function are dropped.

    Returns:
        The thread, which runs.

    Raises:
        ValueError: An argument is missing or of another type.
    """
    if event is None:
        raise ValueError("event must be given")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, for a single argument (arg,): {args!r}")
    if stop is None and not daemon:
        raise ValueError("a thread that is no daemon needs a stop event")

    def wait() -> None:
        if stop is None:
            event.wait()
        else:
            while not stop.is_set() and not event.wait(check_stop_interval_s):
                continue
            if stop.is_set():
                return
        func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)
