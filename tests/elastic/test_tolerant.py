# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer(fault_tolerant=True)`: ranks are lost within a step, and the others
finish it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.tolerant import STEPS_FROM, loss, model

WORKER = Path(__file__).with_name("tolerant.py")
ROOT = Path(__file__).parents[2]
STEPS = 12


def run(
    *flags: object, worker: str = str(WORKER), limit: float = 120.0, **plan: Any
) -> tuple[list[dict], str]:
    """The results of the ranks that were there at the end, by rank, and what the launcher has
    said.
    """
    words = [sys.executable, "-m", "farandole", "run", *map(str, flags), sys.executable, worker]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "PLAN": json.dumps({"steps": STEPS, "ends": [], "folder": folder, **plan})
        }
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, check=False, cwd=ROOT, env=env
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found = [
        json.loads(line.partition(":result ")[2])
        for line in done.stdout.splitlines()
        if ":result " in line
    ]
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("["))
    return sorted(found, key=lambda one: one["rank"]), said


ALONE = ("-np", 4, "--min-np", 1, "--blacklist-cooldown-range", 600, 600)
"""Lost workers are not replaced."""


def expected(members: list[list[int]]) -> list[list[float]]:
    """The weights after steps whose gradients were averaged over these workers each, in one
    process.
    """
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS_FROM)
    for step, identities in enumerate(members):
        optimizer.zero_grad()
        for identity in identities:
            (loss(network, identity, step) / len(identities)).backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach().flatten().tolist() for parameter in network.parameters()]


def is_close(one: list[list[float]], other: list[list[float]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-6, atol=1e-7) for a, b in pairs
    )


def same(found: list[dict[str, Any]]) -> list[list[float]]:
    """The weights, which are the same bits on all ranks."""
    assert all(one["weights"] == found[0]["weights"] for one in found)
    assert {one["rate"] for one in found} == {found[0]["rate"]}
    return found[0]["weights"]


def members(lost: dict[int, int]) -> list[list[int]]:
    """Returns the workers that take part in each step, if each lost worker is lost at its step."""
    return [[who for who in range(4) if lost.get(who, STEPS) > step] for step in range(STEPS)]


def test_nothing_lost_nothing_changed() -> None:
    found, _ = run("-np", 4)
    assert is_close(same(found), expected(members({})))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_lost_before_its_gradients_is_not_in_the_average(who: int) -> None:
    found, said = run(*ALONE, ends=[[who, 5, "before"]])
    assert is_close(same(found), expected(members({who: 5})))
    assert [one["sizes"] for one in found] == [[4] * 5 + [3] * 7] * 3
    assert f"rank {who} on localhost was ended by SIGKILL" in said


def test_a_rank_that_is_lost_after_the_reduction_was_in_the_average() -> None:
    found, _ = run(*ALONE, ends=[[2, 5, "after"]])
    assert is_close(same(found), expected(members({2: 6})))


def test_a_rank_that_is_lost_during_a_step_is_in_its_average_on_all_ranks_or_on_none() -> None:
    found, _ = run(*ALONE, ends=[[3, 5, "during"]])
    weights = same(found)
    assert any(is_close(weights, expected(members({3: step}))) for step in (5, 6, 7))


def test_half_of_the_ranks_are_lost_at_once() -> None:
    found, _ = run(*ALONE, ends=[[0, 4, "before"], [2, 4, "before"]])
    assert is_close(same(found), expected(members({0: 4, 2: 4})))
    assert len(found) == 2


def test_a_rank_that_is_lost_while_the_others_recover_is_left_out_too() -> None:
    found, _ = run(*ALONE, ends=[[1, 4, "before"], [2, 4, "recovering"]])
    assert is_close(same(found), expected(members({1: 4, 2: 4})))
    assert len(found) == 2


def test_a_rank_that_gets_sigterm_leaves_after_a_step_and_is_no_failure() -> None:
    found, said = run(*ALONE, ends=[[3, 4, "asked"]])
    assert len(found) == 3
    assert "was ended by" not in said
    weights = same(found)
    assert any(is_close(weights, expected(members({3: step}))) for step in range(5, STEPS + 1))


