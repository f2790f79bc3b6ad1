# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MXNet on two ranks, each a process that runs `ranks.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.surface import check
from tests.surface.exceptions import reasons

RANKS = Path(__file__).with_name("ranks.py")
CHECKS = ["operations", "optimizers", "trainers", "parameters", "process_sets"]


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_of_mxnet(name):
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        "2",
        sys.executable,
        str(RANKS),
        name,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [f"[{rank}]<stdout>:{name}" for rank in (0, 1)]


def test_names_of_mxnet_take_horovods_arguments():
    """The sources are compared where MXNet is not; here the functions themselves."""
    facts = check.facts()
    known = {entry for entry in reasons() if entry.startswith("horovod.mxnet")}
    for module in (name for name in facts if name.startswith("horovod.mxnet")):
        found = check.differences(module.replace("horovod", "farandole", 1), facts[module])
        assert [what for entry, what in found if f"{module}: {entry}" not in known] == []
