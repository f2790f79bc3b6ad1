# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Errors of wrong calls, which are of Horovod's class, too, and warnings that scripts filter by
Horovod's words.
"""

import pickle

import pytest
import torch

from farandole.common.elastic import ObjectState, run_fn
from farandole.common.exceptions import (
    FarandoleInternalError,
    FarandoleUsageError,
    HorovodInternalError,
)
from farandole.torch import elastic


def refusals(hvd):
    """Calls that Horovod's engine refuses by `HorovodInternalError`."""
    yield lambda: hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    yield lambda: hvd.reducescatter(torch.ones(2), op=hvd.Min)
    yield lambda: hvd.allgather(torch.tensor(1.0))
    yield lambda: hvd.broadcast(torch.ones(2), 7)
    yield lambda: hvd.alltoall(torch.ones(3), splits=torch.tensor([2]))
    yield lambda: hvd.alltoall(torch.ones(2), splits=torch.tensor([1, 1]))


def test_a_call_that_horovod_refuses_raises_its_error_which_is_also_a_value_error(hvd):
    for refused in refusals(hvd):
        with pytest.raises(HorovodInternalError) as raised:
            refused()
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, RuntimeError)
        assert type(raised.value) is FarandoleUsageError


def test_it_pickles():
    error = pickle.loads(pickle.dumps(FarandoleUsageError("what")))
    assert type(error) is FarandoleUsageError
    assert str(error) == "what"


def state():
    return ObjectState(bcast_object=lambda obj: obj, get_rank=lambda: 0)


def test_an_elastic_function_does_not_try_a_wrong_call_again():
    calls = []

    def train(_):
        calls.append("train")
        raise FarandoleUsageError("wrong")

    with pytest.raises(FarandoleUsageError, match="wrong"):
        run_fn(train, lambda: calls.append("reset"))(state())
    assert calls == ["train"]


def test_an_elastic_function_still_tries_again_after_a_lost_rank():
    calls = []

    def train(_):
        calls.append("train")
        if len(calls) < 3:
            raise FarandoleInternalError("gone")
        return "trained"

    assert run_fn(train, lambda: calls.append("reset"))(state()) == "trained"
    assert calls == ["train", "reset", "train"]


def test_an_error_that_passed_through_c_plus_plus_is_still_a_lost_rank(monkeypatch):
    calls = []
    monkeypatch.setattr(elastic, "leave_and_join", lambda: calls.append("reset"))

    def train(_, text):
        calls.append("train")
        if len(calls) < 3:
            raise RuntimeError(text)
        return "trained"

    lost = "FarandoleInternalError: rank 1 is gone\n\nAt: reducer.cpp"
    assert elastic.run(train)(state(), lost) == "trained"
    assert calls == ["train", "reset", "train"]
    calls.clear()
    with pytest.raises(RuntimeError, match="another"):
        elastic.run(train)(state(), "another error")
    assert calls == ["train"]


def test_warnings_begin_with_horovods_words(hvd):
    with pytest.warns(DeprecationWarning, match="^Parameter `average` has been replaced with `op`"):
        hvd.allreduce(torch.ones(1), average=False)
    layer = torch.nn.Linear(1, 1)
    with pytest.warns(
        DeprecationWarning, match="^Parameter `num_groups` has been replaced by `groups`"
    ):
        hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), num_groups=1)


def test_an_optimizer_knows_the_names_of_its_parameters(hvd):
    layer = torch.nn.Linear(1, 1)
    for op in (hvd.Average, hvd.Adasum):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, layer.named_parameters(), op=op)
        assert {optimizer._parameter_names[p] for p in layer.parameters()} == {"weight", "bias"}
