# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""LocalSGD and DiLoCo on real ranks, next to a simulation of all ranks in one process that follows
the papers.
"""

import copy
import io
import itertools

import pytest
import torch

import farandole.torch as hvd

STEPS = 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}
CASES = [
    {"sync_every": every, "inner": inner, **options}
    for every, inner, options in itertools.product(
        (1, 4),
        OPTIMIZERS,
        (
            {"kind": "LocalSGD"},
            {"kind": "LocalSGD", "synchronous_steps": 5},
            {"kind": "DiLoCo"},
            {"kind": "DiLoCo", "outer_lr": 1.0, "outer_momentum": 0.0},
            {"kind": "DiLoCo", "fragments": 2},
            {"kind": "DiLoCo", "overlap_steps": 2, "local_share": 0.25},
            {"kind": "DiLoCo", "fragments": 3, "overlap_steps": 1},
        ),
    )
    if options.get("overlap_steps", 0) < every and options.get("fragments", 1) <= every
]


def make_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def loss_of(module, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (module(torch.randn(5, 4, generator=generator)) ** 2).mean()


def largest_difference(parameters, others):
    return max((a - b).abs().max().item() for a, b in zip(parameters, others, strict=True))


def wrap_for(case, model):
    options = {key: value for key, value in case.items() if key not in ("kind", "inner")}
    inner = OPTIMIZERS[case["inner"]](model.parameters())
    return getattr(hvd, case["kind"])(inner, model.named_parameters(), **options)


def take_steps(model, optimizer, steps, rank):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


class SimulatedRanks:
    """All ranks in this process, by the papers' pseudo code."""

    def __init__(self, case, size):
        self.case, self.size = case, size
        self.models = [make_net() for _ in range(size)]
        self.inners = [OPTIMIZERS[case["inner"]](model.parameters()) for model in self.models]
        self.anchors = [parameter.detach().clone() for parameter in self.models[0].parameters()]
        self.outer = torch.optim.SGD(
            [torch.nn.Parameter(anchor) for anchor in self.anchors],
            lr=case.get("outer_lr", 0.7),
            momentum=case.get("outer_momentum", 0.9),
            nesterov=case.get("outer_momentum", 0.9) > 0,
        )
        self.globals = self.outer.param_groups[0]["params"]
        self.late = []

    def members(self, fragment):
        count = self.case.get("fragments", 1)
        shapes = [parameter.nbytes for parameter in self.models[0].parameters()]
        loads, members = [0] * count, [[] for _ in range(count)]
        for number in sorted(range(len(shapes)), key=lambda number: -shapes[number]):
            target = loads.index(min(loads))
            members[target].append(number)
            loads[target] += shapes[number]
        return members[fragment]

    def take_step(self, step):
        for rank, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
            inner.zero_grad()
            loss_of(model, rank, step).backward()
        if step < self.case.get("synchronous_steps", 0):
            self.average([[p.grad for p in model.parameters()] for model in self.models])
        for inner in self.inners:
            inner.step()
        if step < self.case.get("synchronous_steps", 0):
            return
        done = step + 1 - self.case.get("synchronous_steps", 0)
        every = self.case["sync_every"]
        self.apply_late(done)
        if self.case["kind"] == "LocalSGD":
            if done % every == 0:
                self.average([[p.data for p in model.parameters()] for model in self.models])
            return
        count = self.case.get("fragments", 1)
        for fragment in range(count):
            offset = fragment * every // count
            if done > offset and (done - offset) % every == 0:
                self.send(fragment, done + self.case.get("overlap_steps", 0))
        self.apply_late(done)

    def average(self, lists):
        for tensors in zip(*lists, strict=True):
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)

    def send(self, fragment, due):
        changes = {}
        for number in self.members(fragment):
            own = [list(model.parameters())[number].detach() for model in self.models]
            changes[number] = torch.stack([self.globals[number].detach() - p for p in own]).mean(0)
        self.late.append((due, changes))

    def apply_late(self, done):
        while self.late and self.late[0][0] <= done:
            _, changes = self.late.pop(0)
            for number, parameter in enumerate(self.globals):
                parameter.grad = changes.get(number)
            self.outer.step()
            share = self.case.get("local_share", 0.5) if self.case.get("overlap_steps") else 0.0
            for number, model in itertools.product(changes, self.models):
                parameter = list(model.parameters())[number].data
                parameter.copy_(share * parameter + (1 - share) * self.globals[number].detach())


