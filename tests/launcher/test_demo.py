# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole demo`: the first fit after the installation."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def demo(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a directory."""
    words = [sys.executable, "-m", "farandole", "demo", *flags]
    return subprocess.run(
        words, cwd=directory, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--local", "--store", "runs"], "two processes of this host, without Spark"),
        pytest.param(["--store", "runs"], r"Spark \S+, local\[2\]", marks=pytest.mark.slow),
    ],
)
def test_the_demo_learns_and_ends_with_the_command_that_shows_the_run(tmp_path, flags, where):
    done = demo(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(f"training on {where}", lines[0])
    assert lines[1].split() == [
        "epoch",
        "loss",
        "accuracy",
        "val_loss",
        "val_accuracy",
        "seconds",
        "rows",
    ]
    assert float(lines[11].split()[4]) > 0.9  # a guess is right in one of ten cases
    assert re.fullmatch(
        r"see the run in the browser: (farandole|\S+ -m farandole) ui runs", lines[-1]
    )
    assert list((tmp_path / "runs" / "runs").iterdir()), "the run is in the store"


def test_a_missing_package_is_named_with_its_extra(tmp_path):
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name in ('torch', 'pandas') else "
        "find(name, *more)\n"
        "from farandole.__main__ import main\n"
        "sys.argv = ['farandole', 'demo']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "farandole: the demo needs torch, pandas: pip install 'farandole[torch,spark]'\n"
    )
    assert list(tmp_path.iterdir()) == []
