# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Signals that tell a worker of an elastic job to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.programs import program_path

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = program_path(__file__, "signal_twice")


def ended(how: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FARANDOLE_ELASTIC": "1"}
    return subprocess.run(
        [sys.executable, script, how],
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


BUSY = program_path(__file__, "announce_leave_to_busy_registrar")


def test_a_registrar_that_is_too_busy_to_answer_is_told_again() -> None:
    found = ended("once", BUSY)
    assert (found.returncode, found.stdout) == (0, "goes on 3\n"), found.stderr


def test_a_second_signal_ends_the_process_between_two_attempts_to_tell_the_registrar() -> None:
    found = ended("again", BUSY)
    assert (found.returncode, found.stdout) == (-signal.SIGTERM, ""), found.stderr


def test_a_registrar_that_never_answers_is_given_up_and_the_signal_ends_the_process() -> None:
    found = ended("gone", BUSY)
    assert (found.returncode, found.stdout) == (-signal.SIGTERM, ""), found.stderr


def test_a_second_signal_during_the_report_to_the_registrar_ends_the_process() -> None:
    found = ended("again")
    assert found.returncode == -signal.SIGTERM, found.stderr
    assert "goes on" not in found.stdout
