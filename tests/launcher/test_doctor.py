# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole doctor` and the command's outside."""

from __future__ import annotations

import subprocess
import sys

import farandole


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "farandole", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_doctor_tries_links_and_launching_and_imports_no_framework() -> None:
    ended = command("doctor")
    for works in ("[X] PyTorch", "[X] shared memory", "[X] TCP", "[X] registrar", "[X] worker processes"):
        assert works in ended.stdout
    assert ended.stdout.endswith("Problems\n    none\n"), ended.stdout
    assert ended.returncode == 0


def test_the_command_is_called_by_its_name_however_it_was_started() -> None:
    told = command()
    assert "Usage: farandole <COMMAND>" in told.stdout + told.stderr


def test_the_version_is_the_packages() -> None:
    assert command("--version").stdout == f"farandole {farandole.__version__}\n"


def test_a_command_line_that_makes_no_sense_is_refused_with_status_2() -> None:
    ended = command("run", "-np", "1", "--no-such-flag", "true")
    assert ended.returncode == 2
    assert "--no-such-flag" in ended.stderr
