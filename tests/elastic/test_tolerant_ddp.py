# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`FaultTolerantDataParallel`: ranks are lost within a step of DDP, and the others finish it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.elastic.test_tolerant import ALONE, STEPS, expected, is_close, members, run, same

SMALL = {"bucket_cap_mb": 0.0001}
"""Several buckets from the second step on."""


@pytest.mark.parametrize("options", [SMALL, {"gradient_as_bucket_view": True}], ids=["buckets", "views"])
def test_nothing_lost_nothing_changed(options: dict[str, Any]) -> None:
    found, _ = run("-np", 2, "--min-np", 1, ddp=options)
    assert is_close(same(found), expected([[0, 1]] * STEPS))


def test_a_rank_that_is_lost_in_its_backward_pass_is_not_in_the_average() -> None:
    found, said = run(*ALONE, ends=[[0, 5, "within"]], ddp=SMALL)
    assert is_close(same(found), expected(members({0: 5})))
    assert [one["sizes"] for one in found] == [[4] * 5 + [3] * 7] * 3
    assert "rank 0 on localhost was ended by SIGKILL" in said


def test_a_rank_whose_reduction_failed_gets_the_result_of_those_who_have_it() -> None:
    found, _ = run(*ALONE, ends=[[1, 5, "fails"], [2, 5, "fails"]], ddp=SMALL)
    assert is_close(same(found), expected(members({})))
    assert [one["seen"] for one in found] == [STEPS] * 4
