# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the page about searches do what the page says, together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.started import blocks

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "tuning.md"

BEFORE = """
import ray
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
ray.init(address="local", num_cpus=2, include_dashboard=False)
"""

AFTER = "print(len(study.trials), len(again.trials), len(trials), len(fits.trials))"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_searches_of_the_page_run(tmp_path):
    pieces = blocks(PAGE, "python")
    assert len(pieces) == 7
    (tmp_path / "search.py").write_text("\n".join([BEFORE, *pieces, AFTER]))
    ended = subprocess.run(
        [sys.executable, "search.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "HOME": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\{'lr': 0\.\d+\}", ended.stdout), "the best parameters of the study"
    assert "{'lr': 0.2}" in ended.stdout, "the best trial of Ray Tune"
    told = re.search(
        r"^\[np\.float64\(([\d.]+)\), np\.float64\(([\d.]+)\)\]$", ended.stdout, re.MULTILINE
    )
    assert told, ended.stdout
    assert float(told[2]) < float(told[1]), "Spark's tuner prefers the higher rate, too"
    assert "4 2 4 4" in ended.stdout
