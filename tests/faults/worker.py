# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A rank of the grid: repeats one operation until it fails, or until told that it is enough.

It talks with the test over a Unix socket, in lines of JSON: the test sends one plan, and one word
at the end; the worker tells what happens to it and when, on the clock that all processes of a
machine share.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.faults.operations import FLOAT32, FLOAT64, OPERATIONS, SIZES, vote
from tests.faults.table import TURN

from farandole._native import engine
from farandole.common import basics
from farandole.common.process_sets import ProcessSet

if TYPE_CHECKING:
    from tests.faults.operations import Attempt

DOOR: Final = "FARANDOLE_FAULTS_DOOR"
BEGAN: Final = "began"
"""The file beside the door in which a victim leaves when it began."""
STEPS: Final = 14
"""Steps of a run that ends well."""
PATIENCE: Final = 30.0
"""A world that nothing happens to ends itself after so many seconds."""
GRACE: Final = 5.0
"""Seconds that a rank has after that to see what happened while it was stopped."""


class CallerError(Exception):
    """An error of the caller's own code."""


class Rank:
    """This process."""

    def __init__(self, door: socket.socket, plan: dict[str, Any]) -> None:
        self.door = door
        self.plan = plan
        self.operation = OPERATIONS[plan["operation"]]
        self.fault: str = plan["fault"]
        self.is_victim = basics.rank() == plan["victim"]
        self.inside: bool = plan["inside"]
        self.survives = plan["survivable"] or self.fault == "mismatch"

    def send_line(self, what: str, **facts: Any) -> None:
        send_line(self.door, what, **facts)

    def start(self, step: int, dtype: int = FLOAT32) -> Attempt:
        large = step % 2
        return self.operation(f"grid.{large}", step, SIZES[large], dtype)

    def work(self) -> None:
        """Steps, to the end or to an error."""
        end = time.monotonic() + PATIENCE
        step, late = 0, False
        while step < STEPS or not self.survives:
            if step == TURN:
                self.send_line("working")
                if self.inside and self.is_victim:
                    self.turn(step)
            if step == TURN and self.fault == "mismatch":
                self.mismatch(step)
            else:
                self.start(step).finish()
            step += 1
            if self.fault == "none" and vote(bool(select.select([self.door], [], [], 0)[0])):
                break
            if time.monotonic() > end and late:
                self.send_line("unharmed")
                return
            if time.monotonic() > end:
                # A process that was stopped meanwhile has not looked since: its last step may have
                # come before that.
                late, end = True, time.monotonic() + GRACE
        self.send_line("done")

    def turn(self, step: int) -> None:
        """Does what the plan says to itself."""
        if self.fault == "exception":
            mark_beginning()
            raise CallerError("the caller's own mistake")
        if self.fault == "orphan":
            if os.fork() == 0:
                # The child does it, and may be ended with its parent: there is nothing for it to do
                # afterwards.
                mark_beginning()
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            signal.pause()
        if self.fault == "slow":
            import ctypes

            # Keeps the interpreter's lock as well: no Python code of this process runs meanwhile.
            ctypes.PyDLL(None).usleep(int(self.plan["pause"] * 1e6))
        if self.fault == "double init":
            basics.init()
            assert engine.is_initialized()
            assert basics.is_initialized()
        if self.fault == "fork":
            self.fork()
        if self.fault == "shutdown":
            self.leave(step)

    def mismatch(self, step: int) -> None:
        began = time.monotonic()
        try:
            self.start(step, FLOAT64 if self.is_victim else FLOAT32).finish()
        except ValueError as error:
            self.send_line(
                "mismatch",
                began=began,
                at=time.monotonic(),
                kind=type(error).__name__,
                text=str(error),
            )
            return
        self.send_line("unharmed")

    def fork(self) -> None:
        """A child that tries everything, and one that outlives the test unless it is ended."""
        parent, child = os.pipe()
        if os.fork() == 0:
            refusals = []
            for attempt in (basics.init, lambda: self.start(TURN).finish()):
                try:
                    attempt()
                    refusals.append("no error")
                except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
                    refusals.append(f"{type(error).__name__}: {error}")
            basics.shutdown()
            os.write(child, json.dumps(refusals).encode())
            os._exit(0)
        os.close(child)
        ready, _, _ = select.select([parent], [], [], 10)
        refusals = json.loads(os.read(parent, 1 << 16)) if ready else ["the child hangs"]
        os.close(parent)
        os.wait()
        assert all(
            text.startswith("FarandoleUsageError") and "forked" in text for text in refusals
        ), refusals
        if os.fork() == 0:
            signal.pause()

    def leave(self, step: int) -> None:
        """Shuts down while a thread waits for what no other rank takes part in."""
        lonely = self.operation("lonely", step, SIZES[0])
        waits = threading.Event()
        failures: list[str] = []

        def wait() -> None:
            waits.set()
            try:
                lonely.finish()
                failures.append("no error")
            except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
                failures.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        waits.wait()
        mark_beginning()
        basics.shutdown()
        thread.join(10)
        self.send_line("left", text="".join(failures) or "the waiting thread hangs")
        raise SystemExit(0)

    def failed(self, error: Exception) -> None:
        """Tells of the error, and what comes after it."""
        at = time.monotonic()
        try:
            self.operation("later", 0, SIZES[0]).finish()
            later = "no error"
        except Exception as later_error:  # noqa: BLE001 - whatever it is, the test is told
            later = f"{type(later_error).__name__}: {later_error}"
        after = time.monotonic()
        basics.shutdown()
        self.send_line(
            "failed",
            at=at,
            kind=type(error).__name__,
            text=str(error),
            later=later,
            later_took=after - at,
            leaving_took=time.monotonic() - after,
        )


def mark_beginning() -> None:
    """Leaves the time beside the door: a line through it would wake the test, which may take the
    core of the deed.
    """
    Path(os.environ[DOOR]).with_name(BEGAN).write_text(f"{time.monotonic()}")


def send_line(door: socket.socket, what: str, **facts: Any) -> None:
    """Sends a line."""
    door.sendall(json.dumps({"what": what, **facts}).encode() + b"\n")


def main() -> None:
    """One life."""
    # The registrar ends a world whose first rank has failed; here every rank is to see its own
    # error first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    size = int(os.environ["WORLD_SIZE"])
    basics.init(process_sets=[ProcessSet(range(size - 1))] if size > 1 else None)
    with socket.socket(socket.AF_UNIX) as door, door.makefile("r") as lines:
        door.connect(os.environ[DOOR])
        send_line(door, "up", rank=basics.rank(), pid=os.getpid())
        rank = Rank(door, json.loads(lines.readline()))
        try:
            rank.work()
        except CallerError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            rank.failed(error)
        lines.readline()  # until the test has seen enough
    basics.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
