# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A world of the grid, seen from the test: its agents, its workers, and what they leave behind."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.faults.sabotage import listening
from tests.faults.worker import BEGAN, DOOR

from farandole._native.launcher import run_agent
from farandole._native.registrar import Registrar

if TYPE_CHECKING:
    from collections.abc import Collection

ROOT: Final = Path(__file__).parents[2]
START: Final = 30.0
"""Seconds a world may take to start on a busy machine."""
MARK: Final = "FARANDOLE_FAULTS_MARK"


class Job:
    """Ranks as real processes under real agents; `hosts` names each rank's host."""

    def __init__(self, hosts: list[str | None], env: dict[str, str]) -> None:
        self.size = len(hosts)
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="farandole-faults-"))
        self.messages: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(self.size)}
        self.pids: list[int] = []
        self.ports: list[tuple[str, int]] = []
        """Everything the registrar and the ranks listen on."""
        self.outcomes: list[Any] = [None] * self.size
        self._doors: dict[int, socket.socket] = {}
        self._rests: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "door"))
        self._listener.listen(self.size)
        self.registrar = Registrar(self.size, host="127.0.0.1", start_timeout=START)
        self.env: dict[str, str | None] = {
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            DOOR: str(self.folder / "door"),
            MARK: self.mark,
            **env,
        }
        self._agents = [
            threading.Thread(target=self._agent, args=(task, host), daemon=True)
            for task, host in enumerate(hosts)
        ]

    def __enter__(self) -> Self:
        for agent in self._agents:
            agent.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agent(self, task: int, host: str | None) -> None:
        command = [sys.executable, "-m", "tests.faults.worker"]
        try:
            self.outcomes[task] = run_agent(
                self.registrar.ticket,
                task,
                command,
                env=self.env,
                stream_output=False,
                start_timeout=START,
                host=host,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            self.outcomes[task] = error

    def begin(self, plan: dict[str, Any]) -> None:
        """Waits until all ranks are up, and gives them their plan."""
        deadline = time.monotonic() + START
        doors: dict[int, tuple[socket.socket, int]] = {}
        while len(doors) < self.size:
            self._listener.settimeout(0.1)
            try:
                door, _ = self._listener.accept()
            except TimeoutError:
                ended = [outcome for outcome in self.outcomes if outcome is not None]
                if ended or time.monotonic() > deadline:
                    raise AssertionError(
                        f"{len(doors)} of {self.size} ranks came up: {self.story()}"
                    ) from None
                continue
            door.settimeout(START)
            hello = json.loads(door.makefile("r").readline())
            doors[hello["rank"]] = door, hello["pid"]
        self.pids = [doors[rank][1] for rank in range(self.size)]
        for rank, (door, _) in doors.items():
            self._doors[rank] = door
            self._rests[rank] = b""
            self._selector.register(door, selectors.EVENT_READ, rank)
        addresses = [one.rsplit(":", 1) for one in self.registrar.addresses]
        self.ports = [(host, int(port)) for host, port in addresses]
        self.ports += [address for pid in self.pids for address in listening(pid)]
        self.send_to_ranks(json.dumps(plan))

    def send_to_ranks(self, word: str) -> None:
        """Sends every rank that still listens a line."""
        for door in self._doors.values():
            try:
                door.sendall(word.encode() + b"\n")
            except OSError:
                continue  # it is gone

    def until(
        self, what: Collection[str], ranks: Collection[int], timeout: float
    ) -> dict[int, dict[str, Any]]:
        """Waits until each of these ranks has reported one of these events; returns the ranks."""
        deadline = time.monotonic() + timeout
        while True:
            told = {
                rank: message
                for rank in ranks
                if (message := next((m for m in self.messages[rank] if m["what"] in what), None))
                is not None
            }
            left = deadline - time.monotonic()
            if len(told) == len(ranks) or left <= 0 or not self._selector.get_map():
                return told
            for key, _ in self._selector.select(left):
                self._hear(key.data)

    def began(self) -> float:
        """Returns the time at which the victim carried out the fault on itself."""
        return float((self.folder / BEGAN).read_text())

    def _hear(self, rank: int) -> None:
        try:
            data = self._doors[rank].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._doors[rank])
            return
        *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
        self.messages[rank].extend(json.loads(line) for line in lines)

    def story(self) -> str:
        """Describes the outcomes, for a message."""
        tails = "\n".join(
            f"task {task}: {outcome!r}\n{getattr(outcome, 'stderr_tail', '')}"
            for task, outcome in enumerate(self.outcomes)
        )
        return f"{json.dumps(self.messages)}\n{tails}"

    def end(self, timeout: float = 15.0) -> list[Any]:
        """Lets the workers go, waits for every agent, and gives their outcomes by task."""
        self.send_to_ranks("end")
        deadline = time.monotonic() + timeout
        for agent in self._agents:
            agent.join(max(0.0, deadline - time.monotonic()))
        assert not any(agent.is_alive() for agent in self._agents), (
            f"an agent is left: {self.story()}"
        )
        return self.outcomes

    def close(self) -> None:
        """Frees everything, whatever has happened."""
        self.registrar.close()
        for agent in self._agents:
            agent.join(20)
        self._selector.close()
        for door in self._doors.values():
            door.close()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def left_over(self) -> list[str]:
        """Processes that carry this job's mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
            except OSError:
                continue
        return found
