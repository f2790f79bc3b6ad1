# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs programs in the environments of the clients, which `make test-clients` creates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import program_path

ENVIRONMENTS = Path(__file__).parents[2] / ".tools" / "clients"
MAX_SECONDS = 400
"""Deadline of a program. It trains for seconds, but imports its client and frameworks from files
that may not be in the page cache."""


def client_variables(client: str, **variables: str) -> dict[str, str]:
    """Returns the environment of a program: the client's commands and ours, and bytecode.

    Args:
        client: Name of the client's environment.
        **variables: Variables to set.
    """
    folder = ENVIRONMENTS / client / "bin"
    assert (folder.parent / "ready").exists(), f"make test-clients creates {folder.parent}"
    own = Path(sys.executable).parent
    path = os.pathsep.join([str(folder), str(own), os.environ["PATH"]])
    changed = os.environ | {"PATH": path, "PYSPARK_PYTHON": str(folder / "python")} | variables
    # The first start compiles packages of which no process had the bytecode yet.
    changed.pop("PYTHONDONTWRITEBYTECODE", None)
    return changed


def run_program(
    client: str, name: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program beside the tests with the client's interpreter, and returns how it ended.

    Args:
        client: Name of the client's environment.
        name: Name of the program, without `.py`.
        *arguments: Its arguments.
        **variables: Variables to set.
    """
    env = client_variables(client, **variables)
    words = ["python", program_path(__file__, name), *arguments]
    return run_words([str(word) for word in words], env)


def run_words(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command, and returns how it ended.

    Args:
        words: The command and its arguments.
        env: Its environment, by whose `PATH` the command is found.
    """
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=MAX_SECONDS, env=env
    )


def described(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a failed assertion shows of a program."""
    return f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
