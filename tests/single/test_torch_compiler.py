# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The compiler of torch in a training process: absent until it is needed, and then complete."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.programs import program_path

pytestmark = pytest.mark.timeout(120)

LIGHTNING = program_path(__file__, "train_without_compiler")


def test_lightning_trains_by_distributed_data_parallel_without_the_compiler_and_with_it():
    subprocess.run([sys.executable, LIGHTNING], check=True, timeout=110)


@pytest.mark.parametrize("need", ["a module below it", "a compiled function", "an attribute"])
def test_the_compiler_comes_with_the_first_need_and_optimizers_continue(need):
    program = program_path(__file__, "need_compiler")
    subprocess.run([sys.executable, program, need], check=True, timeout=110)
