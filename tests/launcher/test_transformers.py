# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hugging Face's Trainer and Accelerate under `farandole run`, on a host without an accelerator."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.programs import program_path
from tests.started import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

PAGE = Path(__file__).parents[2] / "docs/user-guide/transformers.md"
LATER_BLOCKS = 3
"""Blocks of Python on the page from the elastic script on."""
NO_GPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def output_of_two_ranks(launch: Callable[..., Launch], program: Path) -> str:
    """Returns the output of a program that has succeeded."""
    run = launch("-np", 2, sys.executable, program, env=NO_GPU)
    assert run.wait() == 0, run.err.read_text()
    return run.out.read_text()


def test_the_script_of_the_page_trains_on_two_ranks(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(blocks(PAGE, "python")[0].replace('"out"', f'"{tmp_path}/out"'))
    output = output_of_two_ranks(launch, path)
    # 8 epochs of 256 rows, 16 a step on each of two ranks: one rank would take 128 steps.
    ((processes, steps, loss),) = re.findall(r"(\d+) processes, (\d+) steps, loss (\S+)", output)
    assert (processes, steps) == ("2", "64")
    assert float(loss) < 0.5


def test_a_loop_of_accelerate_trains_one_model_on_two_ranks(
    launch: Callable[..., Launch],
) -> None:
    output = output_of_two_ranks(launch, program_path(__file__, "train_with_accelerate"))
    for rank in range(2):
        assert f"rank {rank} of 2, 4 batches, farandole, trainer of 2" in output


def test_an_import_after_accelerate_has_counted_one_process_raises(
    launch: Callable[..., Launch],
) -> None:
    output = output_of_two_ranks(launch, program_path(__file__, "count_before_import"))
    said = "FarandoleUsageError: 2 ranks of this job, but Accelerate counts 1: each would train a"
    assert output.count(said) == 2


def test_a_trainer_reads_a_loader_and_resumes_in_an_epoch(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    program = program_path(__file__, "trainer_with_loader")
    run = launch("-np", 2, sys.executable, program, str(tmp_path), env=NO_GPU)
    assert run.wait() == 0, run.err.read_text()
    output = run.out.read_text()
    # 100 rows are 6 batches of 8 on each of two ranks: 3 steps of 2 batches in each of 3 epochs.
    for rank in range(2):
        wanted = "9 steps, 96 rows in an epoch, resumed alike: True, batches alike: True"
        assert f"rank {rank}: {wanted}, examples: 100" in output
    for said in (
        "['batch_size']: the loader has batches of 4",
        "['tail']: the last step",
        "1 rank",
    ):
        assert output.count(said) == 2, said


@pytest.mark.parametrize("victim", [0, 1])
def test_an_elastic_trainer_continues_after_a_loss(
    launch: Callable[..., Launch], tmp_path: Path, victim: int
) -> None:
    script = blocks(PAGE, "python")[-LATER_BLOCKS].replace('"out"', f'"{tmp_path}/out"')
    path = tmp_path / "train_elastic.py"
    fault = program_path(__file__, "kill_rank_of_trainer").read_text()
    begin = "    result = state.train(trainer)"
    assert begin in script
    call = f"    kill_rank_at_step(trainer, {victim}, 27, {str(tmp_path / 'killed')!r})\n"
    path.write_text(fault + script.replace(begin, call + begin))
    _, _, *words, _, name = shlex.split(blocks(PAGE, "sh")[0])
    assert name == path.name
    cooldown = ("--blacklist-cooldown-range", 600, 3600)
    run = launch(*words, *cooldown, sys.executable, path, env=NO_GPU)
    assert run.wait() == 0, run.err.read_text()
    output = run.out.read_text()
    # Two processes take 8 steps for an epoch. Step 24 is the end of the third one, so one process
    # continues at step 48 of 128.
    assert re.findall(r"begins at step (\d+) with epoch (\S+)", output)[-1] == ("48", "3.0")
    ((processes, steps, loss),) = re.findall(r"(\d+) processes, (\d+) steps, loss (\S+)", output)
    assert (processes, steps) == ("1", "128")
    assert float(loss) < 0.5
    names = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert names == ["checkpoint-120", "checkpoint-128", "earlier-worlds"]


def test_a_trainer_trains_an_adapter_of_peft(launch: Callable[..., Launch], tmp_path: Path) -> None:
    program = program_path(__file__, "train_adapter")
    run = launch("-np", 2, sys.executable, program, str(tmp_path), env=NO_GPU)
    assert run.wait() == 0, run.err.read_text()
    for rank in range(2):
        wanted = f"rank {rank}: adapter changed True, base changed False, equal True"
        assert wanted in run.out.read_text()


def test_the_run_viewer_gets_the_curves_of_a_trainer(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    program, store = program_path(__file__, "trainer_with_progress"), tmp_path / "store"
    line = ("-np", 2, "--ui-store", store, sys.executable, program, str(tmp_path / "out"))
    run = launch(*line, env=NO_GPU)
    assert run.wait() == 0, run.err.read_text()
    said = re.search(r"losses (\[.*\]) evaluated (\[.*\])", run.out.read_text())
    assert said is not None
    losses, evaluated = (json.loads(numbers) for numbers in said.groups())
    ((logs),) = store.glob("runs/*/logs")
    steps = [json.loads(line) for line in (logs / "steps.jsonl").read_text().splitlines()]
    # The viewer keeps at most one step of a second.
    assert steps[0]["epoch"] in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    assert {step["loss"] for step in steps} <= set(losses)
    assert all(step["rows_per_second"] > 0 for step in steps)
    epochs = [json.loads(line) for line in (logs / "history.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in epochs] == [0, 1]
    means = [sum(losses[:4]) / 4, sum(losses[4:]) / 2]
    assert [entry["train"]["loss"] for entry in epochs] == pytest.approx(means, rel=1e-9)
    assert [entry["validation"]["loss"] for entry in epochs] == evaluated
    assert {"grad_norm"} in [set(metric) for metric in epochs[0]["train"]["all_metrics"]]
    (record,) = (json.loads(path.read_text()) for path in store.glob("runs/*/_record.json"))
    assert (record["state"], record["done"]) == ("ended", 2)
    assert len(record["ranks"]) == 2
    assert "checkpoint noted: True" in run.out.read_text()
