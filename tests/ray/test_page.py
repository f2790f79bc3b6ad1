# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The script of the page about Ray does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.started import blocks

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "ray.md"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_first_script_of_the_page_trains_one_model_on_two_ranks(tmp_path):
    script = blocks(PAGE, "python")[0]
    assert "ray.init()" in script
    script = script.replace("ray.init()", 'ray.init(address="local", num_cpus=2, include_dashboard=False)')
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = re.search(r"\[\(0, ([\d.e-]+)\), \(1, ([\d.e-]+)\)\]", ended.stdout)
    assert told, ended.stdout
    assert told[1] == told[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            "ray_torch_digits.py",
            r"loss (?P<first>[\d.]+) on each of 2 ranks\nloss (?P<second>[\d.]+) on each of 2 ranks",
        ),
        ("ray_tune_digits.py", r"best learning rate 0\.(5|125): accuracy 0\.9\d+"),
    ],
)
def test_the_examples_train_digits(example, said):
    options = ["--trials", "2"] if "tune" in example else []
    ended = subprocess.run(
        [sys.executable, EXAMPLES / example, *options], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = re.search(said, ended.stdout)
    assert told, ended.stdout
    if "second" in told.groupdict():
        assert float(told["second"]) < float(told["first"]), "the actors have kept the model"
