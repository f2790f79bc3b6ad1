# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the page about Ray do what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.started import blocks

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "ray.md"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_scripts_of_the_page_run_one_after_the_other(tmp_path):
    script = "\n".join(blocks(PAGE, "python"))
    assert script.count("ray.init()") == 1
    script = script.replace(
        "ray.init()", 'ray.init(address="local", num_cpus=3, include_dashboard=False)'
    )
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = re.search(r"\[\(0, ([\d.e-]+)\), \(1, ([\d.e-]+)\)\]", ended.stdout)
    assert told, ended.stdout
    assert told[1] == told[2]
    assert re.search(r"^\[20, 20(, 20)?\]$", ended.stdout, re.MULTILINE), "the elastic job"
    assert re.search(r"^(1\.[7-9]|2\.[0-2])\d*$", ended.stdout, re.MULTILINE), (
        "what the estimator's model predicts"
    )
    assert re.search(rf"^1 {tmp_path}/ray_results/.*checkpoint", ended.stdout, re.MULTILINE), (
        "the last checkpoint"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            "ray_torch_digits.py",
            (
                r"loss (?P<first>[\d.]+) on each of 2 ranks\nloss (?P<second>[\d.]+) on each of 2 "
                r"ranks"
            ),
        ),
        ("ray_tune_digits.py", r"best learning rate 0\.(5|125): accuracy 0\.9\d+"),
    ],
)
def test_the_examples_train_digits(example, said):
    options = ["--trials", "2"] if "tune" in example else []
    ended = subprocess.run(
        [sys.executable, EXAMPLES / example, *options],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = re.search(said, ended.stdout)
    assert told, ended.stdout
    if "second" in told.groupdict():
        assert float(told["second"]) < float(told["first"]), "the actors have kept the model"
