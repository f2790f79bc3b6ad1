# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DeePMD-kit: its command `dp` trains on two ranks in graphs of TensorFlow 1, and freezes the
model.
"""

from __future__ import annotations

import pytest
from tests.clients.environments import client_variables, described, run_program, run_words

pytestmark = pytest.mark.timeout(900)


def test_dp_trains_on_two_ranks_and_freezes_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run_program("deepmd", "deepmd_input", tmp_path)
    assert made.returncode == 0, described(made)
    threads = {
        f"{name}_NUM_THREADS" if name == "OMP" else f"DP_{name}_OP_PARALLELISM_THREADS": "1"
        for name in ("OMP", "INTRA", "INTER")
    }
    env = client_variables("deepmd", **threads)
    command = ["dp", "--tf", "train", "--mpi-log=workers", "input.json"]
    done = run_words(["horovodrun", "-np", "2", *command], env)
    assert done.returncode == 0, described(done)
    said = done.stdout + done.stderr
    assert "broadcast global variables to other tasks" in said, described(done)
    assert "receive global variables from task#0" in said, described(done)
    # Only rank 0 writes the curve. Its columns are the step, the losses and the learning rate.
    lines = (tmp_path / "lcurve.out").read_text().splitlines()
    rows = [[float(word) for word in line.split()] for line in lines if line[0] != "#"]
    assert [row[0] for row in rows] == [0, 10, 20, 30]
    assert rows[-1][1] < rows[0][1] / 2, rows
    frozen = run_words(["dp", "--tf", "freeze", "-o", "frozen.pb"], env)
    assert frozen.returncode == 0, described(frozen)
    assert (tmp_path / "frozen.pb").stat().st_size > 10_000
