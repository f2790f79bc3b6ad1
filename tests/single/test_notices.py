# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Signals that tell a worker of an elastic job to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.programs import program_path

SCRIPT = program_path(__file__, "signal_twice")


def ended(how: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FARANDOLE_ELASTIC": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )


def test_a_signal_ends_the_process_only_after_the_registrar_knows_of_the_first_one() -> None:
    found = ended("once")
    assert found.returncode == -signal.SIGTERM, found.stderr
    assert found.stdout.splitlines() == ["told: it got SIGTERM", "registered", "goes on"]


def test_a_second_signal_during_the_report_to_the_registrar_ends_the_process() -> None:
    found = ended("again")
    assert found.returncode == -signal.SIGTERM, found.stderr
    assert "goes on" not in found.stdout
