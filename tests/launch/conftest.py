# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures for launches on several hosts, and a description of a test's workers."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.launch.namespace_cluster import LIMIT, NamespaceCluster, missing
from tests.needs import skip_without
from tests.programs import program_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from subprocess import CompletedProcess

    from tests.launch.namespace_cluster import Running

# Ranks of several hosts sum an array, and each prints what it knows of itself as one line of JSON.
WORLD = """
import json, os, socket, sys
import numpy as np
import farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(np.arange(1000, dtype=np.float64) * (hvd.rank() + 1), op=hvd.Sum)
right = bool((total == np.arange(1000) * sum(range(1, hvd.size() + 1))).all())
print(json.dumps({"rank": hvd.rank(), "size": hvd.size(), "local": hvd.local_rank(),
    "cross": hvd.cross_rank(),
                  "host": socket.gethostname(), "right": right}), flush=True)
hvd.shutdown()
"""
# Ranks in a loop of collectives until one of them finds the file `enough`; `up RANK` says that all
# are linked.
BUSY = program_text(__file__, "reduce_until_enough")
# Processes that need no world: they say who they are and wait for the end.
IDLE = """
import os, signal, sys, time
def exit_on_interrupt(number, frame):
    print("asked", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, exit_on_interrupt)
signal.signal(signal.SIGTERM, exit_on_interrupt)
print(f"up {os.environ['RANK']}", flush=True)
while True:
    time.sleep(60)
"""


class Hosts(NamespaceCluster):
    """The cluster, and the command that is tried on it."""

    def farandole(self, *arguments: object) -> list[object]:
        """The words of `farandole run`."""
        return [sys.executable, "-m", "farandole", "run", *arguments]

    def launch(self, *arguments: object, terminal: int | None = None, **env: str) -> Running:
        """Starts `farandole run` on the first host."""
        return next(iter(self.hosts.values())).start(
            *self.farandole(*arguments), terminal=terminal, **env
        )

    def launched(
        self, *arguments: object, limit: float = LIMIT, **env: str
    ) -> CompletedProcess[str]:
        """Runs `farandole run` on the first host to its end."""
        return next(iter(self.hosts.values())).run(*self.farandole(*arguments), limit=limit, **env)


def printed_json(output: str) -> list[dict[str, Any]]:
    """The lines of JSON that ranks have printed, by rank."""
    lines = (line.partition(":")[2] for line in output.splitlines() if "<stdout>:{" in line)
    return sorted((json.loads(line) for line in lines), key=lambda word: word["rank"])


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips what needs hosts on a machine that can have none."""
    skip_without(missing())


@pytest.fixture
def hosts(machine: None) -> Iterator[Callable[..., Hosts]]:
    """Makes hosts: `head`, where launchers run, and the named ones. None may have a process left
    when the test ends.
    """
    clusters: list[Hosts] = []

    def make(*names: str, listen: bool = True) -> Hosts:
        cluster = Hosts("head", *names)
        clusters.append(cluster)
        if listen:
            for host in cluster.hosts.values():
                if host.name != "head":
                    host.listen()
            cluster.login(cluster["head"])
        return cluster

    yield make
    try:
        for cluster in clusters:
            for command in cluster.commands:
                command.stop()
            cluster.until_quiet(15.0)
    finally:
        for cluster in clusters:
            cluster.close()
