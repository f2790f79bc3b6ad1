# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MXNet on two ranks, each a process that runs `ranks.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests import horovod_surface

import farandole.mxnet

RANKS = Path(__file__).with_name("ranks.py")
CHECKS = ["operations", "optimizers", "trainers", "parameters", "process_sets"]


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_of_mxnet(check):
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", sys.executable, str(RANKS), check]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [f"[{rank}]<stdout>:{check}" for rank in (0, 1)]


def test_names_of_mxnet_take_horovods_arguments():
    names = [*horovod_surface.COMMON, *horovod_surface.SIX]
    assert list(horovod_surface.problems(farandole.mxnet, horovod_surface.MXNET, names)) == []
