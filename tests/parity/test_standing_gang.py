# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Standing processes of tests: a fit that ends one has the reason, and the next fit has others."""

from __future__ import annotations

import os

import pytest
from tests.parity.gang import StandingGang


def test_a_process_that_ends_is_named_and_the_next_run_has_others():
    gang = StandingGang(2)
    try:
        first = gang.run(os.getpid)
        with pytest.raises(RuntimeError, match=r"ended before its answer: .*exit"):
            gang.run(os._exit, (3,))
        assert set(first).isdisjoint(gang.run(os.getpid))
    finally:
        gang.close()
