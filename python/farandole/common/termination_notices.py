# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Notices of termination: a worker of an elastic job that gets one leaves at the end of the
present step.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from farandole import _variables as variables
from farandole._native import engine
from farandole._native.settings import read_setting
from farandole.common.exceptions import FarandoleEnvironmentError, FarandoleInternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEAVE_ATTEMPT_SECONDS = 2.0
"""Seconds of one attempt to tell the registrar of a leave. Between two attempts, a second signal
ends the process.
"""
_LEAVE_REPORT_SECONDS = 20.0
"""Seconds that all attempts may take together. On a machine that other processes keep busy, a
registrar that lives may not answer for seconds.
"""
_LEAVE_RETRY_SECONDS = 0.2
"""Seconds between two attempts, of which one may be refused at once."""

NOTICE_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGPWR") if hasattr(signal, name)
)
"""The notices: SIGTERM of a batch system, a hook or a person; SIGPWR of a power supply that
fails.
"""


def is_elastic_worker() -> bool:
    """Returns whether this process is a worker of an elastic job."""
    return read_setting(variables.ELASTIC)


def leave(reason: str = "its script has said so") -> bool:
    """Makes this worker leave at its next commit or step, which does not count as a failure. The
    others continue.

    For notices that do not come as a signal, such as the metadata of a spot instance. Any thread
    may call it.

    Args:
        reason: The reason that the launcher prints.

    Returns:
        False if the job is not elastic. Then it does nothing.

    Raises:
        FarandoleInternalError: The job is over.
        FarandoleEnvironmentError: The registrar does not answer.
    """
    end = time.monotonic() + _LEAVE_REPORT_SECONDS
    while True:
        try:
            return engine.announce_leave(reason, _LEAVE_ATTEMPT_SECONDS)
        except FarandoleEnvironmentError:
            # An answer that was lost does no harm: the registrar counts the first announcement.
            if time.monotonic() >= end:
                raise
        time.sleep(_LEAVE_RETRY_SECONDS)


@contextlib.contextmanager
def handle_notice_signals() -> Iterator[None]:
    """Handles `NOTICE_SIGNALS` as requests to leave, in the main thread of a worker of an elastic
    job; restores the handlers afterwards.
    """
    before = install_notice_handlers()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_notice_handlers() -> dict[int, Any]:
    """Handles `NOTICE_SIGNALS` as notices of an early end, unless they have handlers already.

    The second signal ends the process as without a handler.

    Returns:
        The previous handler of each signal; empty outside of the main thread of a worker of an
        elastic job.
    """
    if threading.current_thread() is not threading.main_thread() or not is_elastic_worker():
        return {}
    # A handler that the script has installed takes precedence.
    before = {number: signal.getsignal(number) for number in NOTICE_SIGNALS}
    taken = {
        number: handler for number, handler in before.items() if handler in (signal.SIG_DFL, None)
    }
    noticed = False

    def restore_default_handlers() -> None:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)

    def handle_notice(number: int, frame: Any) -> None:
        nonlocal noticed
        del frame
        if noticed:
            # The second signal, while the first is being reported to the registrar.
            restore_default_handlers()
            signal.raise_signal(number)
            return
        noticed = True
        try:
            leave(f"it got {signal.Signals(number).name}")
        except (FarandoleInternalError, OSError, RuntimeError):
            # The job is over, or its registrar is unreachable.
            restore_default_handlers()
            signal.raise_signal(number)
        # Not earlier: a process that ends before the registrar has received its notice counts as
        # failed.
        restore_default_handlers()

    for number in taken:
        signal.signal(number, handle_notice)
    return dict.fromkeys(taken, signal.SIG_DFL)
