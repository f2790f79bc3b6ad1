# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The job's meeting point, run by the driver."""

from types import TracebackType
from typing import Literal, Self, TypedDict, final

def host_hash() -> str:
    """By what ranks are grouped into hosts: `<host>-<16 hexadecimal digits>`."""

class Seat(TypedDict):
    """The place of one rank."""

    rank: int
    task: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

@final
class Event:
    """Something that happened in the job."""

    @property
    def kind(
        self,
    ) -> Literal[
        "registered",
        "assigned",
        "log",
        "metric",
        "exit",
        "result",
        "lost",
        "aborted",
        "stop",
        "dismissed",
        "finished",
    ]:
        """The kind of event. The last three occur in elastic jobs: a worker is ended, may go, or
        all have returned.
        """
    @property
    def task(self) -> int | None:
        """The task it happened to; `None` for "assigned" and for an "aborted" that no task
        caused.
        """
    @property
    def rank(self) -> int | None:
        """The task's rank, once assigned. For "aborted": the rank that failed first, if one did."""
    @property
    def stream(self) -> Literal["stdout", "stderr"] | None:
        """For "log": where the line was written."""
    @property
    def text(self) -> str | None:
        """For "log": the line. For "metric": its kind. Else: the reason, in a sentence, where
        there is one.
        """
    @property
    def data(self) -> bytes | None:
        """For "metric" and "result": the bytes the worker sent."""
    @property
    def exit_code(self) -> int | None:
        """For "exit": the exit code, when the worker was not ended by a signal."""
    @property
    def signal(self) -> int | None:
        """For "exit": the signal that ended the worker."""
    @property
    def stderr_tail(self) -> str | None:
        """For "exit": the last 50 lines of the worker's stderr."""
    @property
    def dropped(self) -> int:
        """For "log" and "metric": records lost just before this one because `events` was not
        called in time.
        """

@final
class Registrar:
    """A gRPC server over TLS with a certificate and a token of its own, for one job."""

    def __new__(
        cls,
        tasks: int,
        *,
        job_id: str | None = None,
        host: str | None = None,
        port_range: str | None = None,
        start_timeout: float | None = None,
        bind: str | None = None,
    ) -> Self:
        """Starts listening.

        Args:
            tasks: Number of tasks that will register.
            job_id: Name of the job in logs and paths; made up when omitted.
            host: Address to listen on and to offer; default: `FARANDOLE_DRIVER_HOST`, else all own
                addresses.
            port_range: Such as `"40000-40100"`; default: `FARANDOLE_PORT_RANGE`.
            start_timeout: Seconds all tasks may take to register; default:
                `FARANDOLE_START_TIMEOUT`.
            bind: Address of this host to listen on, or a network it is in; default:
                `FARANDOLE_BIND_ADDRESS`.

        Raises:
            ValueError: `tasks` is 0, or an option does not parse.
            FarandoleEnvironmentError: Nothing could be listened on.
        """
    @staticmethod
    def start_elastic(
        first: int,
        min_workers: int,
        max_workers: int,
        *,
        timeout: float,
        reset_limit: int | None = None,
        start_timeout: float | None = None,
        host: str | None = None,
        bind: str | None = None,
    ) -> Registrar:
        """Starts listening for a job whose workers come by themselves, and go.

        Args:
            first: Workers that the first world waits for.
            min_workers: Fewest workers of a world.
            max_workers: Most workers of a world.
            timeout: Seconds the job may wait for workers.
            reset_limit: Number of changes of the world after which the job fails; default: no
                limit.
            start_timeout: As for `Registrar`.
            host: As for `Registrar`.
            bind: As for `Registrar`.

        Raises:
            FarandoleUsageError: The numbers contradict each other.
            FarandoleEnvironmentError: Nothing could be listened on.
        """
    def dismiss_task(self, task: int, reason: str) -> None:
        """Lets a worker of an elastic job leave at its next chance, which is no failure."""
    def publish(self, key: str, value: bytes) -> None:
        """Sets a value that the ranks of the present world find with
        `farandole._native.values.wait_for_value`.

        Raises:
            FarandoleEnvironmentError: The key or the value is too long.
        """
    @property
    def ticket(self) -> str:
        """The secret that lets a task in: addresses, certificate fingerprint, token, job id."""
    @property
    def job_id(self) -> str:
        """The job's name."""
    @property
    def addresses(self) -> list[str]:
        """Addresses offered in the ticket, `host:port`."""
    def events(self, timeout: float) -> list[Event]:
        """Waits until something has happened, at most `timeout` seconds.

        Returns:
            Everything that happened since the last call, oldest first; empty at the timeout or once
            closed.

        Raises:
            KeyboardInterrupt: A signal arrived meanwhile.
        """
    def rank_assignment(self) -> list[Seat] | None:
        """Every rank's place in the latest world; `None` before all tasks have registered."""
    def abort(self, reason: str) -> None:
        """Makes all agents kill their workers. Later calls change nothing."""
    def close(self) -> None:
        """Aborts what still runs and stops listening. Later calls do nothing."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
