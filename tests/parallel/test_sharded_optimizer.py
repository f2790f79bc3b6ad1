# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`DistributedOptimizer(shard_states=True)` next to the same optimizer with whole states."""

import copy
import io

import cloudpickle
import pytest
import torch
from tests.parallel import optimizer_cases
from tests.parallel.optimizer_cases import OPTIMIZERS, groups_of, loss_of, make_net

import farandole.torch as hvd

cloudpickle.register_pickle_by_value(optimizer_cases)  # workers import no test

NOT_ELEMENTWISE = {
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


def take_steps(model, optimizer, steps, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def differences(model, other):
    return max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def state_bytes(states):
    return sum(t.nbytes for state in states for t in state.values() if torch.is_tensor(t))


def trains_as_whole(name):
    whole_model, model = make_net(), make_net()
    whole = hvd.DistributedOptimizer(
        OPTIMIZERS[name](groups_of(whole_model)), whole_model.named_parameters()
    )
    sharded = hvd.DistributedOptimizer(
        OPTIMIZERS[name](groups_of(model)), model.named_parameters(), shard_states=True
    )
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (whole, sharded)]
    take_steps(whole_model, whole, range(8), schedules[0])
    take_steps(model, sharded, range(8), schedules[1])
    inner = [state for o in sharded._inner_optimizers.values() for state in o.state.values()]
    sizes = state_bytes(inner), state_bytes(whole.state.values())
    sharded.consolidate_state_dict()
    gathered, wanted = sharded.state_dict(), whole.state_dict()
    same_states = all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(gathered["state"][number][key]))
        for number, state in wanted["state"].items()
        for key, value in state.items()
    )
    same_groups = gathered["param_groups"] == wanted["param_groups"]
    return differences(model, whole_model), sizes, same_states, same_groups


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_are_those_of_whole_states(world, name):
    for rank, (difference, sizes, states, groups) in enumerate(world.run(trains_as_whole, name)):
        assert difference == 0, rank
        assert states
        assert groups
        part, whole = sizes
        if name != "plain sgd":
            # Alignment adds up to 64 bytes a parameter, and each bucket has its count of steps.
            assert part <= whole / world.size + 6 * 64 * 4, (part, whole)


def large_states():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model.named_parameters(), shard_states=True
    )
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    inner = [state for o in optimizer._inner_optimizers.values() for state in o.state.values()]
    return state_bytes(inner) / sum(2 * p.nbytes for p in model.parameters())


def test_each_rank_has_its_part_of_the_memory_of_states(world):
    for share in world.run(large_states):
        assert share == pytest.approx(1 / world.size, rel=0.01)


def saves(path):
    model = make_net()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), shard_states=True
    )
    take_steps(model, optimizer, range(4))
    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], path)
        return None
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return str(error)
    return "state_dict() returned"


def goes_on(path, shard_states):
    model_state, optimizer_state = torch.load(path, weights_only=True)
    model = make_net()
    model.load_state_dict(model_state)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()),
        model.named_parameters(),
        shard_states=shard_states,
    )
    optimizer.load_state_dict(optimizer_state)
    take_steps(model, optimizer, range(4, 7))
    return [p.detach().clone() for p in model.parameters()]


def test_another_number_of_ranks_and_a_plain_optimizer_load_a_state(pair, trio, tmp_path):
    path = tmp_path / "state.pt"
    first, other = pair.run(saves, path)
    assert first is None
    assert "consolidate_state_dict() on all ranks" in other
    for world in (pair, trio):
        sharded = world.run(goes_on, path, True)
        whole = world.run(goes_on, path, False)
        for mine, theirs in zip(sharded, whole, strict=True):
            found = [(a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True)]
            assert found == [0.0] * len(found), world.size


def takes_plain_state():
    """An optimizer that has a state is wrapped: training goes on from it."""
    results = []
    for shard_states in (False, True):
        model = make_net()
        plain = OPTIMIZERS["adamw"](model.parameters())
        for step in range(3):
            plain.zero_grad()
            loss_of(model, 0, step).backward()
            plain.step()
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), shard_states=shard_states
        )
        take_steps(model, optimizer, range(3, 6))
        results.append(model)
    return differences(*results)


def test_an_optimizer_with_a_state_goes_on(pair):
    assert pair.run(takes_plain_state) == [0.0, 0.0]


def clips():
    whole_model, model = make_net(), make_net()
    whole = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](whole_model.parameters()), whole_model.named_parameters()
    )
    sharded = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), shard_states=True
    )
    norms = []
    for step in range(4):
        for net, optimizer in ((whole_model, whole), (model, sharded)):
            optimizer.zero_grad()
            loss_of(net, hvd.rank(), step).backward()
            if optimizer is whole:
                whole.synchronize()
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
                with whole.skip_synchronize():
                    whole.step()
            else:
                norms.append(sharded.clip_grad_norm_(0.1).item())
                sharded.step()
    return differences(model, whole_model), norms


def test_gradients_are_clipped_by_the_norm_of_all_ranks(pair):
    for difference, norms in pair.run(clips):
        assert difference < 1e-6
        assert norms[0::2] == pytest.approx(norms[1::2], rel=1e-5)
        assert min(norms) > 0.1, "nothing was clipped"


