# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A commit copies a model and an optimizer, and allocates no new memory the second time."""

from __future__ import annotations

import pytest
import torch

from farandole._native import engine
from farandole.torch.elastic.state import ModelStateHandler, OptimizerStateHandler


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    """One thread copies past the caches; several use torch's own copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_restore_brings_back_the_last_commit_bit_for_bit(kind: type) -> None:
    model = network()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    handlers = [ModelStateHandler(model), OptimizerStateHandler(optimizer)]
    for _ in range(3):
        step(model, optimizer)
        for handler in handlers:
            handler.save()
    committed = values(model)
    random = torch.get_rng_state()
    step(model, optimizer)
    after = values(model)
    for _ in range(2):  # what was kept stays as it is
        for handler in handlers:
            handler.restore()
        assert all(
            torch.equal(tensor, committed[name]) for name, tensor in model.state_dict().items()
        )
        torch.set_rng_state(random)
        step(model, optimizer)
        assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())


def test_a_commit_writes_over_the_memory_of_the_one_before_the_last() -> None:
    model = network()
    handler = ModelStateHandler(model)
    places = []
    for _ in range(4):
        handler.save()
        places.append(handler._saved["0.weight"].data_ptr())
    assert places[0] == places[2] != places[1] == places[3]
    assert handler._saved._metadata == model.state_dict()._metadata


def test_tensors_whose_memory_is_not_in_their_order_are_kept() -> None:
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    handler = ModelStateHandler(model)
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(1)
        handler.save()
    committed = values(model)
    with torch.no_grad():
        model.weight.zero_()
    handler.restore()
    assert torch.equal(model.weight, committed["weight"])


def test_memory_is_not_copied_over_itself() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    place = memory.data_ptr()
    for copy in [(place, place + 49, 50), (place + 49, place, 50), (0, place, 1), (place, 0, 1)]:
        with pytest.raises(ValueError, match="bytes from 0x"):
            engine.copy_memory([(place, place + 50, 1), copy])
    engine.copy_memory([(0, 0, 0), (place, place + 50, 50)])


def test_a_commit_that_is_interrupted_changes_nothing() -> None:
    model = network()
    handler = ModelStateHandler(model)
    handler.save()
    before = values(model)

    class Breaking(dict):
        def __copy__(self) -> dict:
            raise KeyboardInterrupt

    with torch.no_grad():
        model[0].weight.add_(1.0)
    handler.value.state_dict = lambda: Breaking(model.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        handler.save()
    del handler.value.state_dict
    handler.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_whose_shapes_change_is_kept_as_it_is() -> None:
    model = torch.nn.Linear(3, 4)
    handler = ModelStateHandler(model)
    handler.save()
    model.weight = torch.nn.Parameter(torch.ones(2, 3))
    model.bias = torch.nn.Parameter(torch.ones(2))
    handler.save()
    with torch.no_grad():
        model.weight.zero_()
    handler.restore()
    assert torch.equal(model.weight, torch.ones(2, 3))
