# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`FaultTolerantDataParallel`: ranks are lost within a step of DDP, and the others finish it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.test_tolerant import ALONE, STEPS, expected, is_close, members, run, same

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.torch.distributed import FaultTolerantDataParallel

SMALL = {"bucket_cap_mb": 0.0001}
"""Several buckets from the second step on."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [SMALL, {"gradient_as_bucket_view": True}], ids=["buckets", "views"]
)
def test_nothing_lost_nothing_changed(options: dict[str, Any]) -> None:
    found, _ = run("-np", 2, "--min-np", 1, ddp=options)
    assert is_close(same(found), expected([[0, 1]] * STEPS))


def test_a_rank_lost_in_its_backward_pass_is_not_in_the_average_and_no_step_is_repeated() -> None:
    found, said = run(*ALONE, ends=[[0, 3, "within"], [1, 6, "fails"]], ddp=SMALL)
    assert is_close(same(found), expected(members({0: 3})))
    assert [one["sizes"] for one in found] == [[4] * 3 + [3] * 9] * 3
    assert [one["seen"] for one in found] == [STEPS] * 3
    assert [one["identity"] for one in found if one["taken"]] == [1]
    assert "rank 0 on localhost was ended by SIGKILL" in said


@pytest.mark.slow
def test_ranks_whose_reduction_failed_get_the_result_of_ranks_that_have_it() -> None:
    found, _ = run(
        *ALONE, ends=[[0, 5, "fails"], [2, 5, "fails"]], ddp={"gradient_as_bucket_view": True}
    )
    assert is_close(same(found), expected(members({})))
    assert [one["seen"] for one in found] == [STEPS] * 4
    assert {one["identity"] for one in found if one["taken"]} == {0, 2}


@pytest.mark.slow
def test_a_step_is_repeated_without_the_only_rank_that_had_finished_it_if_that_is_lost_then() -> (
    None
):
    ends = [[0, 6, "recovering"], *([who, 5, "fails"] for who in (1, 2, 3))]
    found, _ = run(*ALONE, ends=ends, ddp=SMALL)
    assert is_close(same(found), expected(members({0: 5})))
    assert [one["taken"] for one in found] == [0] * 3


@pytest.mark.slow
def test_a_rank_that_is_lost_after_its_backward_pass_was_in_the_average() -> None:
    found, _ = run(*ALONE, ends=[[2, 5, "after"]], ddp=SMALL)
    assert is_close(same(found), expected(members({2: 6})))


@pytest.mark.slow
def test_ranks_whose_own_collective_fails_before_the_step_rejoin_in_the_next_backward_pass() -> (
    None
):
    found, _ = run(*ALONE, ends=[[2, 5, "after"]], ddp=SMALL, averages=True)
    assert is_close(same(found), expected(members({2: 6})))
    assert sum(one["rejoined"] for one in found) > 0


@pytest.mark.slow
def test_a_rank_that_is_lost_during_a_step_is_in_its_average_on_all_ranks_or_on_none() -> None:
    found, _ = run(*ALONE, ends=[[3, 5, "during"]], ddp=SMALL)
    weights = same(found)
    assert any(is_close(weights, expected(members({3: step}))) for step in (5, 6, 7))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_others_recover_is_left_out_too() -> None:
    found, _ = run(
        *ALONE, ends=[[1, 4, "within"], [2, 4, "recovering"]], ddp={"gradient_as_bucket_view": True}
    )
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


@pytest.mark.slow
def test_outside_of_an_elastic_job_a_lost_rank_is_the_error_that_it_was() -> None:
    with pytest.raises(AssertionError, match="FarandoleInternalError"):
        run("-np", 2, ends=[[1, 3, "within"]], ddp=SMALL)


def test_what_cannot_be_kept_through_a_change_is_refused() -> None:
    import farandole.torch as hvd
    from farandole.torch.distributed import FaultTolerantDataParallel

    def make(network: torch.nn.Module, **options: Any) -> FaultTolerantDataParallel:
        return FaultTolerantDataParallel(
            network, torch.optim.SGD(network.parameters(), lr=0.1), **options
        )

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


LIMIT = timedelta(seconds=77)


class Averaged(torch.nn.Linear):
    """A layer that assigns another tensor to its buffer in each step."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("average", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = super().forward(inputs)
        self.average = 0.9 * self.average + 0.1 * result.detach().mean(0)
        return result


class Alone:
    """A model in a world of this process alone."""

    def __init__(self) -> None:
        from farandole.torch.distributed import FaultTolerantDataParallel

        self.network = Averaged()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.model: FaultTolerantDataParallel | None = FaultTolerantDataParallel(
            self.network, self.optimizer
        )
        self.tolerance = self.model._tolerance

    def backward(self) -> None:
        assert self.model is not None
        self.model(torch.ones(3, 2)).sum().backward()


