# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients of every out-of-place operation on real ranks, against differences of the sum of all
ranks' losses.
"""

import pytest
import torch

import farandole.torch as hvd

STEP = 1e-6


def own_input(rows):
    """This rank's input: values that differ between ranks and elements, none near zero or equal
    to another.
    """
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    return (torch.randn(rows, 2, generator=generator, dtype=torch.float64) + 1.5).requires_grad_()


def forwards():
    """Every differentiable operation, and the rows this rank gives to it."""
    rank, size = hvd.rank(), hvd.size()
    splits = [1 + (rank + other) % 2 for other in range(size)]
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    reductions = {
        f"{name} {op}": (lambda x, op=op, many=many: many(x, op=op, **factors), 3)
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
        for name, many in {
            "allreduce": lambda x, **options: [hvd.allreduce(x, **options)],
            "grouped allreduce": lambda x, **options: hvd.grouped_allreduce(
                [x, 2 * x[:1]], **options
            ),
        }.items()
    }
    scatters = {
        f"{name} {op}": (lambda x, op=op, many=many: many(x, op=op, **factors), size + 1)
        for op in (hvd.Average, hvd.Sum)
        for name, many in {
            "reducescatter": lambda x, **options: [hvd.reducescatter(x, **options)],
            "grouped reducescatter": lambda x, **options: hvd.grouped_reducescatter(
                [x, x[:1]], **options
            ),
        }.items()
    }
    return {
        **reductions,
        **scatters,
        "allgather": (lambda x: [hvd.allgather(x)], 1 + rank),
        "grouped allgather": (lambda x: hvd.grouped_allgather([x, x[:1]], name="pair"), 1 + rank),
        "broadcast": (lambda x: [hvd.broadcast(x, size - 1)], 2),
        "alltoall": (lambda x: [hvd.alltoall(x)], size),
        "alltoall with splits": (lambda x: [hvd.alltoall(x, splits=splits)[0]], sum(splits)),
    }


def weights_like(results):
    generator = torch.Generator().manual_seed(hvd.rank())
    return [
        torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results
    ]


def local_loss(forward, x):
    """Returns the loss of this rank's results: not linear, so that second derivatives are not
    zero.
    """
    results = forward(x)
    return sum(
        ((result + 0.1 * result**2) * weight).sum()
        for result, weight in zip(results, weights_like(results), strict=True)
    )


def differences(value, x):
    """The derivative of the sum of all ranks' `value(x)` by every element of this rank's `x`."""
    found = torch.zeros_like(x)
    for rank, count in enumerate(hvd.allgather(torch.tensor([x.numel()])).tolist()):
        for element in range(count):
            totals = []
            for step in (STEP, -STEP):
                moved = x.detach().clone()
                if rank == hvd.rank():
                    moved.view(-1)[element] += step
                totals.append(hvd.allreduce(value(moved.requires_grad_()).detach(), op=hvd.Sum))
            if rank == hvd.rank():
                found.view(-1)[element] = (totals[0] - totals[1]) / (2 * STEP)
    return found


def gradients_equal_differences():
    for what, (forward, rows) in forwards().items():
        x = own_input(rows)
        local_loss(forward, x).backward()
        expected = differences(lambda y, forward=forward: local_loss(forward, y), x)
        assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-6), (
            f"{what}: {x.grad} is not {expected}"
        )


@pytest.mark.parametrize("fixture", ["pair", "trio"])
def test_gradients_equal_differences_of_the_sum_of_losses(request, fixture):
    request.getfixturevalue(fixture).run(gradients_equal_differences)


def second_gradients_equal_differences():
    direction = torch.Generator().manual_seed(50 + hvd.rank())
    every = forwards()
    for what in (
        "allreduce 0",
        "reducescatter 1",
        "allgather",
        "broadcast",
        "alltoall with splits",
    ):
        forward, rows = every[what]
        x = own_input(rows)
        along = torch.randn(x.shape, generator=direction, dtype=torch.float64)

        def slope(y, forward=forward, along=along):
            (gradient,) = torch.autograd.grad(local_loss(forward, y), y, create_graph=True)
            return (gradient * along).sum()

        slope(x).backward()
        expected = differences(slope, x)
        assert torch.allclose(x.grad, expected, rtol=1e-4, atol=1e-5), (
            f"{what}: {x.grad} is not {expected}"
        )


def test_second_gradients_equal_differences_too(pair):
    pair.run(second_gradients_equal_differences)


def ties_and_zeros():
    rank, size = hvd.rank(), hvd.size()
    # All ranks hold the extreme of the first element, one rank that of the second.
    x = torch.tensor([1.0, float(rank == 0)], requires_grad=True)
    hvd.allreduce(x, op=hvd.Max).sum().backward()
    assert torch.allclose(x.grad, torch.tensor([1.0, float(size * (rank == 0))]))
    # One zero: only its rank has a gradient. Two zeros: no rank has one.
    x = torch.tensor([0.0 if rank == 0 else 2.0, 0.0 if rank < 2 else 2.0], requires_grad=True)
    hvd.allreduce(x, op=hvd.Product).sum().backward()
    alone = size * 2.0 ** (size - 1) if rank == 0 else 0.0
    both = [0.0] * 2 if size > 2 else [0.0, 0.0]
    assert torch.allclose(x.grad, torch.tensor([alone, both[0]]))


def test_gradients_of_extremes_are_shared_and_those_of_products_mind_zeros(trio):
    trio.run(ties_and_zeros)


def whole_numbers_in_a_group():
    x = torch.ones(2, requires_grad=True)
    floats, wholes = hvd.grouped_allreduce([x, torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
    assert wholes.tolist() == [hvd.size()] * 2
    floats.sum().backward()
    assert x.grad.tolist() == [hvd.size()] * 2
    try:
        hvd.allreduce(x, op=hvd.Adasum).sum().backward()
    except ValueError as error:
        return str(error)
    return None


def test_whole_numbers_in_a_group_have_no_gradient_nor_has_adasum(pair):
    assert pair.run(whole_numbers_in_a_group) == ["this reduction has no gradient: Adasum"] * 2
