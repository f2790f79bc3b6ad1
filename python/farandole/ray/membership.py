# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes a worker of Ray Train a rank: called in its actor, by the backend and around the training
function.

In an elastic job, the registrar knows a worker through its agent. The actor runs an agent in a
thread. The agent's child process represents the actor: it ends with the outcome of the training
function, and dies with the actor.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STAND_IN_COMMAND: Final = ("/bin/sh", "-c", 'read status < "$0"; exit "${status:-1}"')
_JOIN_TIMEOUT = 30.0
_EXIT_TIMEOUT = 10.0
_RANK_VARIABLES: Final = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_elastic_agent: _StandInAgent | None = None


def host_identity() -> str:
    """Returns the identity of a host."""
    from farandole._native import engine  # noqa: PLC0415 - loaded in the worker's process only

    return engine.shared_memory_identity()


def run_world_registrar(size: int, one_host: bool) -> str:
    """Holds the registrar of a world; returns the ticket that lets ranks in."""
    from farandole._native import engine  # noqa: PLC0415 - as above

    return engine.host_registrar(size, one_host)


def assign_world_ticket(ticket: str, rank: int, variables: Mapping[str, str]) -> None:
    """Lets `init` in this process join the world of a ticket."""
    from farandole.common import basics  # noqa: PLC0415 - as above

    os.environ.update(variables)
    basics.set_world_ticket(ticket, rank)


@contextlib.contextmanager
def leave_world_at_end() -> Iterator[None]:
    """Leaves the world after the training function inside, so that no rank waits for this one."""
    from farandole.common import basics  # noqa: PLC0415 - as above

    try:
        yield
    finally:
        basics.shutdown()


def join_elastic_job(ticket: str, task: int) -> None:
    """Makes this process a worker of an elastic job.

    Args:
        ticket: Ticket of the registrar.
        task: Task number of the worker, never used before.

    Raises:
        RuntimeError: The registrar did not accept the worker in time, or refused it; the message
            has the reason.
    """
    global _elastic_agent  # noqa: PLW0603 - one rank a process
    for name in _RANK_VARIABLES:
        os.environ.pop(f"HOROVOD_{name}", None)
    os.environ.update(
        FARANDOLE_JOB=ticket, FARANDOLE_TASK=str(task), FARANDOLE_ELASTIC="1", HOROVOD_ELASTIC="1"
    )
    _elastic_agent = _StandInAgent(ticket, task)


@contextlib.contextmanager
def report_exit_at_end() -> Iterator[None]:
    """Reports the end of the training function inside, in an elastic job, to the registrar.

    A worker that must leave has not failed: its function ends without a result.
    """
    from farandole.common import basics  # noqa: PLC0415 - as above
    from farandole.common.exceptions import WorkerDismissed  # noqa: PLC0415 - as above

    status = 1
    try:
        yield
        status = 0
    except WorkerDismissed:
        status = 0
    finally:
        basics.shutdown()
        if _elastic_agent is not None:
            _elastic_agent.report_exit(status)


class _StandInAgent:
    """The agent of this process, in a thread."""

    def __init__(self, ticket: str, task: int) -> None:
        self._ended = threading.Event()
        self._refused: str | None = None
        self._pipe: int | None = None
        self._pipe_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run_agent, args=(ticket, task), name="farandole-agent", daemon=True
        )
        self._begun = threading.Event()
        self._thread.start()
        if not self._begun.wait(_JOIN_TIMEOUT) or self._refused is not None:
            raise RuntimeError(
                f"worker {task} could not join: "
                f"{self._refused or f'no answer for {_JOIN_TIMEOUT:g} s'}"
            )

    def report_exit(self, status: int) -> None:
        """Ends the stand-in process with a status, and waits until the registrar has noticed."""
        with self._pipe_lock:
            if self._pipe is not None:
                os.write(self._pipe, f"{status}\n".encode())
                os.close(self._pipe)
                self._pipe = None
        self._thread.join(_EXIT_TIMEOUT)

    def _run_agent(self, ticket: str, task: int) -> None:
        from farandole._native import launcher  # noqa: PLC0415 - starts its threads here
        from farandole.common import scratch_directories  # noqa: PLC0415 - as above

        with scratch_directories.temporary_directory() as folder:
            path = str(folder / "status")
            os.mkfifo(path, 0o600)
            watch = threading.Thread(
                target=self._await_stand_in_pipe,
                args=(path,),
                name="farandole-agent-pipe",
                daemon=True,
            )
            watch.start()
            try:
                launcher.run_agent(
                    ticket, task, [*_STAND_IN_COMMAND, path], elastic=True, stream_output=False
                )
            except Exception as error:  # noqa: BLE001 - raised where the beginning is awaited
                self._refused = f"{type(error).__name__}: {error}"
            finally:
                self._ended.set()
                self._begun.set()
                watch.join()

    def _await_stand_in_pipe(self, path: str) -> None:
        """Opens the pipe after the stand-in process has: the registrar knows this worker then."""
        deadline = time.monotonic() + _JOIN_TIMEOUT
        while not self._ended.is_set() and time.monotonic() < deadline:
            try:
                self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                self._ended.wait(0.02)  # there is no reader yet
                continue
            self._begun.set()
            return
