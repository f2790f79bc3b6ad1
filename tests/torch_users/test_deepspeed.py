# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DeepSpeed on the CPU, under the command's option `--as-gloo`, next to Gloo itself.

`make test-torch` makes the environment of DeepSpeed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.programs import program_path
from tests.started import run

PYTHON = Path(__file__).parents[2] / ".tools/deepspeed/bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="DeepSpeed is not installed: make test-torch does it"
    ),
]
LINE = re.compile(r"rank (\d), gloo, engine (\w+): ([\d. ]+)")


def trained_losses(stage: int, as_gloo: str, folder: Path) -> tuple[set[str], list[list[float]]]:
    """Trains on two ranks; returns the classes of the default group and the losses by rank.

    A lock of a build that was interrupted makes DeepSpeed wait forever, so builds go to `folder`.
    """
    command = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = str(program_path(__file__, "train_with_deepspeed"))
    variables = {"FARANDOLE_AS_GLOO": as_gloo, "TORCH_EXTENSIONS_DIR": str(folder)}
    ended = run([*command, program, str(stage)], variables)
    assert ended.status == 0, ended.err
    found = sorted(LINE.findall(ended.out))
    assert [rank for rank, _, _ in found] == ["0", "1"], ended.out
    losses = [[float(number) for number in numbers.split()] for _, _, numbers in found]
    return {engine for _, engine, _ in found}, losses


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_of_deepspeed_has_the_losses_that_gloo_gives(stage: int, tmp_path: Path) -> None:
    engines, losses = trained_losses(stage, "1", tmp_path)
    gloos, expected = trained_losses(stage, "0", tmp_path)
    assert len(gloos) == 1
    assert engines.isdisjoint(gloos)
    for own, theirs in zip(losses, expected, strict=True):
        assert len(own) == 20
        assert own[-1] < own[0] / 2
        assert own == pytest.approx(theirs, rel=1e-4, abs=1e-5)
