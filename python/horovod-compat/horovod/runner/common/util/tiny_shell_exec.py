# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs a command and keeps what it says."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from horovod.runner.common.util import safe_shell_exec

if TYPE_CHECKING:
    from collections.abc import Mapping


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Runs a command of the shell.

    Args:
        command: The command.
        env: Its environment; default: this process's.

    Returns:
        What it wrote to both streams, and its exit code; `None` when it could not be started.
    """
    output = io.StringIO()
    try:
        code = safe_shell_exec.execute(command, env=env, stdout=output, stderr=output)
    except OSError as error:
        print(f"cannot be started: {command}: {error}", file=sys.stderr)  # noqa: T201 - as Horovod tells
        return None
    return output.getvalue(), code