def test_a_rank_that_is_behind_gets_the_state_from_others_when_its_sender_is_lost() -> None:
    found, _ = run(*ALONE, ends=[[0, 5, "fails"], [1, 6, "sending"]], piece=64)
    assert is_close(same(found), expected(members({1: 6})))
    assert {one["identity"]: one["interrupted"] for one in found} == {
        0: ["tolerant.state"],
        2: [],
        3: [],
    }
    assert {one["identity"]: one["sizes"] for one in found}[0] == [4] * 5 + [3] * 7


@pytest.mark.slow
def test_a_rank_that_joins_has_the_state_of_the_others_after_one_was_lost_that_was_sending_it() -> (
    None
):
    flags = ("-np", 4, "--min-np", 1, "--blacklist-cooldown-range", 1, 2)
    found, _ = run(
        *flags, limit=200.0, ends=[[1, 3, "before"], [2, 4, "sending"]], steps=5, grows=4, piece=64
    )
    assert len(found) == 4
    new = [one for one in found if one["identity"] >= 100]
    assert len(new) == 2
    assert ["tolerant.state"] in [one["interrupted"] for one in new]
    same(found)


def test_a_rank_that_joins_gets_parameters_state_and_what_is_shared() -> None:
    flags = ("-np", 3, "--min-np", 1, "--blacklist-cooldown-range", 1, 2)
    found, _ = run(*flags, ends=[[1, 3, "before"]], steps=5, grows=3)
    assert len(found) == 3
    new = [one for one in found if one["identity"] >= 100]
    assert len(new) == 1
    assert new[0]["first"] > 3
    assert len({one["steps"] for one in found}) == 1
    same(found)


def test_outside_of_an_elastic_job_a_lost_rank_is_the_error_that_it_was() -> None:
    with pytest.raises(AssertionError, match="FarandoleInternalError"):
        run("-np", 2, ends=[[1, 3, "before"]])


def test_a_rank_that_took_a_state_skips_its_step_if_the_agreement_fails_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import farandole.torch as hvd
    from farandole.common.exceptions import FarandoleInternalError
    from farandole.torch import _fault_tolerance

    worlds: list[list[list[int]]] = []

    def statuses(own: torch.Tensor, name: str) -> torch.Tensor:
        del name
        worlds.append(own.tolist())
        return torch.cat([own, torch.tensor([[1, 1, 0]])])

    def exchange(records: dict, name: str) -> list[dict]:
        del name
        if len(worlds) == 2:
            raise FarandoleInternalError("a rank was lost")
        return [records, records]

    hvd.init()
    try:
        tolerance = _fault_tolerance.FaultTolerance(
            torch.optim.SGD(model().parameters(), lr=0.1), is_elastic=True
        )
        tolerance.agree_with_new_world()
        monkeypatch.setattr(_fault_tolerance, "leave_and_join", lambda: None)
        monkeypatch.setattr(_fault_tolerance, "allgather", statuses)
        monkeypatch.setattr(_fault_tolerance, "allgather_object", exchange)
        monkeypatch.setattr(_fault_tolerance, "require_same_model", lambda *_: None)
        monkeypatch.setattr(
            tolerance, "_send_state_to_ranks_behind", lambda roles: worlds.append([*roles])
        )
        assert tolerance.move_to_next_world()
        assert worlds == [[[0, 1, 0]], [[1], [0]], [[1, 1, 0]]]
        assert tolerance.steps == 1
    finally:
        hvd.shutdown()


def test_what_a_reduction_cannot_be_repeated_with_is_refused() -> None:
    import farandole.torch as hvd

    hvd.init()
    try:
        network = model()
        for options in ({"op": hvd.Adasum}, {"gradient_as_bucket_view": True}):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            with pytest.raises(ValueError, match="fault_tolerant=True cannot be combined with"):
                hvd.DistributedOptimizer(optimizer, fault_tolerant=True, **options)
        with pytest.raises(ValueError, match="needs several ranks, or an elastic job"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(network.parameters(), lr=0.1), fault_tolerant=True
            )
        plain = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="create it with fault_tolerant=True"):
            plain.share(schedule=object())
    finally:
        hvd.shutdown()
