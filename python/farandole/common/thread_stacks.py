# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stacks of the threads of this process, for the stall report of another rank that waits for it.

The engine never takes the interpreter's lock, so a thread of the interpreter waits for its request.
It sleeps in `read` and wakes only if this rank is missing in an operation.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

from farandole._native import timeline
from farandole.common.counted_noun import format_counted_noun

_MAX_FRAMES_PER_THREAD = 12
"""Innermost frames shown of each thread."""

_MAX_THREADS = 8
"""Threads shown, the main thread first."""


def start_stack_server() -> None:
    """Starts the thread for the session that has begun. It ends with the session."""
    bell = timeline.stack_request_descriptor()
    threading.Thread(
        target=_serve_stack_requests, args=(bell,), name="farandole-stacks", daemon=True
    ).start()


def _serve_stack_requests(bell: int) -> None:
    try:
        while (asked := os.read(bell, 64)) and 0 not in asked:
            timeline.answer_stack_request(format_thread_stacks())
    finally:
        os.close(bell)


def format_thread_stacks() -> str:
    """Returns the Python stack of every thread but the calling one, innermost frame last."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to see other threads
    threads = [thread for thread in threading.enumerate() if thread.ident != threading.get_ident()]
    threads.sort(key=lambda thread: thread is not threading.main_thread())
    parts: list[str] = []
    for thread in threads[:_MAX_THREADS]:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            stack = traceback.extract_stack(frame)[-_MAX_FRAMES_PER_THREAD:]
            parts.append(f"Thread {thread.name}:\n{''.join(traceback.format_list(stack))}")
    if len(threads) > _MAX_THREADS:
        parts.append(f"and {format_counted_noun(len(threads) - _MAX_THREADS, 'more thread')}\n")
    return "".join(parts)
