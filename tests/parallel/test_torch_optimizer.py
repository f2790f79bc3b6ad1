# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""DistributedOptimizer on real ranks: bucket views, process sets, scalers, accumulation, Adasum."""

import gc
import os
import warnings

import pytest
import torch

import farandole.torch as hvd


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch_of(rank, step=0):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(5, 4, generator=generator)


def loss_of(module, rank, step=0):
    return (module(batch_of(rank, step)) ** 2).sum()


def assert_same(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{a} is not {b}"


def views_stay_views(set_to_none):
    together, alone = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1),
        together.named_parameters(),
        backward_passes_per_step=2,
        gradient_as_bucket_view=True,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    places = None
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        reference.zero_grad()
        for part in range(2):
            loss_of(together, hvd.rank(), 2 * step + part).backward()
            for rank in range(hvd.size()):
                (loss_of(alone, rank, 2 * step + part) / hvd.size()).backward()
        optimizer.step()
        reference.step()
        assert_same(together, alone)
        memories = {
            parameter.grad.untyped_storage().data_ptr() for parameter in together.parameters()
        }
        assert len(memories) == 1
        now = [parameter.grad.data_ptr() for parameter in together.parameters()]
        assert all(address % 64 == 0 for address in now)
        assert places in (None, now)
        places = now


@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeroed", "dropped"])
def test_gradients_are_views_of_one_memory_from_step_to_step(pair, set_to_none):
    pair.run(views_stay_views, set_to_none)


def views_of_unused_and_sparse():
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    before = [layer.weight.detach().clone() for layer in layers]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=1.0),
        layers.named_parameters(),
        gradient_as_bucket_view=True,
    )
    layers[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for layer, old in zip(layers, before, strict=True):
        assert torch.allclose(layer.weight, old - 0.5)
    table = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0),
        [("table", table.weight)],
        gradient_as_bucket_view=True,
    )
    try:
        table(torch.tensor([0])).sum().backward()
    except ValueError as error:
        return str(error)
    return None


def test_views_of_unused_parameters_are_zeros_and_sparse_ones_are_refused(pair):
    assert all(
        "needs dense gradients" in message for message in pair.run(views_of_unused_and_sparse)
    )


def scaled_steps():
    rank = hvd.rank()
    together, alone = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(together, rank, step)
            if step == 2 and rank == 0:
                loss = loss * float("inf")  # on one rank only: all ranks skip
            scaler.scale(loss).backward()
            if step == 1:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            if step != 2:
                reference.zero_grad()
                sum(
                    loss_of(alone, other, step) / hvd.size() for other in range(hvd.size())
                ).backward()
                reference.step()
    assert_same(together, alone)
    return scaler.get_scale()


def test_a_scaler_sees_reduced_gradients_so_that_all_ranks_skip_the_same_steps(pair):
    assert pair.run(scaled_steps) == [4.0, 4.0]


def uneven_accumulation():
    together, alone = net(), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for passes in (1, 3, 2):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(passes - 1):
            with optimizer.no_sync():
                loss_of(together, hvd.rank(), part).backward()
        loss_of(together, hvd.rank(), passes - 1).backward()
        for rank in range(hvd.size()):
            for part in range(passes):
                (loss_of(alone, rank, part) / hvd.size()).backward()
        optimizer.step()
        reference.step()
        assert_same(together, alone)
    # Fewer passes than announced, as at the end of an epoch: step takes what is there.
    optimizer.set_backward_passes_per_step(4)
    optimizer.zero_grad()
    reference.zero_grad()
    loss_of(together, hvd.rank(), 9).backward()
    for rank in range(hvd.size()):
        (loss_of(alone, rank, 9) / hvd.size()).backward()
    optimizer.step()
    reference.step()
    assert_same(together, alone)


def test_accumulation_of_any_length_equals_one_process(pair):
    pair.run(uneven_accumulation)


def rewrapped():
    together = net()
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
        )
        loss_of(together, hvd.rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
    # No hook of the dropped optimizers is left: gradients stay local.
    loss_of(together, hvd.rank()).backward()
    return float(together[0].weight.grad.sum())


def test_a_dropped_optimizer_leaves_no_hooks(pair):
    one, other = pair.run(rewrapped)
    assert one != other


def frozen_in_a_bucket():
    together = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1, weight_decay=0.5),
        together.named_parameters(),
    )
    for step in range(3):
        together[0].weight.requires_grad_(step != 1)
        before = together[0].weight.detach().clone()
        optimizer.zero_grad()
        loss_of(together, hvd.rank(), step).backward()
        optimizer.step()
        assert torch.equal(together[0].weight, before) == (step == 1)
        assert (
            len(
                {
                    tuple(values)
                    for values in hvd.allgather_object(together[0].weight.flatten().tolist())
                }
            )
            == 1
        )


def test_parameters_may_be_frozen_for_a_while(pair):
    pair.run(frozen_in_a_bucket)


