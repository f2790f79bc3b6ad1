# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits whose copying another thread does: what is restored is what was committed, whatever
came after.
"""

from __future__ import annotations

import pytest
import torch


def made(hvd):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 300)).mean().backward()
    optimizer.step()


def values(model, optimizer):
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    return [one.detach().clone() for one in (*model.state_dict().values(), *states)]


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def test_a_state_goes_back_to_its_last_commit_though_a_step_followed_at_once(hvd):
    model, optimizer = made(hvd)
    state = hvd.elastic.TorchState(model, optimizer, in_background=True, count=0)
    for count in range(6):
        step(model, optimizer)
        state.count = count
        state.commit()
        committed = values(model, optimizer)
        step(model, optimizer)
        assert not equal(values(model, optimizer), committed)
        state.count = -1
        state.restore()
        assert equal(values(model, optimizer), committed)
        assert state.count == count


def test_a_commit_can_be_gone_back_to_while_it_is_copied(hvd):
    model, optimizer = made(hvd)
    state = hvd.elastic.TorchState(model, optimizer, in_background=True)
    for _ in range(4):
        step(model, optimizer)
        state.commit()
        committed = values(model, optimizer)
        state.restore()
        assert equal(values(model, optimizer), committed)


def test_a_change_of_parameters_that_is_no_step_is_an_error(hvd):
    model, optimizer = made(hvd)
    state = hvd.elastic.TorchState(model, optimizer, in_background=True)
    for _ in range(3):  # after the first ones there is memory to copy to
        step(model, optimizer)
        state.commit()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(
        RuntimeError, match=r"something other than optimizer.step\(\) changed parameters"
    ):
        step(model, optimizer)


def test_an_optimizer_that_takes_the_place_of_another_one_waits_too(hvd):
    model, optimizer = made(hvd)
    state = hvd.elastic.TorchState(model, optimizer, in_background=True)
    state.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        step(model, state.optimizer)
        state.commit()
        committed = values(model, state.optimizer)
        step(model, state.optimizer)
        state.restore()
        assert equal(values(model, state.optimizer), committed)


def test_there_is_an_optimizer_whose_step_waits(hvd):
    with pytest.raises(ValueError, match="needs an optimizer"):
        hvd.elastic.TorchState(torch.nn.Linear(1, 1), in_background=True)
