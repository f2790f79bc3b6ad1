# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The error of a job in which a worker failed."""

from __future__ import annotations

import signal as signals

_SIGNAL_HINTS = {
    "SIGKILL": (
        "nothing in the process can cause this signal: the kernel's out-of-memory killer and "
        "cluster managers send it, so look at the memory of that host or container first"
    ),
    "SIGSEGV": "native code crashed: a library, a driver or an extension of the training function",
    "SIGABRT": "native code gave up on itself; its last words are usually on stderr",
    "SIGBUS": (
        "memory that a file or a shared segment should have backed was gone: a full disk or "
        "/dev/shm"
    ),
    "SIGTERM": "something asked the process to stop: a cluster manager, a shut-down, a person",
}


class FarandoleJobError(RuntimeError):
    """The failure of a worker, which ended the job.

    If the worker raised a Python exception that the driver could unpickle, `__cause__` is that
    exception.

    Attributes:
        rank: The rank that failed first; `None` if it is unknown.
        host: The host it ran on, where known.
        exit_code: Its exit code; `None` when a signal ended it, or when it never started.
        signal_name: The signal that ended it, such as `"SIGKILL"`.
        exception_type: Qualified name of the exception it raised.
        remote_traceback: Traceback of the exception on the worker, as text.
        stderr_tail: The last lines it wrote to stderr.
        reason: The failure in a sentence.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exit_code: int | None = None,
        signal_name: str | None = None,
        exception_type: str | None = None,
        remote_traceback: str | None = None,
        stderr_tail: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.exception_type = exception_type
        self.remote_traceback = remote_traceback
        self.stderr_tail = stderr_tail

    def add_reason(self, reason: str) -> None:
        """Adds a reason that is known from elsewhere.

        Args:
            reason: The reason in a sentence.
        """
        self.reason = f"{self.reason}; {reason}"
        self.args = (self.reason,)

    def __str__(self) -> str:
        """Returns the failure, then the traceback and last lines of stderr of the worker."""
        parts = [self.reason]
        if self.signal_name in _SIGNAL_HINTS:
            parts.append(f"({_SIGNAL_HINTS[self.signal_name]})")
        if self.remote_traceback:
            parts.append(
                f"\n--- traceback of rank {self.rank} ---\n{self.remote_traceback.rstrip()}"
            )
        # The traceback of an exception that was not caught is on stderr as well: once is enough.
        tail = self.stderr_tail.replace((self.remote_traceback or "").strip(), "").rstrip()
        if tail:
            parts.append(f"\n--- last lines of stderr of rank {self.rank} ---\n{tail}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[type[FarandoleJobError], tuple[str], dict[str, object]]:
        """Pickles, fields included."""
        return type(self), (self.reason,), self.__dict__


def signal_name(number: int) -> str:
    """Returns the name of a signal's number, such as `"SIGKILL"`."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
