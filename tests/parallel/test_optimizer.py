# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DistributedOptimizer on real processes, against one process that sees the whole batch."""

import copy

import pytest
import torch

import farandole.torch as hvd


def assert_close(actual, expected, tolerance=1e-5):
    # torch.testing takes seconds to import.
    assert torch.allclose(actual, expected, rtol=tolerance, atol=tolerance), (
        f"{actual} is not {expected}"
    )


def net():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches(steps, rows):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(rows, 6, generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def make_optimizer(kind, parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
    }[kind]()


def train_equals_one_process(kind, options, passes, closure):
    rank, size = hvd.rank(), hvd.size()
    alone, together = net(), net()
    reference = make_optimizer(kind, alone.parameters())
    if isinstance(options.get("groups"), str):
        options = {"groups": [[together[0].weight, together[2].bias], [together[0].bias]]}
    compression = getattr(hvd.Compression, options.get("compression", "none"))
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(kind, together.parameters()),
        named_parameters=together.named_parameters(),
        backward_passes_per_step=passes,
        **{
            **copy.deepcopy({k: v for k, v in options.items() if k != "groups"}),
            "compression": compression,
        },
        **({"groups": options["groups"]} if "groups" in options else {}),
    )
    loss = torch.nn.functional.cross_entropy
    for features, labels in batches(6, 4 * size * passes):
        reference.zero_grad()
        (loss(alone(features), labels) * passes).backward()
        reference.step()

        def evaluate(features=features, labels=labels):
            optimizer.zero_grad()
            for i in range(passes):
                part = slice((rank * passes + i) * 4, (rank * passes + i + 1) * 4)
                value = loss(together(features[part]), labels[part])
                value.backward()
            return value

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    tolerance = 2e-2 if compression is not hvd.Compression.none else 1e-5
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        assert_close(one, other, tolerance)


