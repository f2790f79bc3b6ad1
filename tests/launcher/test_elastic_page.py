# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the page about elastic training do what the page says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launcher.conftest import until
from tests.started import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "elastic.md"
WHO = "\nimport os\nprint('pid', os.getpid(), flush=True)\n"


def test_the_script_of_the_page_survives_a_killed_process(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    script = blocks(PAGE, "python")[0]
    command = blocks(PAGE, "sh")[0]
    # It prints its rank and runs slowly, so that a fault can happen in the middle.
    script = script.replace("hvd.init()\n", f"hvd.init(){WHO}", 1)
    script = script.replace(
        "        state.epoch += 1\n",
        "        state.epoch += 1\n        __import__('time').sleep(0.2)\n",
    )
    (tmp_path / "train.py").write_text(script)
    words = shlex.split(command)
    assert words[:2] == ["farandole", "run"]
    assert words[-2:] == ["python", "train.py"]
    run = launch(*words[2:-2], sys.executable, tmp_path / "train.py", env={"OMP_NUM_THREADS": "1"})
    until(lambda: any(":epoch 2:" in line for line in run.lines()), "the second epoch")
    victim = next(line.split()[-1] for line in run.lines() if line.startswith("[3]<stdout>:pid "))
    os.kill(int(victim), signal.SIGKILL)
    assert run.wait() == 0, run.err.read_text()
    told = re.findall(r"<stdout>:epoch (\d+): loss ([\d.]+), (\d) processes", run.out.read_text())
    assert [int(epoch) for epoch, _, _ in told] == list(range(1, 21)), told
    assert {int(size) for _, _, size in told} >= {3, 4}
    assert float(told[-1][1]) < 1e-4, told
    assert "rank 3 on localhost was ended by SIGKILL" in run.err.read_text()


@pytest.mark.parametrize(
    ("number", "init"),
    [(4, "hvd.init()\n"), (5, 'dist.init_process_group("farandole")\n')],
    ids=["optimizer", "ddp"],
)
def test_the_fault_tolerant_scripts_of_the_page_survive_a_killed_process(
    launch: Callable[..., Launch], tmp_path: Path, number: int, init: str
) -> None:
    script = blocks(PAGE, "python")[number]
    assert init in script
    script = script.replace(init, f"{init}{WHO}", 1)
    script = script.replace(
        "    schedule.step()\n", "    schedule.step()\n    __import__('time').sleep(0.003)\n"
    )
    (tmp_path / "train.py").write_text(script)
    words = ("-np", "3", "--min-np", "2", sys.executable, tmp_path / "train.py")
    run = launch(*words, env={"OMP_NUM_THREADS": "1"})
    until(lambda: any(":step 200:" in line for line in run.lines()), "step 200")
    victim = next(line.split()[-1] for line in run.lines() if line.startswith("[0]<stdout>:pid "))
    os.kill(int(victim), signal.SIGKILL)
    assert run.wait() == 0, run.err.read_text()
    told = re.findall(r"<stdout>:step (\d+): loss ([\d.]+), (\d) processes", run.out.read_text())
    # No step is done twice; the one in which rank 0 is lost may have been its own to tell.
    steps = [int(step) for step, _, _ in told]
    assert len(set(steps)) == len(steps) >= 19, told
    assert steps[-1] == 2000
    assert {int(size) for _, _, size in told} >= {2, 3}
    assert float(told[-1][1]) < 1e-4, told


PATIENCE = 120.0
"""Seconds for what takes a few on an idle machine: whole frameworks are imported."""


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize(
    ("number", "pause", "name", "backend"),
    [(1, 0.1, "epoch", "torch"), (2, 0.005, "step", "tensorflow"), (3, 0.003, "epoch", "torch")],
    ids=["keras", "tensorflow", "lightning"],
)
def test_the_other_scripts_of_the_page_survive_a_killed_process(
    launch: Callable[..., Launch],
    tmp_path: Path,
    number: int,
    pause: float,
    name: str,
    backend: str,
) -> None:
    script = re.sub(
        r"(hvd\.init\(.*\))\n",
        lambda found: found[1] + WHO,
        blocks(PAGE, "python")[number],
        count=1,
    )
    loop = re.search(r"    while state\.\w+ < \w+:\n|    def training_step\(.*\n", script)
    assert loop is not None
    script = script.replace(loop[0], f"{loop[0]}        __import__('time').sleep({pause})\n")
    (tmp_path / "train.py").write_text(script)
    words = ("-np", "2", "--min-np", "1", sys.executable, tmp_path / "train.py")
    run = launch(*words, env={"OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend})
    first = {"epoch": "2", "step": "200"}[name]
    until(
        lambda: any(f":{name} {first}:" in line for line in run.lines()), "a first line", PATIENCE
    )
    victim = next(line.split()[-1] for line in run.lines() if line.startswith("[1]<stdout>:pid "))
    os.kill(int(victim), signal.SIGKILL)
    assert run.process.wait(PATIENCE) == 0, run.err.read_text()
    told = re.findall(rf"<stdout>:{name} (\d+): loss ([\d.]+), (\d) processes", run.out.read_text())
    assert told[-1][0] == {"epoch": "20", "step": "1000"}[name], told
    assert {int(size) for _, _, size in told} >= {1, 2}
    assert float(told[-1][1]) < 1e-3, told
    assert "rank 1 on localhost was ended by SIGKILL" in run.err.read_text()
