# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs in the manner of notebooks that were published for Databricks, in the main environment.

They import `horovod`, `sparkdl` and `petastorm`, and nothing of Farandole.
"""

from __future__ import annotations

import os
import sys

import pytest
from tests.clients.environments import described, run_words
from tests.programs import program_path

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", ["notebook_converter", "notebook_keras_estimator"])
def test_a_notebook_runs_unchanged(tmp_path, name):
    program = program_path(__file__, name)
    assert "farandole" not in program.read_text().partition('"""')[2]
    env = os.environ | {"PYSPARK_PYTHON": sys.executable, "FARANDOLE_DBFS_ROOT": str(tmp_path)}
    done = run_words([sys.executable, str(program), str(tmp_path)], env)
    assert done.returncode == 0, described(done)
    assert done.stdout.splitlines()[-1] == "done", described(done)
    if name == "notebook_converter":
        messages = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
        # Two runs of three epochs.
        assert [line.partition(":")[0] for line in messages] == [
            "epoch 0",
            "epoch 1",
            "epoch 2",
        ] * 2
        assert not any((tmp_path / "cache").rglob("*.parquet"))
