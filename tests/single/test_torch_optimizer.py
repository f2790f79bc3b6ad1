# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DistributedOptimizer in a world of one: validation, and that it stays the optimizer it wraps."""

import copy
import pickle

import pytest
import torch


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def test_it_is_a_subclass_with_the_same_name_and_keeps_state_and_options(hvd):
    net = model()
    plain = torch.optim.Adam(net.parameters(), lr=0.25)
    net(torch.ones(2, 3)).sum().backward()
    plain.step()
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    assert isinstance(wrapped, torch.optim.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert wrapped.param_groups[0]["lr"] == 0.25
    assert all(wrapped.state[parameter]["step"].item() == 1 for parameter in net.parameters())


def test_it_steps_like_the_optimizer_it_wraps(hvd):
    nets = model(), model()
    plain = torch.optim.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9))
    for net, optimizer in zip(nets, (plain, wrapped), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_closures_schedulers_scalers_and_step_hooks_work(hvd):
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(calls) == 1
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(2, 3)).sum()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert len(calls) == 2


def test_a_scheduler_made_before_wrapping_does_not_bypass_the_reduction(hvd):
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    wrapped = hvd.DistributedOptimizer(plain)
    assert "step" not in vars(wrapped)
    net(torch.ones(2, 3)).sum().backward()
    wrapped.step()
    with pytest.warns(UserWarning, match="lr_scheduler"):
        scheduler.step()
    assert wrapped.param_groups[0]["lr"] == 0.5


def test_state_dicts_go_both_ways(hvd):
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.optim.Adam(net.parameters()).load_state_dict(state)
    optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_predivide_factor": 2.0, "op": 1}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"op": 6}, "op must be one of"),
        ({"groups": 0}, "groups must be a positive"),
        ({"groups": [[1]]}, "groups must contain parameters"),
        ({"named_parameters": [torch.ones(1)]}, "pairs"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(1))]}, "differently: a"),
        ({"named_parameters": [("a", torch.ones(1))]}, "lacks parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_are_refused(hvd, arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=1.0), **arguments)


def test_a_parameter_in_two_groups_is_refused(hvd):
    net = model()
    group = [net[0].weight, net[0].weight]
    with pytest.raises(ValueError, match="each parameter once"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), groups=[group])


def test_a_number_of_groups_by_its_old_name_is_taken_with_a_warning(hvd):
    net = model()
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), num_groups=2
        )
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_lbfgs_is_refused(hvd):
    optimizer = torch.optim.LBFGS(model().parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_broadcast_optimizer_state_takes_no_step(hvd):
    net = model()
    before = [parameter.clone() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(
        torch.equal(parameter, old) for parameter, old in zip(net.parameters(), before, strict=True)
    )


def test_zero_grad_forgets_a_partial_backward_pass(hvd):
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    first.sum().backward()
    optimizer.zero_grad()
    (first + second).sum().backward()
    optimizer.step()
    assert (first.item(), second.item()) == (0.0, 0.0)


def test_a_distributed_optimizer_and_a_flat_list_of_groups_are_refused(hvd):
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters()
    )
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="list of lists"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), groups=list(net.parameters())
        )


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]
)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_copy_is_a_plain_optimizer_that_continues_alike(hvd, op, again):
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.25), op=getattr(hvd, op)
    )
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    other = again(optimizer)
    assert type(other) is torch.optim.Adam
    assert other.param_groups[0]["lr"] == 0.25
    for mine, copied in zip(net.parameters(), other.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, copied)
        assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[copied]["exp_avg"])
    if again is not copy.copy:
        for mine, copied in zip(net.parameters(), other.param_groups[0]["params"], strict=True):
            copied.grad = mine.grad.clone()
        other.step()
        optimizer.step()
        for mine, copied in zip(net.parameters(), other.param_groups[0]["params"], strict=True):
            assert torch.equal(mine, copied)
    assert isinstance(hvd.DistributedOptimizer(other), torch.optim.Adam)
