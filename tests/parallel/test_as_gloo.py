# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs that ask for Gloo, on Farandole's engine. The programs do not import Farandole."""

from __future__ import annotations

import sys

import pytest
from tests.parallel.test_torch_distributed_groups import free_port
from tests.programs import program_path
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


def test_torchrun_puts_the_engine_under_accelerate():
    program = str(program_path(__file__, "train_with_accelerate"))
    ended = run([*TORCHRUN, program], {"FARANDOLE_AS_GLOO": "1"})
    assert ended.status == 0, ended.err
    for rank in range(2):
        assert f"rank {rank} of 2, 4 batches, gloo, engine FarandoleGroup" in ended.out
    assert ended.err.count(ENGINE_LINE) == 1


def test_the_command_counts_the_groups_that_stay_on_gloo(tmp_path):
    program = str(program_path(__file__, "groups_beside_gloo"))
    ended = run([*FARANDOLE_RUN, "--as-gloo", sys.executable, program, str(tmp_path)])
    assert ended.status == 0, ended.err
    assert ended.out.count("engine FarandoleGroup") == 2
    assert ended.err.count(ENGINE_LINE) == 1
    lines = {line.partition(GLOO_LINE)[2] for line in ended.err.splitlines() if GLOO_LINE in line}
    alone = "1 of other ranks than the job of Farandole"
    # Rank 1 is the first rank only of its group of one.
    assert lines == {f"{alone}, 1 of several backends, 1 whose default group is on Gloo", alone}


@pytest.mark.parametrize(
    "first_line",
    [
        "import farandole.torch",
        "import farandole.torch.distributed",
        "from farandole.torch.distributed import as_gloo; as_gloo()",
    ],
)
def test_a_program_may_import_farandole_first(first_line):
    code = (
        f"{first_line}\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(type(dist.group.WORLD).__name__, dist.get_backend(), dist.get_rank())\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\n"
        "print(type(dist.group.WORLD).__name__, dist.get_backend(), dist.get_rank())\n"
    )
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    ended = run([sys.executable, "-c", code], {"HOROVOD_AS_GLOO": "yes", **alone})
    assert ended.out.split() == ["FarandoleGroup", "gloo", "0"] * 2, ended.err


def test_as_gloo_is_too_late_after_the_first_group():
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from farandole.torch.distributed import as_gloo\n"
        "as_gloo()\n"
    )
    ended = run([sys.executable, "-c", code])
    assert "as_gloo() must be called before the first process group" in ended.err


def test_a_value_that_is_no_boolean_is_named():
    ended = run([sys.executable, "-c", "import torch"], {"FARANDOLE_AS_GLOO": "maybe"})
    assert ended.status != 0
    assert "FARANDOLE_AS_GLOO must be a boolean" in ended.err


def test_the_command_refuses_a_torch_that_calls_no_plugins():
    command = [*FARANDOLE_RUN, "--as-gloo", sys.executable, "-c", "pass"]
    ended = run(command, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert ended.status != 0
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in ended.err


def test_a_model_that_transformers_splits_generates_what_the_whole_one_does(tmp_path):
    program = str(program_path(__file__, "generate_in_parts"))
    ended = run([*TORCHRUN, program, str(tmp_path)], {"FARANDOLE_AS_GLOO": "1"})
    assert ended.status == 0, ended.err
    for rank in range(2):
        assert f"rank {rank}: 64 of 128 rows, gloo, engine FarandoleGroup" in ended.out
