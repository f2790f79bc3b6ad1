# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Imports of a process of Keras on torch: no other backend, and no compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.programs import program_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = program_path(__file__, "import_on_torch")


def test_keras_on_torch_imports_no_tensorflow_to_save_a_model():
    env = os.environ | {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
