# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The engine's events as records of Python's `logging`, below the logger `farandole`.

The engine never takes the interpreter's lock: its events wait in a bounded queue. A thread of the
interpreter sleeps until there are events, and passes them to `logging`. It starts with `init`, with
a job that this process starts, or with the first use of a store over a network, and ends when the
interpreter exits. A forked child has no such
thread until it calls `init`. Until then, its events go to stderr.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from farandole._native import logging as native

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOT_LOGGER = logging.getLogger("farandole")

_TRACE_LEVEL = 5
"""Number of the level below `DEBUG`, which has no name in Python."""

_LOCAL_SCHEMES = ("file", "dbfs", "memory")

_QUEUE_WAIT_SECONDS = 3600
"""Seconds between two polls of an empty queue: every event wakes the thread at once."""

_EXIT_FLUSH_SECONDS = 5.0
"""Seconds that handlers have at exit for the remaining events."""


class _StderrFallbackHandler(logging.Handler):
    """Shows lines on stderr where the program has set up no handler, now or later.

    Python's `logging.lastResort` shows only warnings, without the name of the logger.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_only_handler(record.name):
            try:
                if sys.stderr is not None:
                    sys.stderr.write(self.format(record) + "\n")
                    sys.stderr.flush()
            except Exception:  # noqa: BLE001 - as every handler does
                self.handleError(record)

    def _is_only_handler(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


_fallback = _StderrFallbackHandler()


def start_logging() -> None:
    """Logs the engine's events from now on, from the configured level.

    That is `FARANDOLE_LOG_LEVEL`, else the level of the logger `farandole`, else `WARNING`. Does
    nothing where no event can have that level.

    Raises:
        ValueError: When a variable of the environment cannot be read.
    """
    level, is_given, hide_time = native.log_settings()
    if not is_given and _ROOT_LOGGER.level != logging.NOTSET:
        level = min(_ROOT_LOGGER.level, logging.CRITICAL)
    elif is_given and _ROOT_LOGGER.level == logging.NOTSET:
        _ROOT_LOGGER.setLevel(level)
    if level == _TRACE_LEVEL and logging.getLevelName(_TRACE_LEVEL) == f"Level {_TRACE_LEVEL}":
        logging.addLevelName(_TRACE_LEVEL, "TRACE")
    if level >= logging.CRITICAL or not native.start_log_capture(level, hide_time):
        return
    time = "" if hide_time else "%(asctime)s.%(msecs)03d "
    _fallback.setFormatter(
        logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    _ROOT_LOGGER.addHandler(_fallback)
    thread = threading.Thread(target=_forward_events, name="farandole-log", daemon=True)
    thread.start()
    atexit.register(_flush_at_exit, thread, os.getpid())


def start_logging_for_urls(urls: Iterable[str]) -> None:
    """Logs the engine's events from now on if a URL is accessed over a network: a busy service is
    logged before its error, which may come minutes later.

    Args:
        urls: URLs of stores or files.

    Raises:
        ValueError: When a variable of the environment cannot be read.
    """
    schemes = (url.partition(":/")[0].lower() for url in urls if ":/" in url)
    if any(scheme not in _LOCAL_SCHEMES for scheme in schemes):
        start_logging()


def _flush_at_exit(thread: threading.Thread, process: int) -> None:
    """Gives the last events to `logging`, in the process that `thread` is of."""
    if process == os.getpid():
        native.end_log_capture()
        thread.join(_EXIT_FLUSH_SECONDS)


def _forward_events() -> None:
    while (taken := native.take_log_records(_QUEUE_WAIT_SECONDS)) is not None:
        records, dropped = taken
        if dropped:
            _ROOT_LOGGER.warning(
                "%d events of the engine were lost: handlers could not keep up", dropped
            )
        for record in records:
            try:
                _log_event(record)
            except Exception:  # noqa: BLE001 - a filter that raises costs its line, not the lines after it
                traceback.print_exc()


def _log_event(event: native.EngineLogRecord) -> None:
    logger = logging.getLogger(event.logger)
    if not logger.isEnabledFor(event.level):
        return
    record = logging.LogRecord(
        event.logger, event.level, event.file, event.line, event.text, None, None
    )
    record.created = event.time
    record.msecs = event.time % 1 * 1000
    record.threadName = event.thread or "farandole"
    record.rank = event.rank
    logger.handle(record)