class Tied(torch.nn.Module):
    """Reads a child's weight without calling it, and one twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Linear(5, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.only_read = torch.nn.Linear(8, 8, bias=False)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, rows):
        hidden = self.embed(rows)[:, None]
        hidden = self.attention(hidden, hidden, hidden)[0][:, 0]
        hidden = torch.nn.functional.linear(hidden, self.only_read.weight)
        return torch.nn.functional.linear(hidden, self.embed.weight.T)


def overlaps():
    results = []
    for overlap in (False, True):
        model = Tied()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), shard_states=True
        )
        if overlap:
            optimizer.overlap_forward(model)
        take_steps(model, optimizer, range(6))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    deferred = optimizer._overlap is not None and optimizer._overlap.is_ready
    return deferred, all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_parameters_that_arrive_during_the_forward_pass_are_the_same(pair):
    assert pair.run(overlaps) == [(True, True)] * 2


def accumulates_and_unfreezes():
    results = []
    for shard_states in (False, True):
        model = make_net()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=2,
            shard_states=shard_states,
        )
        for step in range(6):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            for part in range(2):
                (loss_of(model, hvd.rank(), 2 * step + part) / 2).backward()
            optimizer.step()
        results.append(model)
    return differences(*results)


def test_passes_are_summed_and_parameters_may_be_unfrozen(pair):
    assert pair.run(accumulates_and_unfreezes) == [0.0, 0.0]


def refuses(name):
    model = torch.nn.Linear(6, 4, bias=False)
    maker = {**OPTIMIZERS, **NOT_ELEMENTWISE}[name]
    try:
        hvd.DistributedOptimizer(maker(model.parameters()), shard_states=True)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_an_optimizer_that_is_not_elementwise_is_refused(pair, name):
    for message in pair.run(refuses, name):
        assert message is not None
        assert "element-wise" in message


def refuses_wrong_use():
    model = make_net()

    def wrap(**options):
        return hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), shard_states=True, **options
        )

    optimizer = wrap()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    from farandole.torch.compress import Int8

    attempts = (
        lambda: wrap(op=hvd.Adasum),
        lambda: wrap(fault_tolerant=True),
        lambda: wrap(compression=Int8()),
        lambda: wrap(groups=2),
        optimizer.synchronize,
        lambda: copy.deepcopy(optimizer),
        lambda: scaler.step(optimizer),
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}),
        lambda: torch.save(optimizer, io.BytesIO()),
    )
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_wrong_use_is_named(pair):
    for messages in pair.run(refuses_wrong_use):
        words = ["op other", "fault_tolerant", "keeps", "groups", "clip_grad_norm_"]
        words += ["consolidate", "GradScaler", "groups of", "consolidate"]
        assert len(messages) == len(words)
        for word, message in zip(words, messages, strict=True):
            assert word in message


def freezes():
    model = make_net()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), shard_states=True
    )
    take_steps(model, optimizer, range(2))
    model[0].requires_grad_(False)
    try:
        take_steps(model, optimizer, range(2, 4))
    except ValueError as error:
        return str(error)
    return None


def test_a_parameter_that_is_frozen_later_is_refused(pair):
    for message in pair.run(freezes):
        assert message is not None
        assert "0.weight" in message


def saves_after_unfreezing(path):
    """Parameters have taken different numbers of steps."""
    model = make_net()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), shard_states=True
    )
    take_steps(model, optimizer, range(2))
    model[0].requires_grad_(True)
    take_steps(model, optimizer, range(2, 4))
    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], path)


def test_parameters_with_different_counts_of_steps_are_loaded(pair, tmp_path):
    path = tmp_path / "state.pt"
    pair.run(saves_after_unfreezing, path)
    _, state = torch.load(path, weights_only=True)
    assert {float(entry["step"]) for entry in state["state"].values()} == {2.0, 4.0}
    sharded, whole = pair.run(goes_on, path, True), pair.run(goes_on, path, False)
    for mine, theirs in zip(sharded, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def calls_hooks():
    model, calls = make_net(), []
    plain = OPTIMIZERS["sgd"](model.parameters())
    plain.register_step_post_hook(lambda *_: calls.append("before wrapping"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard_states=True)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    take_steps(model, optimizer, range(1))
    return calls


def test_hooks_of_steps_are_called_once(pair):
    assert pair.run(calls_hooks) == [["pre", "before wrapping"]] * 2


def changes_while_parts_arrive():
    """Loads other parameters, and reads one that no module of the model has."""
    model, extra = make_net(), torch.nn.Parameter(torch.ones(3))
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.1), named, shard_states=True
    )
    optimizer.overlap_forward(model)
    for step in range(2):
        optimizer.zero_grad()
        (loss_of(model, 0, step) + extra.sum()).backward()
        optimizer.step()
    seen = extra.detach().clone()
    wanted = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    (loss_of(model, 0, 2) + extra.sum()).backward()
    optimizer.step()
    model.load_state_dict(wanted)
    optimizer.wait_for_parameters()
    return seen.tolist(), max(p.abs().max().item() for p in model.parameters())


def test_parameters_outside_of_the_model_are_there_after_the_step(pair):
    for seen, largest in pair.run(changes_while_parts_arrive):
        assert seen == pytest.approx([0.8] * 3)
        assert largest == 0, "parts that arrived later have overwritten the loaded parameters"


def refuses_more():
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), shard_states=True
    )
    warming = torch.optim.Muon(model.parameters(), lr=0.0)
    messages = []
    for attempt in (
        lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
        lambda: hvd.DistributedOptimizer(warming, shard_states=True),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_broadcast_and_a_warming_optimizer_are_refused(pair):
    for broadcast, warming in pair.run(refuses_more):
        assert "on all ranks" in broadcast
        assert "element-wise" in warming
