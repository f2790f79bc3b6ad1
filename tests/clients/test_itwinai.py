# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""itwinai: its trainer with `strategy="horovod"`, and the calls of the strategy."""

from __future__ import annotations

import pytest
from tests.clients.environments import client_variables, described, run_words
from tests.programs import program_path

pytestmark = pytest.mark.timeout(600)


def test_a_trainer_trains_with_the_horovod_strategy(tmp_path):
    program = str(program_path(__file__, "itwinai_trainer"))
    words = ["horovodrun", "-np", "2", "python", program, str(tmp_path)]
    done = run_words(words, client_variables("itwinai"))
    assert done.returncode == 0, described(done)
    for rank in range(2):
        assert f"rank {rank} has the weights of one process" in done.stdout, described(done)
