# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Tests of the Keras estimator whose code depends on Keras's backend, on the other two backends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spark.deployments import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200 * PATIENCE)]


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_the_estimator_works_on_every_backend_of_keras(backend):
    names = ("test_keras_estimator.py", "test_keras_model.py", "test_keras_estimator_elastic.py")
    tests = [str(Path(__file__).with_name(name)) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "backends",
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    env = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=1100 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
