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

_STAND_IN: Final = ("/bin/sh", "-c", 'read status < "$0"; exit "${status:-1}"')
_READY_WITHIN = 30.0
_END_WITHIN = 10.0
_RANKS: Final = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_enlisted: _Enlisted | None = None


def where() -> str:
    """Returns the identity of a host."""
    from farandole._native import engine  # noqa: PLC0415 - loaded in the worker's process only

    return engine.here()


def host(size: int, one_host: bool) -> str:
    """Holds the registrar of a world; returns the ticket that lets ranks in."""
    from farandole._native import engine  # noqa: PLC0415 - as above

    return engine.host(size, one_host)


def take_place(ticket: str, rank: int, variables: Mapping[str, str]) -> None:
    """Lets `init` in this process join the world of a ticket."""
    from farandole.common import basics  # noqa: PLC0415 - as above

    os.environ.update(variables)
    basics.take_place(ticket, rank)


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Around a training function: leaves the world after it, so that no rank waits for this one."""
    from farandole.common import basics  # noqa: PLC0415 - as above

    try:
        yield
    finally:
        basics.shutdown()


def enlist(ticket: str, task: int) -> None:
    """Makes this process a worker of an elastic job.

    Args:
        ticket: The registrar's.
        task: The worker's number, which no other has had.

    Raises:
        RuntimeError: The registrar did not take it in time, or refused it; the message says why.
    """
    global _enlisted  # noqa: PLW0603 - one rank a process
    for name in _RANKS:
        os.environ.pop(f"HOROVOD_{name}", None)
    os.environ.update(
        FARANDOLE_JOB=ticket, FARANDOLE_TASK=str(task), FARANDOLE_ELASTIC="1", HOROVOD_ELASTIC="1"
    )
    _enlisted = _Enlisted(ticket, task)


@contextlib.contextmanager
def member() -> Iterator[None]:
    """Around a training function of an elastic job: tells the registrar how it ended.

    A worker that was asked to leave has not failed: its function ends without a result.
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
        if _enlisted is not None:
            _enlisted.end(status)


class _Enlisted:
    """The agent of this process, in a thread."""

    def __init__(self, ticket: str, task: int) -> None:
        self._ended = threading.Event()
        self._refused: str | None = None
        self._pipe: int | None = None
        self._told = threading.Lock()
        self._thread = threading.Thread(
            target=self._serve, args=(ticket, task), name="farandole-agent", daemon=True
        )
        self._begun = threading.Event()
        self._thread.start()
        if not self._begun.wait(_READY_WITHIN) or self._refused is not None:
            raise RuntimeError(
                f"worker {task} could not join: "
                f"{self._refused or f'no answer for {_READY_WITHIN:g} s'}"
            )

    def end(self, status: int) -> None:
        """Ends the stand-in with a status, and waits until the registrar knows."""
        with self._told:
            if self._pipe is not None:
                os.write(self._pipe, f"{status}\n".encode())
                os.close(self._pipe)
                self._pipe = None
        self._thread.join(_END_WITHIN)

    def _serve(self, ticket: str, task: int) -> None:
        from farandole._native import launcher  # noqa: PLC0415 - starts its threads here
        from farandole.common import scratch  # noqa: PLC0415 - as above

        with scratch.directory() as folder:
            path = str(folder / "status")
            os.mkfifo(path, 0o600)
            watch = threading.Thread(
                target=self._open, args=(path,), name="farandole-agent-pipe", daemon=True
            )
            watch.start()
            try:
                launcher.run_agent(
                    ticket, task, [*_STAND_IN, path], elastic=True, stream_output=False
                )
            except Exception as error:  # noqa: BLE001 - raised where the beginning is awaited
                self._refused = f"{type(error).__name__}: {error}"
            finally:
                self._ended.set()
                self._begun.set()
                watch.join()

    def _open(self, path: str) -> None:
        """Opens the pipe as soon as the stand-in has: the registrar knows this worker then."""
        deadline = time.monotonic() + _READY_WITHIN
        while not self._ended.is_set() and time.monotonic() < deadline:
            try:
                self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                self._ended.wait(0.02)  # there is no reader yet
                continue
            self._begun.set()
            return