def follows_papers(cases):
    differences = {}
    for number, case in enumerate(cases):
        simulated, model = SimulatedRanks(case, hvd.size()), make_net()
        optimizer = wrap_for(case, model)
        for step in range(STEPS):
            simulated.take_step(step)
            take_steps(model, optimizer, [step], hvd.rank())
            mine = list(simulated.models[hvd.rank()].parameters())
            difference = largest_difference(list(model.parameters()), mine)
            differences[number] = max(difference, differences.get(number, 0.0))
        del optimizer
    return differences


def test_each_rank_follows_the_papers(world):
    for differences in world.run(follows_papers, CASES):
        wrong = {number: (CASES[number], d) for number, d in differences.items() if d > 2e-6}
        assert not wrong


def counts_and_synchronizes():
    model = make_net()
    optimizer = wrap_for({"kind": "DiLoCo", "inner": "sgd", "sync_every": 3}, model)
    seen = []
    for step in range(4):
        take_steps(model, optimizer, [step], hvd.rank())
        seen.append(optimizer.is_synchronized)
    optimizer.synchronize()
    everywhere = hvd.allgather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None])
    return seen, optimizer.is_synchronized, bool((everywhere == everywhere[0]).all())


def test_is_synchronized_says_when_ranks_are_equal(pair):
    for seen, after, equal in pair.run(counts_and_synchronizes):
        assert seen == [False, False, True, False]
        assert after
        assert equal


def resumes(case):
    """Trains 12 steps at once, and 6 and 6 with a saved state between, on another object."""
    whole_model = make_net()
    whole = wrap_for(case, whole_model)
    take_steps(whole_model, whole, range(6), hvd.rank())
    whole.synchronize()
    saved = io.BytesIO()
    torch.save([whole_model.state_dict(), whole.state_dict()], saved)
    take_steps(whole_model, whole, range(6, 12), hvd.rank())
    model_state, optimizer_state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    model = make_net()
    model.load_state_dict(model_state)
    optimizer = wrap_for(case, model)
    before = copy.deepcopy(optimizer_state["state"]["local_steps"])
    optimizer.load_state_dict(optimizer_state)
    take_steps(model, optimizer, range(6, 12), hvd.rank())
    unchanged = repr(before) == repr(optimizer_state["state"]["local_steps"])
    return largest_difference(model.parameters(), whole_model.parameters()), unchanged


@pytest.mark.parametrize("case", [CASES[0], *CASES[-4:]], ids=str)
def test_a_saved_state_goes_on_as_if_uninterrupted(pair, case):
    for difference, unchanged in pair.run(resumes, case):
        assert difference == 0
        assert unchanged


def newcomer_gets_state():
    model = make_net()
    optimizer = wrap_for({"kind": "DiLoCo", "inner": "adamw", "sync_every": 2}, model)
    if hvd.rank() == 0:
        optimizer.state["local_steps"] = {
            "steps": 7,
            "steps_since_sync": 1,
            "anchors": [torch.full_like(p, 2.0) for p in model.parameters()],
            "momenta": [torch.full_like(p, 3.0) for p in model.parameters()],
        }
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state["local_steps"]
    return state["steps"], [t.mean().item() for t in (*state["anchors"], *state["momenta"])]


def test_the_outer_state_is_broadcast_with_the_optimizer(pair):
    for steps, means in pair.run(newcomer_gets_state):
        assert steps == 7
        assert means == [2.0] * 4 + [3.0] * 4


def joins_early(compression):
    """Rank 0 has 4 steps, rank 1 has 8."""
    model = make_net()
    optimizer = hvd.DiLoCo(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        sync_every=2,
        compression=make_compression(compression),
    )
    try:
        take_steps(model, optimizer, range(4 if hvd.rank() == 0 else 8), hvd.rank())
    except ValueError as error:
        return str(error)
    finally:
        hvd.join()
    return None