@pytest.fixture
def alone() -> Iterator[Alone]:
    import farandole.torch as hvd
    import farandole.torch.distributed  # noqa: F401 - the backend
    from farandole.torch import _fault_tolerance

    dist.init_process_group("farandole", init_method="farandole://", timeout=LIMIT)
    try:
        yield Alone()
    finally:
        # The traceback of a failed test has references to its model.
        _fault_tolerance._owners.clear()
        dist.destroy_process_group()
        hvd.shutdown()


def test_rejoin_before_the_step_of_the_optimizer_waits_for_the_next_backward_pass(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.torch import _fault_tolerance

    left: list[int] = []
    monkeypatch.setattr(
        _fault_tolerance, "leave_and_join", lambda: left.append(alone.tolerance.steps)
    )
    assert alone.model is not None
    alone.backward()
    alone.model.rejoin()
    assert left == []
    alone.optimizer.step()
    alone.backward()
    assert left == [1]
    alone.optimizer.step()
    alone.model.rejoin()
    assert left == [1, 2]


def test_a_step_with_the_results_of_another_rank_counts_when_the_agreement_has_ended(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.common.exceptions import FarandoleInternalError
    from farandole.data.row_assignment import RowAssignment, UnassignedRows
    from farandole.torch import _fault_tolerance
    from farandole.torch.distributed import _fault_tolerant

    told: list[list[int]] = []
    records: list[dict[str, Any]] = []
    others = [[[1, 1, 0]], [], [[1, 1, 0]]]
    """Fault of each world: one rank has finished the step, and is lost; nobody has; one has
    again.
    """

    def statuses(own: torch.Tensor, name: str) -> torch.Tensor:
        del name
        told.extend(own.tolist())
        return torch.tensor([*own.tolist(), *others.pop(0)])

    def exchange(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
        del name
        records.append(record["rows"])
        if len(told) == 1:
            raise FarandoleInternalError("the rank that has finished the step is lost")
        return [record]

    monkeypatch.setattr(_fault_tolerance, "leave_and_join", lambda: None)
    monkeypatch.setattr(_fault_tolerance, "allgather", statuses)
    monkeypatch.setattr(_fault_tolerance, "allgather_object", exchange)
    monkeypatch.setattr(_fault_tolerance, "require_same_model", lambda *_: None)
    monkeypatch.setattr(_fault_tolerant, "transfer_tensors", lambda *_: None)
    monkeypatch.setattr(alone.tolerance, "_is_elastic", True)
    turns = alone.tolerance._row_assignments["rows"] = RowAssignment(
        20, 5, False, 0, 1, UnassignedRows(0, 0)
    )
    piece = turns.next_piece(0)
    assert not alone.tolerance.move_to_next_world()
    assert (alone.tolerance.steps, turns.taken_pieces) == (0, [piece])
    assert alone.tolerance.move_to_next_world()
    assert (alone.tolerance.steps, turns.taken_pieces) == (1, [])
    assert told == [[0, 1, 0]] * 3
    assert [record["hand"] for record in records] == [[], [piece], []]


def test_a_new_rank_gets_the_tensors_that_are_buffers_at_that_time(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farandole.torch import _fault_tolerance
    from farandole.torch._state_transfer import TransferRoles

    sent: dict[str, list[int]] = {}

    def move(name: str, tensors: list[torch.Tensor], _: TransferRoles) -> None:
        sent[name] = [tensor.data_ptr() for tensor in tensors]

    monkeypatch.setattr(_fault_tolerance, "transfer_tensors", move)
    monkeypatch.setattr(_fault_tolerance, "allgather", lambda own, **_: torch.cat([own, own]))
    alone.backward()
    alone.tolerance._send_state_to_ranks_behind(TransferRoles([0], [1]))
    assert sent["tolerant.other"] == [alone.network.average.data_ptr()]
    assert sent["tolerant.state"] == [
        parameter.data_ptr() for parameter in alone.network.parameters()
    ]


def test_a_process_has_one_fault_tolerant_model(alone: Alone) -> None:
    with pytest.raises(ValueError, match="a process can have one FaultTolerantDataParallel"):
        Alone()
    alone.backward()
    vars(alone.model)["cycle"] = alone.model
    alone.model = None
    Alone().backward()


def test_the_default_group_keeps_its_timeout_and_is_created_after_a_failed_attempt(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("a rank was lost")

    alone.tolerance._generation -= 1  # as if the world had changed
    with monkeypatch.context() as patched:
        patched.setattr(dist, "init_process_group", fail)
        with pytest.raises(OSError, match="a rank was lost"):
            alone.tolerance._prepare_new_world()
    alone.tolerance._prepare_new_world()
    assert dist.is_initialized()
    assert dist.distributed_c10d._get_default_store().timeout == LIMIT
