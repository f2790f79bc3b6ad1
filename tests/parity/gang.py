# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A backend whose processes stay for many fits, so that a fit costs a fraction of a second."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import traceback
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, Any

import cloudpickle

from farandole.runner.backend import Backend, LocalBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

FIT_TIMEOUT_SECONDS = 90.0


def serve_fits(address: str, key: bytes) -> None:
    """Runs functions that the driver sends, until it closes the connection."""
    with Client(address, authkey=key) as connection:
        connection.send(int(os.environ["RANK"]))
        while True:
            try:
                payload = connection.recv_bytes()
            except EOFError:
                return
            try:
                function, args, kwargs = cloudpickle.loads(payload)
                found: tuple[bool, Any] = (True, function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the driver raises it
                found = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            connection.send_bytes(cloudpickle.dumps(found))


class StandingGang(Backend):
    """Processes of this host that run one function after another.

    Args:
        size: number of processes.
        env: variables of the processes.
    """

    def __init__(self, size: int, env: Mapping[str, str | None] | None = None) -> None:
        self._size = size
        self._env = dict(env or {})
        self._connections: list[Connection] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
        env: Mapping[str, str | None] | None = None,
        on_progress: Any = None,
    ) -> list[Any]:
        del env, on_progress
        if not self._connections:
            self._start()
        payload = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
        try:
            return self._run_payload(payload)
        except (EOFError, OSError) as error:
            self.close()  # the next fit starts other processes
            raise RuntimeError(f"a process ended before its answer: {self._error}") from error
        except BaseException:
            self.close()  # other processes may wait for the one that failed
            raise

    def num_processes(self) -> int:
        return self._size

    def _run_payload(self, payload: bytes) -> list[Any]:
        for connection in self._connections:
            connection.send_bytes(payload)
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(FIT_TIMEOUT_SECONDS):
                raise RuntimeError(f"rank {rank} did not answer in {FIT_TIMEOUT_SECONDS:g} s")
            good, value = cloudpickle.loads(connection.recv_bytes())
            if not good:
                raise RuntimeError(value)
            results.append(value)
        return results

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._thread is not None:
            self._thread.join(timeout=60)
            self._thread = None

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        with Listener(family="AF_UNIX", authkey=key) as listener:
            address = listener.address

            def work() -> None:
                try:
                    LocalBackend(self._size, self._env, verbose=0).run(
                        serve_fits, args=(address, key)
                    )
                except BaseException as error:  # noqa: BLE001 - `run` shows it
                    self._error = error
                    # A start that waits for a process ends. Later, there is no listener.
                    with contextlib.suppress(OSError), Client(address, authkey=key) as connection:
                        connection.send(None)

            self._error = None
            self._thread = threading.Thread(target=work, daemon=True)
            self._thread.start()
            ranks = {}
            for _ in range(self._size):
                connection = listener.accept()
                rank = connection.recv()
                if rank is None:
                    raise RuntimeError(f"the processes did not start: {self._error}")
                ranks[rank] = connection
        self._connections = [ranks[rank] for rank in range(self._size)]