def make_compression(name):
    from farandole.torch.compress import Bf16

    return {"none": hvd.Compression.none, "Bf16": Bf16()}[name]


@pytest.mark.parametrize("compression", ["none", "Bf16"])
def test_a_mean_with_ranks_that_joined_is_refused(pair, compression):
    short, long = pair.run(joins_early, compression)
    assert short is None
    assert "1 of 2 ranks" in long


def resumes_on_rank_zero(synchronous_steps):
    """Horovod's way to resume: rank 0 loads, the others get the state by a broadcast."""
    case = {"kind": "LocalSGD", "inner": "adamw", "sync_every": 3}
    model = make_net()
    optimizer = wrap_for({**case, "synchronous_steps": synchronous_steps}, model)
    if hvd.rank() == 0:
        other = make_net()
        plain = OPTIMIZERS["adamw"](other.parameters())
        loss_of(other, 0, 0).backward()
        plain.step()
        state = plain.state_dict()
        state["state"]["local_steps"] = {"steps": 7, "steps_since_sync": 1}
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    seen = []
    for step in range(3):
        take_steps(model, optimizer, [step], hvd.rank())
        seen.append(optimizer.is_synchronized)
    optimizer.synchronize()
    everywhere = hvd.allgather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None])
    return seen, bool((everywhere == everywhere[0]).all())


@pytest.mark.parametrize("synchronous_steps", [0, 5])
def test_a_state_of_rank_zero_is_broadcast(pair, synchronous_steps):
    for seen, equal in pair.run(resumes_on_rank_zero, synchronous_steps):
        assert seen == [False, True, False]
        assert equal


def sends_int8():
    model, plain = make_net(), make_net()
    packed = hvd.DiLoCo(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        sync_every=3,
        compression=hvd_int8(),
    )
    exact = wrap_for({"kind": "DiLoCo", "inner": "sgd", "sync_every": 3}, plain)
    take_steps(model, packed, range(12), hvd.rank())
    take_steps(plain, exact, range(12), hvd.rank())
    return largest_difference(model.parameters(), plain.parameters())


def hvd_int8():
    from farandole.torch.compress import Int8

    return Int8(64)


def test_changes_are_sent_as_int8(pair):
    for difference in pair.run(sends_int8):
        assert 0 < difference < 0.02


def refuses(options, kind):
    model = make_net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        getattr(hvd, kind)(inner, **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("LocalSGD", {"sync_every": 0}, "sync_every"),
        ("LocalSGD", {"sync_every": 2, "synchronous_steps": -1}, "synchronous_steps"),
        ("DiLoCo", {"sync_every": 2, "overlap_steps": 2}, "overlap_steps"),
        ("DiLoCo", {"sync_every": 2, "fragments": 3}, "fragments"),
        ("DiLoCo", {"sync_every": 2, "local_share": 1.0}, "local_share"),
        ("DiLoCo", {"sync_every": 2, "outer_lr": 0.0}, "outer_lr"),
        ("DiLoCo", {"sync_every": 2, "outer_momentum": 1.0}, "outer_momentum"),
        ("DiLoCo", {"sync_every": 2, "compression": "int8"}, "compression"),
    ],
)
def test_wrong_arguments_are_named(pair, kind, options, words):
    for message in pair.run(refuses, options, kind):
        assert message is not None
        assert words in message


def step_with_scaler(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def refuses_wrong_use():
    messages = []
    model = make_net()
    optimizer = wrap_for(CASES[0], model)
    for attempt in (
        lambda: hvd.DistributedOptimizer(optimizer),
        lambda: hvd.LocalSGD(optimizer, sync_every=2),
        lambda: step_with_scaler(optimizer),
        lambda: (
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
            optimizer.step(),
        ),
    ):
        loss_of(model, 0, 0).backward()
        try:
            attempt()
        except (ValueError, AssertionError) as error:
            messages.append(str(error))
    return messages


def test_wrong_use_is_refused(pair):
    for messages in pair.run(refuses_wrong_use):
        twice, again, scaler, added = messages
        assert "distributed already" in twice
        assert "distributed already" in again
        assert "GradScaler" in scaler
        assert "added" in added
