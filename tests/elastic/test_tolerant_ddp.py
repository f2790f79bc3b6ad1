# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`FaultTolerantDataParallel`: ranks are lost within a step of DDP, and the others finish it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.test_tolerant import ALONE, STEPS, expected, is_close, members, run, same

SMALL = {"bucket_cap_mb": 0.0001}
"""Several buckets from the second step on."""


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, {"gradient_as_bucket_view": True}], ids=["buckets", "views"])
def test_nothing_lost_nothing_changed(options: dict[str, Any]) -> None:
    found, _ = run("-np", 2, "--min-np", 1, ddp=options)
    assert is_close(same(found), expected([[0, 1]] * STEPS))


def test_a_rank_that_is_lost_in_its_backward_pass_is_not_in_the_average_and_no_step_is_repeated() -> None:
    found, said = run(*ALONE, ends=[[0, 3, "within"], [1, 6, "fails"]], ddp=SMALL)
    assert is_close(same(found), expected(members({0: 3})))
    assert [one["sizes"] for one in found] == [[4] * 3 + [3] * 9] * 3
    assert [one["seen"] for one in found] == [STEPS] * 3
    assert [one["identity"] for one in found if one["taken"]] == [1]
    assert "rank 0 on localhost was ended by SIGKILL" in said


@pytest.mark.slow
def test_ranks_whose_reduction_failed_get_the_result_of_those_who_have_it() -> None:
    found, _ = run(*ALONE, ends=[[0, 5, "fails"], [2, 5, "fails"]], ddp={"gradient_as_bucket_view": True})
    assert is_close(same(found), expected(members({})))
    assert [one["seen"] for one in found] == [STEPS] * 4
    assert {one["identity"] for one in found if one["taken"]} == {0, 2}


@pytest.mark.slow
def test_a_step_is_repeated_without_the_only_rank_that_had_finished_it_if_that_is_lost_then() -> None:
    ends = [[0, 6, "recovering"], *([who, 5, "fails"] for who in (1, 2, 3))]
    found, _ = run(*ALONE, ends=ends, ddp=SMALL)
    assert is_close(same(found), expected(members({0: 5})))
    assert [one["taken"] for one in found] == [0] * 3


@pytest.mark.slow
def test_a_rank_that_is_lost_after_its_backward_pass_was_in_the_average() -> None:
    found, _ = run(*ALONE, ends=[[2, 5, "after"]], ddp=SMALL)
    assert is_close(same(found), expected(members({2: 6})))


@pytest.mark.slow
def test_a_rank_that_is_lost_during_a_step_is_in_its_average_on_all_ranks_or_on_none() -> None:
    found, _ = run(*ALONE, ends=[[3, 5, "during"]], ddp=SMALL)
    weights = same(found)
    assert any(is_close(weights, expected(members({3: step}))) for step in (5, 6, 7))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_others_recover_is_left_out_too() -> None:
    found, _ = run(*ALONE, ends=[[1, 4, "within"], [2, 4, "recovering"]], ddp={"gradient_as_bucket_view": True})
    assert is_close(same(found), expected(members({1: 4, 2: 4})))
    assert len(found) == 2


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_leaves_after_a_step_and_is_no_failure() -> None:
    found, said = run(*ALONE, ends=[[3, 4, "asked"]], ddp=SMALL)
    assert len(found) == 3
    assert "was ended by" not in said
    weights = same(found)
    assert any(is_close(weights, expected(members({3: step}))) for step in range(5, STEPS + 1))


@pytest.mark.slow
def test_a_rank_that_joins_gets_parameters_buffers_state_and_what_is_shared() -> None:
    flags = ("-np", 3, "--min-np", 1, "--blacklist-cooldown-range", 1, 2)
    found, _ = run(*flags, ends=[[1, 3, "within"]], steps=5, grows=3, ddp=SMALL)
    assert len(found) == 3
    (new,) = (one for one in found if one["identity"] >= 100)
    assert new["first"] > 3
    (steps,) = {one["steps"] for one in found}
    assert [one["seen"] for one in found] == [steps] * 3
    same(found)


def test_outside_of_an_elastic_job_a_lost_rank_is_the_error_that_it_was() -> None:
    with pytest.raises(AssertionError, match="FarandoleInternalError"):
        run("-np", 2, ends=[[1, 3, "within"]], ddp=SMALL)


def test_what_cannot_be_kept_through_a_change_is_refused() -> None:
    import farandole.torch as hvd
    from farandole.torch.distributed import FaultTolerantDataParallel

    def make(network: torch.nn.Module, **options: Any) -> FaultTolerantDataParallel:
        return FaultTolerantDataParallel(network, torch.optim.SGD(network.parameters(), lr=0.1), **options)

    with pytest.raises(ValueError, match=r'needs init_process_group\("farandole"\) first'):
        make(torch.nn.Linear(2, 2))
    dist.init_process_group("farandole", init_method="farandole://")
    try:
        for name in ("broadcast_buffers", "find_unused_parameters", "static_graph"):
            with pytest.raises(ValueError, match=f"cannot be used with {name}"):
                make(torch.nn.Linear(2, 2), **{name: True})
        with pytest.raises(ValueError, match="cannot be used with SyncBatchNorm"):
            make(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))
        with pytest.raises(ValueError, match=r"no join\(\)"):
            make(torch.nn.Linear(2, 2), broadcast_buffers=False).join()
        dist.new_group([0])
        with pytest.raises(ValueError, match="groups of new_group"):
            make(torch.nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()
        hvd.shutdown()