def adasum_of(vectors):
    """The formula on whole vectors, folded as the engine does it for two."""
    a, b = (vector.double() for vector in vectors)
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def adasum_steps(kind):
    rank, size = hvd.rank(), hvd.size()
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    together = net()
    models = [net() for _ in range(size)]
    references = [classes[kind](model.parameters(), lr=0.1) for model in models]
    optimizer = hvd.DistributedOptimizer(
        classes[kind](together.parameters(), lr=0.1), together.named_parameters(), op=hvd.Adasum
    )
    for step in range(3):
        starts = [parameter.detach().clone() for parameter in together.parameters()]
        optimizer.zero_grad()
        loss_of(together, rank, step).backward()
        optimizer.synchronize()
        optimizer.step()
        for other, (model, reference) in enumerate(zip(models, references, strict=True)):
            reference.zero_grad()
            loss_of(model, other, step).backward()
            reference.step()
        for i, (start, parameter) in enumerate(zip(starts, together.parameters(), strict=True)):
            changes = [(list(model.parameters())[i] - start).flatten() for model in models]
            expected = start + adasum_of(changes).view(start.shape).float()
            assert torch.allclose(parameter, expected, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                for model in models:
                    list(model.parameters())[i].copy_(parameter)
    try:
        with optimizer.skip_synchronize():
            optimizer.step()
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_adasum_combines_the_steps_of_the_wrapped_optimizer(pair, kind):
    assert all("not possible with op=Adasum" in message for message in pair.run(adasum_steps, kind))


def adasum_with_a_scaler():
    together = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters(), op=hvd.Adasum
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(together, hvd.rank(), 0)).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        return str(error)
    return None


def test_adasum_refuses_a_scaler_that_skips_steps_by_rank(pair):
    assert all("GradScaler" in message for message in pair.run(adasum_with_a_scaler))


def adasum_of_all():
    rank, size = hvd.rank(), hvd.size()
    # What ranks agree on counts once, what is orthogonal adds up.
    same = hvd.allreduce(torch.arange(1.0, 8.0), op=hvd.Adasum)
    own = torch.zeros(size, dtype=torch.float64)
    own[rank] = rank + 1.0
    apart = hvd.allreduce(own, op=hvd.Adasum)
    grouped = hvd.grouped_allreduce([torch.arange(1.0, 8.0), own], op=hvd.Adasum)
    assert torch.allclose(same, torch.arange(1.0, 8.0))
    assert torch.allclose(apart, torch.arange(1.0, size + 1.0, dtype=torch.float64))
    assert all(torch.equal(one, other) for one, other in zip(grouped, [same, apart], strict=True))
    half = hvd.allreduce_(torch.ones(5, dtype=torch.float16), op=hvd.Adasum)
    assert torch.equal(half, torch.ones(5, dtype=torch.float16))
    try:
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)
    except (ValueError, hvd.HorovodInternalError):
        return True
    return False


def test_adasum_counts_agreement_once_and_adds_what_is_orthogonal(world):
    assert world.run(adasum_of_all) == [True] * world.size


def one_gradient_differs():
    from farandole.torch._handles import table

    first = torch.nn.Parameter(torch.zeros(2 + hvd.rank()))
    second = torch.nn.Parameter(torch.zeros(3))
    named = [("first", first), ("second", second)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([first, second], lr=1.0), named, groups=[[first], [second]]
    )
    under_way = len(table._entries)
    (first.sum() + (hvd.rank() + 1.0) * second.sum()).backward()
    with pytest.raises(
        ValueError, match=r"Mismatched ALLREDUCE tensor shapes: tensor allreduce\.first"
    ):
        optimizer.step()
    assert len(table._entries) == under_way
    return second.grad.tolist()


def test_a_gradient_that_cannot_be_reduced_leaves_no_other_under_way(pair):
    assert pair.run(one_gradient_differs) == [[1.5] * 3] * 2


def reduced_beside_the_backward_pass(cores):
    together, alone = net(), net()
    asked, os.sched_getaffinity = os.sched_getaffinity, lambda _: set(range(cores[hvd.rank()]))
    try:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters(), groups=2
        )
    finally:
        os.sched_getaffinity = asked
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    busy = []
    first, *rest = together
    for step in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        hidden = first(batch_of(hvd.rank(), step))
        # Called when the last layer's gradients are there and the first one's are not.
        hidden.register_hook(lambda _: busy.append(optimizer._reducer.has_started_reduction()))
        (torch.nn.Sequential(*rest)(hidden) ** 2).sum().backward()
        busy.append(optimizer._reducer.has_started_reduction())
        for rank in range(hvd.size()):
            (loss_of(alone, rank, step) / hvd.size()).backward()
        optimizer.step()
        reference.step()
        assert_same(together, alone)
    return busy


@pytest.mark.parametrize("cores", [(3, 3), (2, 2), (3, 2)], ids=["free", "taken", "one rank's"])
def test_gradients_travel_during_the_backward_pass_where_a_core_is_free(pair, cores):
    assert pair.run(reduced_beside_the_backward_pass, cores) == [
        [count > 2, True] * 2 for count in cores
    ]
