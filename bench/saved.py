# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes results below bench/results, with the commit and the machine."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit measured, with a mark when the tree differs from it, results aside."""
    git = ["git", "-C", str(RESULTS)]
    name = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = [
        *git,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ":/",
        ":!/bench/results",
    ]
    dirty = subprocess.run(changed, capture_output=True, text=True, check=False)
    return (name.stdout.strip() or "unknown") + ("-dirty" if dirty.stdout.strip() else "")


def processor() -> str:
    """Its name, as the kernel has it: two kinds of machine differ in every ratio that memory
    decides.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def save(name: str, results: dict[str, Any], **extra: Any) -> None:
    """Writes one file.

    Args:
        name: Its name, without the ending.
        results: What was measured.
        **extra: More about the run, e.g. when it began.
    """
    machine = {
        "cores": os.cpu_count(),
        "processor": processor(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    told = {"commit": commit(), "machine": machine, **extra, **results}
    (RESULTS / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
