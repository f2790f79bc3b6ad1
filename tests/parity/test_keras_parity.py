# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of `KerasEstimator` train what Keras's own `fit` trains on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
RELATIVE_TOLERANCE = 1e-5
HALF_TOLERANCE = 1e-3
"""float16 has 11 bits, and parts of a batch are rounded apart."""


def run_cells(backend, length):
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.keras_cells", length],
        check=False,
        cwd=PROJECT,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280 if length == "short" else 1100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_report(report):
    assert not report["untried"], "no cell tries these losses"
    wrong = {
        cell: differences
        for cell, differences in report["cells"]
        if max(differences.values()) > RELATIVE_TOLERANCE
    }
    assert not wrong, "\n".join(f"{cell}: {found}" for cell, found in wrong.items())
    assert report["half"] < HALF_TOLERANCE
    for name, error in report["refused"].items():
        assert error.startswith("ValueError: "), f"{name}: {error or 'not refused'}"
        wanted = name.split(": ") if ": " in name else ["loss_reduction"]
        assert all(word in error for word in wanted), f"{name}: {error}"


def test_fits_train_what_keras_trains_on_one_process():
    check_report(run_cells("torch", "short"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_every_loss_trains_what_keras_trains_on_one_process(backend):
    check_report(run_cells(backend, "whole"))
