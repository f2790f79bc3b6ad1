# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Signals that tell a worker of an elastic job to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SCRIPT = """
import os, signal, sys, time
from farandole.common import notices

def leave(reason):
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    print("told:", reason, flush=True)
    if sys.argv[1] == "again":
        os.kill(os.getpid(), signal.SIGTERM)
    print("registered", flush=True)

notices.leave = leave
with notices.handle_notice_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def ended(how: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FARANDOLE_ELASTIC": "1"}
    return subprocess.run(
        [sys.executable, "-c", script, how],
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


BUSY = """
import os, signal, sys, time
from farandole.common import notices
from farandole.common.exceptions import FarandoleEnvironmentError

attempts = []

def announce_leave(reason, timeout):
    attempts.append(timeout)
    if len(attempts) == 2 and sys.argv[1] == "again":
        os.kill(os.getpid(), signal.SIGTERM)
    if len(attempts) < 3 or sys.argv[1] == "gone":
        raise FarandoleEnvironmentError("timed out waiting for the registrar's answer to a leave")
    return True

notices.engine.announce_leave = announce_leave
if sys.argv[1] == "gone":
    # Each attempt takes its time.
    notices.time.monotonic = lambda: sum(attempts)
with notices.handle_notice_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", len(attempts), flush=True)
"""


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
