# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer.overlap_forward` next to the same optimizer without it."""

import copy

import cloudpickle
import pytest
import torch
from tests.parallel import optimizer_cases
from tests.parallel.optimizer_cases import OPTIMIZERS, groups_of, loss_of, make_net

import farandole.torch as hvd
from farandole._native import engine

cloudpickle.register_pickle_by_value(optimizer_cases)  # workers import no test

PART_BYTES = 256


class TiedAttention(torch.nn.Module):
    """A model with a parameter that two modules read, one that its parent reads, and one that no
    module reads.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(5, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = torch.nn.Linear(8, 8)
        self.last.weight = self.attention.out_proj.weight
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, rows):
        hidden = self.first(rows)[:, None]
        hidden, _ = self.attention(hidden, hidden, hidden)
        return self.last(hidden[:, 0])


def train(make_model, name, overlap, part_bytes, zero="optimizer", **options):
    """Trains a model; returns its parameters, the optimizer's state and whether steps waited."""
    model = make_model()
    groups = groups_of(model) if make_model is make_net else model.parameters()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](groups), model.named_parameters(), **options
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    usual, waits = engine.PRIORITIZED_LIST_BYTES, False
    engine.PRIORITIZED_LIST_BYTES = part_bytes
    try:
        if overlap:
            optimizer.overlap_forward(model)
        for step in range(7):
            if zero == "optimizer":
                optimizer.zero_grad()
            elif zero == "model":
                model.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            waits |= overlap and optimizer._deferred.is_pending
            if zero == "after":
                optimizer.zero_grad()
            schedule.step()
        state = copy.deepcopy(optimizer.state_dict())
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
    finally:
        engine.PRIORITIZED_LIST_BYTES = usual
    return parameters, state, waits


def same(one, other):
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def overlaps(make_model, name, part_bytes, zero, options):
    options = {
        "compression": getattr(hvd.Compression, options.pop("compression", "none")),
        **options,
    }
    whole = train(make_model, name, False, part_bytes, zero, **options)
    overlapped = train(make_model, name, True, part_bytes, zero, **options)
    return same(whole[:2], overlapped[:2]), overlapped[2]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_takes_the_same_steps(pair, name):
    assert pair.run(overlaps, make_net, name, 1 << 20, "optimizer", {}) == [(True, True)] * 2


@pytest.mark.parametrize("zero", ["optimizer", "model", "after"])
@pytest.mark.parametrize("make_model", [make_net, TiedAttention])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"compression": "bf16"},
        {"groups": 2},
        {"backward_passes_per_step": 1, "op": hvd.Sum},
    ],
    ids=["plain", "views", "bf16", "groups", "sum"],
)
def test_gradients_in_parts_and_buckets_give_the_same_steps(pair, options, make_model, zero):
    results = pair.run(overlaps, make_model, "adamw", PART_BYTES, zero, options)
    assert results == [(True, True)] * 2


def reads_everywhere():
    """Reads parameters in all ways that wait, right after a step."""
    results = []
    for overlap in (False, True):
        model = make_net()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), model.named_parameters()
        )
        if overlap:
            optimizer.overlap_forward(model)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            if step == 1:
                seen.append({k: v.clone() for k, v in model.state_dict().items()})
            elif step == 2:
                seen.append(list(copy.deepcopy(model).parameters()))
            elif step == 3:
                seen.append(copy.deepcopy(optimizer).state_dict()["state"])
            elif step == 4:
                with torch.no_grad():
                    seen.append(loss_of(model, 0, 9))
            else:
                optimizer.wait_for_parameters()
                seen.append([parameter.detach().clone() for parameter in model.parameters()])
        results.append(seen)
    return same(*results)


def test_whoever_reads_parameters_or_states_gets_those_after_the_step(pair):
    assert pair.run(reads_everywhere) == [True, True]


def changes_a_gradient_in_place():
    model = make_net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    optimizer.overlap_forward(model)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    try:
        model(torch.zeros(1, 5))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_gradient_that_is_changed_while_it_is_reduced_is_an_error(pair):
    for message in pair.run(changes_a_gradient_in_place):
        assert "in place while they were reduced: 3.bias, 3.weight, 2.bias" in message


class NormalizedByAll(torch.optim.SGD):
    """Divides gradients by the norm of all of them, as LAMB and others do."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


def refuses():
    messages = []
    model = torch.nn.Linear(4, 4)
    for wrapped in (
        NormalizedByAll(model.parameters(), lr=0.0),
        torch.optim.SparseAdam(model.parameters()),
    ):
        try:
            hvd.DistributedOptimizer(wrapped).overlap_forward(model)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_an_optimizer_that_mixes_parameters_or_takes_no_dense_gradients_is_refused(pair):
    for messages in pair.run(refuses):
        assert len(messages) == 2
        for message in messages:
            assert "depends on that parameter and its gradient alone" in message


def steps_with_hooks():
    """A hook after the step sees all parameters, once a step."""
    model = make_net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    optimizer.overlap_forward(model)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(optimizer._deferred.is_pending))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    return calls


def test_hooks_of_steps_run_once_after_the_whole_step(pair):
    assert pair.run(steps_with_hooks) == [[False] * 3] * 2
