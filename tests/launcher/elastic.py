# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Helpers for elastic jobs on this host: a training script, hosts that change, and the printed
lines of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.launcher.conftest import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.launcher.conftest import Launch

# Ranks train until one of them finds the file `enough`. Each prints its rank in every world.
TRAIN = """
import os, sys, time
import numpy as np
import farandole.numpy as hvd
from farandole.common.elastic import ObjectState, leave_and_join, run_fn

def train(state):
    print(f"world {hvd.size()} rank {hvd.rank()} pid {os.getpid()} from {min(state.step, 1)}",
        flush=True)
    while True:
        enough, ones = hvd.allreduce(np.array([float(os.path.exists("enough")), 1.0]), op=hvd.Sum)
        assert ones == hvd.size()
        state.step += 1
        if enough:
            return print(f"over {hvd.size()}", flush=True)
        AT_EACH_STEP
        time.sleep(0.02)
        state.commit()

hvd.init()
run_fn(train, leave_and_join)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""
QUICK = ("--blacklist-cooldown-range", 1, 2)
SLOW = ("--blacklist-cooldown-range", 600, 3600)


def printed_worlds(run: Launch) -> list[dict[str, int]]:
    """Returns the values that ranks have printed so far."""
    words = [
        line.split(":", 1)[1].split()
        for line in run.out.read_text().splitlines()
        if ":world " in line
    ]
    return [dict(zip(word[::2], map(int, word[1::2]), strict=True)) for word in words]


def members(run: Launch, size: int) -> list[dict[str, int]]:
    """Waits until the latest ranks to speak are those of a world of this size, and gives them by
    rank.
    """
    found: list[dict[str, int]] = []

    def fits() -> bool:
        assert run.process.poll() is None, run.err.read_text()
        found[:] = sorted(printed_worlds(run)[-size:], key=lambda one: one["rank"])
        return [one["rank"] for one in found] == list(range(size)) and all(
            one["world"] == size for one in found
        )

    until(fits, f"a world of {size} in {run.out.read_text()}\n{run.err.read_text()}")
    return list(found)


def finish(run: Launch, size: int) -> str:
    """Ends the training, and sees that every rank of the last world returned. What the launcher
    itself said.
    """
    (run.out.parent / "enough").touch()
    assert run.wait() == 0, run.err.read_text()
    assert sum(line.endswith(f":over {size}") for line in run.lines()) == size
    return own(run)


def own(run: Launch) -> str:
    """Returns the output of the launcher itself."""
    return "\n".join(line for line in run.err.read_text().splitlines() if not line.startswith("["))


def failed(run: Launch, *parts: str) -> str:
    """Waits for a job that must fail, and sees what it says."""
    assert run.wait() != 0
    printed_worlds = own(run)
    for part in parts:
        assert part in printed_worlds, printed_worlds
    return printed_worlds


class Hosts:
    """A file of hosts, and the program that prints it."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.path = folder / "hosts"
        self.program = folder / "discover"
        self.program.write_text(f"#!/bin/sh\n. {folder}/trouble; cat {self.path}\n")
        self.program.chmod(0o700)
        self.trouble = folder / "trouble"
        self.trouble.write_text("")
        self.are(*hosts)

    def are(self, *hosts: str) -> None:
        """Puts these in the place of what there was, at once."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.replace(self.path)

    @property
    def flags(self) -> tuple[str, str]:
        """The launcher's flags for this discovery."""
        return ("--host-discovery-script", str(self.program))


def worlds(run: Launch) -> list[str]:
    """Every line in which a worker printed its rank."""
    return [line for line in run.lines() if ":world " in line]
