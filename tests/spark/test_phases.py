# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An executor that is killed in any phase of a fit: one cluster, whose driver fits once for each
phase.
"""

from __future__ import annotations

import json
import queue
import threading
import time

import pytest
from tests.programs import program_path
from tests.spark.deployments import PATIENCE, driver

PHASE = 120.0 * PATIENCE
"""For one fit that loses an executor: Spark starts another JVM, whose worker imports torch.
Quiet it takes 15 s.
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PHASE)]

PROGRAM = program_path(__file__, "fit_in_phases")


class Driver:
    """The driver's program, which answers every line it is told with one."""

    def __init__(self, process):
        self.process = process
        self.recent_lines = []
        self._answers = queue.Queue()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream):
        for line in stream:
            self.recent_lines.append(line)
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))

    def answer(self, limit):
        deadline = time.monotonic() + limit
        while True:
            try:
                return self._answers.get(timeout=0.5)
            except queue.Empty:
                told = "".join(self.recent_lines[-60:])
                assert self.process.poll() is None, f"it ended:\n{told}"
                assert time.monotonic() < deadline, f"no answer in {limit} s:\n{told}"

    def fit(self, phase, warm):
        self.process.stdin.write(json.dumps([phase, warm]) + "\n")
        self.process.stdin.flush()
        return self.answer(PHASE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The driver, and the weights of a fit that nothing disturbed."""
    with driver(
        PROGRAM, tmp_path_factory.mktemp("phases"), EXECUTORS_WITHIN=str(PHASE / 2)
    ) as process:
        made = Driver(process)
        yield made, made.answer(2 * PHASE)["weights"]


@pytest.mark.parametrize(
    ("phase", "warm"),
    [
        # Warm workers: of the executor that stays, they are there at once. One phase begins anew
        # the long way.
        ("prepare", True),
        ("register", True),
        ("start", True),
        ("train", False),
        ("checkpoint", True),
        ("result", True),
    ],
)
def test_an_executor_killed_in_a_phase_of_a_fit_leaves_the_same_model(cluster, phase, warm):
    running, undisturbed = cluster
    found = running.fit(phase, warm)
    assert found["killed"], phase
    assert len(found["lost"]) == 1
    assert found["weights"].keys() == undisturbed.keys()
    for name, values in undisturbed.items():
        for value, wanted in zip(found["weights"][name], values, strict=True):
            assert value == pytest.approx(wanted, rel=1e-6, abs=1e-7), (phase, name)
