# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Operations, optimizers and layers over some of the ranks."""

import pytest
import torch

import farandole.torch as hvd


@pytest.fixture
def changeable(fresh_world):
    """A world of three ranks whose process sets may change."""
    return fresh_world(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def refusals(pair):
    for operation in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError):
            operation(torch.ones(2), process_set=pair)
    with pytest.raises(ValueError, match="not a member"):
        pair.rank()


def every_operation():
    """Ranks 0 and 2 do everything; rank 1 does something else meanwhile."""
    rank = hvd.rank()
    pair = hvd.add_process_set([2, 0])
    assert (pair.ranks, pair.size(), pair.included()) == ([0, 2], 2, rank != 1)
    if rank == 1:
        refusals(pair)
    else:
        options = {"process_set": pair}
        assert pair.rank() == rank // 2
        mine = torch.full((2,), float(rank))
        assert hvd.allreduce(mine, name="same", **options).tolist() == [1, 1]
        assert hvd.allreduce_(mine.clone(), op=hvd.Max, **options).tolist() == [2, 2]
        assert hvd.grouped_allreduce([mine, mine], op=hvd.Sum, **options)[1].tolist() == [2, 2]
        assert hvd.allgather(mine, **options).tolist() == [0, 0, 2, 2]
        assert hvd.grouped_allgather([mine], **options)[0].tolist() == [0, 0, 2, 2]
        assert hvd.broadcast(mine, 2, **options).tolist() == [2, 2]
        assert hvd.alltoall(mine, **options).tolist() == [0, 2]
        assert hvd.reducescatter(mine, op=hvd.Sum, **options).tolist() == [2]
        assert hvd.grouped_reducescatter([mine], op=hvd.Sum, **options)[0].tolist() == [2]
        assert hvd.broadcast_object(rank, root_rank=2, **options) == 2
        assert hvd.allgather_object(rank, **options) == [0, 2]
        sparse = torch.sparse_coo_tensor([[0]], [float(rank)], (2,))
        assert hvd.sparse_allreduce_async(
            sparse, "sparse", hvd.Sum, **options
        )().to_dense().tolist() == [2, 0]
        assert hvd.allreduce(mine, op=hvd.Adasum, **options).tolist() == [2, 2]
        leaf = torch.ones(2, requires_grad=True)
        (hvd.allgather(leaf, **options).sum() * (rank + 1)).backward()
        assert leaf.grad.tolist() == [4, 4]
        hvd.barrier(process_set=pair)
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(mine, 1, **options)
    # The same name at the same time in another set.
    assert hvd.allreduce(torch.full((1,), float(rank)), name="same").item() == 1
    assert hvd.remove_process_set(pair)
    assert pair.process_set_id is None
    assert not hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)


def optimizers_of_two_sets():
    rank = hvd.rank()
    pair = hvd.add_process_set(hvd.ProcessSet([0, 1]))
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    norm = hvd.SyncBatchNorm(2, process_set=pair)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), process_set=pair
    )
    inputs = torch.full((1, 2), float(rank + 1))
    layer(inputs).sum().backward()
    optimizer.step()
    # Ranks 0 and 1 take the mean of 1 and 2, rank 2 its own 3.
    assert layer.weight.tolist() == [[-0.5, -0.5] if rank < 2 else [-2.0, -2.0]]
    output = norm(torch.tensor([[1.0, 1.0], [3.0, 3.0]]) * (rank + 1))
    hvd.remove_process_set(pair)
    return output.mean().item()


def test_operations_optimizers_and_layers_work_within_a_set_and_alone_outside(changeable):
    changeable.run(every_operation)
    first, second, third = changeable.run(optimizers_of_two_sets)
    assert abs(first + second) < 1e-5
    assert abs(first) > 0.1
    assert abs(third) < 1e-5


def sets_from_the_start():
    hvd.shutdown()
    evens, odds = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
    hvd.init(process_sets=[evens, odds])
    mine = evens if hvd.rank() % 2 == 0 else odds
    assert (evens.process_set_id, odds.process_set_id) == (1, 2)
    total = hvd.allreduce(torch.full((1,), hvd.rank() + 1.0), op=hvd.Sum, process_set=mine).item()
    with pytest.raises(ValueError):
        hvd.add_process_set([0, 1])
    return total


def test_sets_may_be_given_at_the_start(fresh_world):
    assert fresh_world(3).run(sets_from_the_start) == [4, 2, 4]
