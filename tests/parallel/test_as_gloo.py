# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs that ask for Gloo, on Farandole's engine. The programs do not import Farandole."""

from __future__ import annotations

import os
import sys

import pytest
from tests.programs import program_path
from tests.sockets import free_port
from tests.started import run, together

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FARANDOLE_RUN = [sys.executable, "-m", "farandole", "run", "-np", "2"]
ENGINE_LINE = 'backend "gloo" of torch.distributed runs on the engine of Farandole'
GLOO_LINE = "groups that ran on Gloo instead of the engine of Farandole: "
TRAINED = "DDP, FSDP, tensor parallel on gloo cpu:gloo,cuda:gloo"


def numbered(rank, **more):
    """Returns the variables that torchrun sets for a rank of two."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    return {name: str(value) for name, value in names.items()} | more


def run_on_two_ranks(program, arguments=(), **variables):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [numbered(rank, **address, **variables) for rank in range(2)]
    ended = together(ranks, program_path(__file__, program), arguments=arguments)
    assert [one.status for one in ended] == [0, 0], ended
    return ended


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_the_variable_puts_the_engine_under_an_unchanged_program(setting):
    variables = {} if setting is None else {"FARANDOLE_AS_GLOO": setting}
    first, second = run_on_two_ranks("train_on_gloo", **variables)
    assert TRAINED in first.out
    assert TRAINED in second.out
    engine = "FarandoleGroup" if setting == "1" else "ProcessGroup"
    assert f"engine {engine};" in first.out
    assert f"extension {setting is not None}" in first.out
    assert first.err.count(ENGINE_LINE) == (setting == "1")
    assert ENGINE_LINE not in second.err
    assert GLOO_LINE not in first.err