CASES = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "two groups": {"groups": 2},
    "given groups": {"groups": "some"},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "bucket view": {"gradient_as_bucket_view": True},
    "bucket view in groups, bf16": {
        "gradient_as_bucket_view": True,
        "groups": 3,
        "compression": "bf16",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_training_of_two_equals_one_process_on_the_whole_batch(pair, case):
    pair.run(train_equals_one_process, "sgd", CASES[case], 1, False)


@pytest.mark.parametrize("case", ["plain", "two groups"])
def test_training_of_three_equals_one_process_on_the_whole_batch(trio, case):
    trio.run(train_equals_one_process, "sgd", CASES[case], 1, False)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("closure", [False, True], ids=["steps", "closures"])
def test_passes_and_closures_equal_one_process_too(pair, passes, closure):
    pair.run(train_equals_one_process, "adamw", {}, passes, closure)


def uneven_use():
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    before = [layer.weight.detach().clone() for layer in layers]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters()
    )
    # Every rank uses a layer of its own; the other one takes part with zeros.
    layers[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for layer, old in zip(layers, before, strict=True):
        assert_close(layer.weight, old - 0.5)


def test_a_parameter_that_a_rank_does_not_use_takes_part_with_zeros(pair):
    pair.run(uneven_use)


def late_parameters():
    first, second, frozen = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    frozen.requires_grad_(requires_grad=False)
    parameters = [*first.parameters(), *frozen.parameters()]
    hvd.broadcast_parameters([*parameters, *second.parameters()], root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    optimizer.add_param_group({"params": list(second.parameters())})
    frozen.requires_grad_()
    for _ in range(2):
        optimizer.zero_grad()
        sum(
            layer(torch.full((1, 2), float(hvd.rank()))).sum() for layer in (first, second, frozen)
        ).backward()
        optimizer.step()
    return torch.cat([layer.weight.detach() for layer in (first, second, frozen)]).tolist()


def test_parameters_added_or_unfrozen_later_are_reduced_too(pair):
    one, other = pair.run(late_parameters)
    assert one == other


def misuse():
    layer = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    messages = []
    layer(torch.ones(1, 2)).sum().backward()
    for action in (lambda: layer(torch.ones(1, 2)).sum().backward(), optimizer.zero_grad):
        try:
            action()
        except AssertionError as error:
            messages.append(str(error))
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    before = layer.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert (layer.weight - before).norm() <= 1.1e-3
    return messages


def test_misuse_is_an_error_and_gradients_can_be_clipped_between_synchronize_and_step(pair):
    for messages in pair.run(misuse):
        assert "more than backward_passes_per_step=1" in messages[0]
        assert "zero_grad() came before" in messages[1]


def sparse_gradients(kind, sparse_as_dense):
    """A table that the last rank does not use in every step."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(1)
    alone, together = (torch.nn.Embedding(5, 2, sparse=True) for _ in range(2))
    together.load_state_dict(alone.state_dict())
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}
    reference = classes[kind](list(alone.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        classes[kind](list(together.parameters()), lr=0.1),
        together.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )

    def loss(table, by):
        return (table(torch.tensor([by, by, 3])) ** 2).sum()

    for step in range(3):
        users = [by for by in range(size) if by < size - 1 or step == 1]
        reference.zero_grad()
        (sum(loss(alone, by) for by in users) / size).backward()
        reference.step()
        optimizer.zero_grad()
        if rank in users:
            loss(together, rank).backward()
        optimizer.step()
        assert together.weight.grad.is_sparse
    assert_close(together.weight, alone.weight)


# SparseAdam moves what is in the gradient, and dense ones hold every row: made dense, it trains
# otherwise by design.
@pytest.mark.parametrize(
    ("kind", "sparse_as_dense"), [("sgd", False), ("sgd", True), ("adam", False)]
)
def test_sparse_gradients_train_as_on_one_process_also_where_a_rank_has_none(
    pair, kind, sparse_as_dense
):
    pair.run(sparse_gradients, kind, sparse_as_dense)


def first_used_late():
    table = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    head = torch.nn.Linear(2, 1)
    both = torch.nn.ModuleDict({"table": table, "head": head})
    hvd.broadcast_parameters(both.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=1.0), both.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = head(torch.ones(1, 2)).sum()
        if step == 2 and hvd.rank() == 0:
            loss = loss + table(torch.tensor([1])).sum()
        loss.backward()
        optimizer.step()
    return table.weight[:, 0].tolist()


def test_a_sparse_gradient_that_comes_late_and_on_one_rank_reaches_all(pair):
    assert pair.run(first_used_late) == [[1.0, 0.5, 1.0, 1.0, 1.0]] * 2


def channels_last():
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(conv.parameters(), lr=1.0), conv.named_parameters()
    )
    conv(torch.full((1, 3, 4, 4), float(hvd.rank()))).sum().backward()
    local = conv.weight.grad.clone()
    optimizer.synchronize()
    assert_close(conv.weight.grad, hvd.allreduce(local.contiguous()))


def test_gradients_that_are_not_contiguous_are_reduced(pair):
    pair.run(channels_last)


def optimizer_state_spreads(kind):
    layer = torch.nn.Linear(3, 2)
    classes = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    rate = 0.5 if hvd.rank() == 0 else 0.1
    optimizer = classes[kind](layer.parameters(), lr=rate)
    if hvd.rank() == 0:
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    before = layer.weight.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(layer.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.5
    state = [optimizer.state[parameter] for parameter in layer.parameters()]
    return [{key: str(value) for key, value in entry.items()} for entry in state]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_optimizer_state_and_options_spread_without_a_step(pair, kind):
    first, *others = pair.run(optimizer_state_spreads, kind)
    assert all(other == first for other in others)
    assert (kind == "adam") == ("exp_avg" in first[0])


def state_spreads_without_pickle():
    from farandole.torch import functions

    def refuse(*_):
        raise AssertionError("something was unpickled")

    functions.cloudpickle.loads, loads = refuse, functions.cloudpickle.loads
    try:
        return optimizer_state_spreads("adam")
    finally:
        functions.cloudpickle.loads = loads


def test_optimizer_state_needs_no_pickle(pair):
    first, second = pair.run(state_spreads_without_pickle)
    assert first == second


class Schedule:
    def __init__(self, number):
        self.number = number


def option_that_is_an_object():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.param_groups[0].update(
        schedule=Schedule(7 + hvd.rank()), kind=torch.bfloat16, rank=hvd.rank()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    return group["schedule"].number, str(group["kind"]), group["rank"]


def test_options_of_any_type_spread(pair):
    assert pair.run(option_that_is_an_object) == [(7, "torch.bfloat16", 0)] * 2


def different_groups():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(1 + hvd.rank())]
    try:
        hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=1.0), root_rank=0)
    except ValueError as error:
        return str(error)
    return None


def test_optimizers_of_different_shape_are_refused_on_every_rank(pair):
    for message in pair.run(different_groups):
        assert "rank 1: [2]" in message
