# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The estimator's tests once more, on Keras's other backends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_the_estimator_works_on_every_backend_of_keras(backend):
    tests = [str(Path(__file__).with_name(name)) for name in ("test_keras_estimator.py", "test_keras_model.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": backend}, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:]
