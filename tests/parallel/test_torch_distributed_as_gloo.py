# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Farandole's backend of torch.distributed does what Gloo does, case by case, on real processes.

`gloo_cases.py` has the cases. `function_states.py` has the table of torch's functions, and the page
of the user guide contains it.
"""

from __future__ import annotations

import types
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist
from tests.parallel import function_states, gloo_cases

cloudpickle.register_pickle_by_value(function_states)  # workers import no test

PAGE = Path(__file__).parents[2] / "docs/user-guide/torch-distributed.md"
_outcomes: dict[int, dict[str, list[dict[str, tuple[str, object]]]]] = {}


@pytest.fixture(params=["pair", "trio"])
def outcomes(request, tmp_path_factory):
    """The outcomes of all cases by backend, rank and name; each world runs them once."""
    world = request.getfixturevalue(request.param)
    if world.size not in _outcomes:
        folder = str(tmp_path_factory.mktemp("gloo"))
        _outcomes[world.size] = {
            backend: [
                answers[backend]
                for answers in world.run(gloo_cases.run_cases_on_this_rank, backend, folder)
            ]
            for backend in ("gloo", "farandole")
        }
    return _outcomes[world.size]


def is_close(found, expected):
    """Returns whether all numbers of two outcomes are close, and all else is equal."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(is_close, found, expected))
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=2e-3, abs=2e-3)
    return found == expected


@pytest.mark.parametrize("case", filter(function_states.has_oracle, gloo_cases.CASES))
def test_each_case_is_as_in_gloo(outcomes, case):
    theirs = [answers[case] for answers in outcomes["gloo"]]
    ours = [answers[case] for answers in outcomes["farandole"]]
    if any(rule.search(case) for rule in function_states.BEYOND_GLOO):
        assert all(kind == "result" for kind, _ in ours), ours
        assert theirs != ours, "Gloo has it, too: remove the case from BEYOND_GLOO"
    elif any(kind == "error" for kind, _ in theirs):
        assert [kind for kind, _ in ours] == [kind for kind, _ in theirs], (ours, theirs)
    elif case.startswith("DDP"):
        # Sums of three ranks have other orders.
        assert is_close(ours, theirs), (ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.newest  # each version of torch has other functions
def test_the_table_has_every_function():
    module = dist.distributed_c10d
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    public = {name for name in module.__all__ if type(getattr(module, name)) in kinds}
    assert len(public) > 40
    assert public - set(function_states.FUNCTIONS) == set()


def test_each_function_that_works_has_cases():
    for name, entry in function_states.FUNCTIONS.items():
        for case in entry.cases:
            assert any(one.startswith(case) for one in gloo_cases.CASES), (name, case)
        assert entry.cases or entry.state in (function_states.LOCAL, function_states.REFUSED), name


def test_the_page_has_the_table():
    assert function_states.format_table() in PAGE.read_text()
