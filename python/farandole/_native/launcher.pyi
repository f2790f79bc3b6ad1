# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Agents: a task's side of a job, which starts and watches one worker process."""

from collections.abc import Mapping, Sequence
from typing import final

ALLOCATOR: dict[str, str]
"""Variables of the C library for workers that do not set them themselves."""

@final
class Outcome:
    """The end of a worker."""

    @property
    def rank(self) -> int | None:
        """The worker's rank; `None` when the job ended before ranks were assigned."""
    @property
    def size(self) -> int | None:
        """Number of ranks; `None` when the job ended before ranks were assigned."""
    @property
    def exit_code(self) -> int | None:
        """The exit code; `None` when a signal ended the worker, or none was started."""
    @property
    def signal(self) -> int | None:
        """The signal that ended the worker."""
    @property
    def signal_name(self) -> str | None:
        """Its name, such as `"SIGKILL"`."""
    @property
    def stderr_tail(self) -> str:
        """The last 50 lines of the worker's stderr."""
    @property
    def result(self) -> bytes | None:
        """The bytes that the worker wrote to its result pipe; `None` if it wrote nothing."""
    @property
    def aborted(self) -> bool:
        """Whether something else ended this worker: the job's abort or another rank's failure.

        A worker that failed because a peer had died counts as aborted, so the first failure is the
        one outcome with `aborted == False` and a bad exit.
        """
    @property
    def reason(self) -> str | None:
        """The reason why the job ended, in a sentence naming the rank that failed first; `None`
        after success.
        """
    @property
    def retry(self) -> bool:
        """Whether no worker failed: another agent was lost or started again, and this task may
        register again.
        """

def run_agent(
    ticket: str,
    task: int,
    command: Sequence[str],
    *,
    env: Mapping[str, str | None] = ...,
    payload: bytes = b"",
    attempt: int = 0,
    stream_output: bool = True,
    start_timeout: float | None = None,
    host: str | None = None,
    together: bool = False,
    elastic: bool = False,
) -> Outcome:
    """Registers as `task`, waits for a rank, runs `command` and returns how it ended.

    The worker gets this process's environment, changed by `env` (`None` removes), then the
    variables of its rank. It dies with this process, whatever ends it. On `KeyboardInterrupt` it is
    terminated first.

    Args:
        ticket: `Registrar.ticket`.
        task: This task's number, below the registrar's `tasks`.
        command: Program and arguments.
        env: Variables to set or remove.
        payload: Bytes the worker can read from the descriptor named by `FARANDOLE_PAYLOAD_FD`.
        attempt: Fencing token: a higher one replaces earlier starts of this task, a lower one is
            refused. Spark's `taskAttemptId()` serves.
        stream_output: Whether lines of stdout and stderr go to the registrar; otherwise to this
            process's own.
        start_timeout: Seconds to wait for the registrar and for all tasks; default:
            `FARANDOLE_START_TIMEOUT`.
        host: Name of the host to register under; default: this host's. Tasks under different names
            count as tasks of different hosts: their ranks connect by TCP.
        together: Whether a worker's success is returned only when all workers have ended: when an
            agent is lost meanwhile, all begin again, this one too.
        elastic: Whether the worker starts at once, without a rank, and asks for one by itself: for
            `Registrar.elastic`.

    Raises:
        ValueError: The ticket is malformed, or the command is empty.
        FarandoleEnvironmentError: The registrar refused the ticket, the task or the attempt; or it
            cannot be reached, with the reason at each of its addresses; or not all tasks registered
            in time.
        FileNotFoundError: There is no such program.
    """

def report_record(kind: str, data: bytes) -> bool:
    """Sends a record from this worker to its driver, where it arrives as a "metric" event.

    Records never block: when the connection is slow, the oldest waiting ones are dropped and
    counted.

    Args:
        kind: What the record is, such as `"progress"`.
        data: Its bytes, at most 1 MiB.

    Returns:
        Whether there is a job to report to; `False` in a process that no launcher started.
    """

def flush_reports(timeout: float = 5.0) -> bool:
    """Waits until the driver has every record reported so far.

    Args:
        timeout: Seconds to wait at most.

    Returns:
        Whether it has; `False` in a process that no launcher started.
    """
