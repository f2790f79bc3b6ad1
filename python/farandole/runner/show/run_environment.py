# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The environment in a run's record: versions, host, Spark, and the code, but no variables and no
arguments.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_REPORTED_LIBRARIES: Final = (
    "torch", "lightning", "pytorch_lightning", "tensorflow", "keras", "jax", "pyspark", "numpy",
    "pandas", "pyarrow",
    "ray",
)  # fmt: skip
_GIT_TIMEOUT = 2.0


def describe_environment() -> dict[str, Any]:
    """Returns the versions of loaded packages, the host, and Spark's application."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for name in ("farandole", *_REPORTED_LIBRARIES):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    context = getattr(
        getattr(sys.modules.get("pyspark"), "SparkContext", None), "_active_spark_context", None
    )
    if context is not None:
        found |= {"Spark master": context.master, "Spark application": context.applicationId}
    return found


def describe_code() -> dict[str, Any]:
    """Returns the program, and the commit of its directory where git knows it."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    is_file = program is not None and program.is_file()
    found: dict[str, Any] = (
        {"program": str(program.absolute())} if program is not None and is_file else {}
    )
    directory = program.absolute().parent if program is not None and is_file else Path.cwd()
    commit = _run_git(directory, "rev-parse", "HEAD")
    if commit:
        found["commit"] = commit
        found["branch"] = _run_git(directory, "rev-parse", "--abbrev-ref", "HEAD")
        changed = _run_git(directory, "status", "--porcelain", "--untracked-files=no")
        found["changed files"] = None if changed is None else len(changed.splitlines())
    return {name: value for name, value in found.items() if value is not None}


def _run_git(directory: Path, *arguments: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        completed = subprocess.run(  # noqa: S603 - the words are those above
            [program, "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None
