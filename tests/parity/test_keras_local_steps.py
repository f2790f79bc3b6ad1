# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of `KerasEstimator` with `sync_every` are local SGD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TOLERANCE = 1e-5


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_weights_are_averaged_after_local_steps(backend):
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.keras_local_steps"],
        check=False,
        cwd=PROJECT,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["fitted"] < TOLERANCE
    assert report["resumed"] < TOLERANCE
    assert report["synchronous"] > 100 * TOLERANCE
    assert report["losses"][1] == pytest.approx(report["losses"][0], rel=1e-4)
    for words, error in report["refused"].items():
        assert error.startswith("sync_every=3 cannot be combined with"), words
        assert words in error
