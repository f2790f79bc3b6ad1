# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The backend of torch.distributed, on real processes, against what one process computes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = [torch.uint8, torch.int32, torch.int64, *FLOATS]


def begin(method=None):
    import farandole.torch.distributed  # noqa: F401 - registers the backend

    dist.init_process_group("farandole", init_method=method)
    return dist.get_rank(), dist.get_world_size()


def mine(rank, count=6):
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def reductions_equal_one_process():
    rank, size = begin()
    for dtype in NUMBERS:
        inputs = [(mine(r) % 4 + 1).to(dtype) for r in range(size)]
        stack = torch.stack(inputs).to(torch.float64)
        expected = {
            dist.ReduceOp.SUM: stack.sum(0),
            dist.ReduceOp.AVG: stack.sum(0) / size
            if dtype.is_floating_point
            else (stack.sum(0) / size).trunc(),
            dist.ReduceOp.MIN: stack.amin(0),
            dist.ReduceOp.MAX: stack.amax(0),
            dist.ReduceOp.PRODUCT: stack.prod(0),
        }
        for op, value in expected.items():
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op=op)
            assert torch.allclose(tensor.double(), value, rtol=1e-2), (dtype, op)
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 1, op=op)
            assert torch.allclose(
                tensor.double(), value if rank == 1 else inputs[rank].double(), rtol=1e-2
            )
            parts = [(mine(r, 3 * size) % 4 + 1).to(dtype) for r in range(size)]
            scattered = torch.empty(3, dtype=dtype)
            dist.reduce_scatter_tensor(scattered, parts[rank], op=op)
            whole = parts[rank].clone()
            dist.all_reduce(whole, op=op)
            assert torch.allclose(scattered, whole[3 * rank : 3 * rank + 3], rtol=1e-2), (dtype, op)
            scattered.zero_()
            dist.reduce_scatter(scattered, list(parts[rank].split(3)), op=op)
            assert torch.allclose(scattered, whole[3 * rank : 3 * rank + 3], rtol=1e-2), (dtype, op)
    view = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(view)
    assert torch.equal(view, torch.full((4, 2), float(size)))
    with pytest.raises(ValueError, match="whole numbers"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND)
    dist.destroy_process_group()


def test_reductions_equal_one_process(trio):
    trio.run(reductions_equal_one_process)


def movements_equal_one_process():
    rank, size = begin()
    for dtype in [*NUMBERS, torch.bool, torch.complex64, torch.float8_e5m2]:
        inputs = [(mine(r) % 5).to(dtype) for r in range(size)]
        equal = (
            torch.equal
            if dtype.itemsize > 1
            else lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        )
        for root in range(size):
            tensor = inputs[rank].clone()
            dist.broadcast(tensor, root)
            assert equal(tensor, inputs[root])
            targets = [torch.empty_like(inputs[0]) for _ in range(size)] if rank == root else None
            dist.gather(inputs[rank], targets, root)
            assert targets is None or all(map(equal, targets, inputs))
            received = torch.empty_like(inputs[0])
            dist.scatter(received, inputs if rank == root else None, root)
            assert equal(received, inputs[rank])
        targets = [torch.empty_like(inputs[0]) for _ in range(size)]
        dist.all_gather(targets, inputs[rank])
        assert all(map(equal, targets, inputs))
        whole = torch.empty(6 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, inputs[rank])
        assert equal(whole, torch.cat(inputs))
        # Each rank sends `its number + 1` rows to everyone.
        outgoing = torch.full((size * (rank + 1), 2), rank).to(dtype)
        incoming = [torch.empty(r + 1, 2, dtype=dtype) for r in range(size)]
        dist.all_to_all(incoming, list(outgoing.split(rank + 1)))
        assert all(
            equal(part, torch.full((r + 1, 2), r).to(dtype)) for r, part in enumerate(incoming)
        )
        single = torch.empty(sum(range(size + 1)), 2, dtype=dtype)
        dist.all_to_all_single(single, outgoing, [r + 1 for r in range(size)], [rank + 1] * size)
        assert equal(single, torch.cat(incoming))
        even = torch.empty(size, 2, dtype=dtype)
        dist.all_to_all_single(even, torch.full((size, 2), rank).to(dtype))
        assert equal(even, torch.arange(size).repeat_interleave(2).view(size, 2).to(dtype))
    with pytest.raises(ValueError, match="evenly"):
        dist.all_to_all_single(torch.empty(1), torch.empty(size + 1))
    dist.destroy_process_group()


def test_movements_equal_one_process(trio):
    trio.run(movements_equal_one_process)


def works_and_objects_do_what_torch_says():
    rank, size = begin("farandole://")
    tensors = [torch.full((i % 5 + 1,), float(rank)) for i in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[:10]]
    for work in reversed(works):
        assert work.wait()
    total = float(sum(range(size)))
    assert all((tensor == total).all() for tensor in tensors)
    assert futures[3].then(lambda future: future.value()[0].sum().item()).wait() == total * 4
    assert works[20].get_future().wait()[0] is tensors[20]
    assert works[20].get_future().done()
    dist.barrier()
    if torch.__version__ >= "2.14":  # before that, torch asks no other group than Gloo's
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    assert dist.barrier(async_op=True).wait()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "data": "x" * 100 * rank})
    assert [entry["rank"] for entry in gathered] == list(range(size))
    objects = [rank, "some"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [0, "some"]
    collected = [None] * size if rank == 0 else None
    dist.gather_object(("of", rank), collected, 0)
    assert collected is None or collected == [("of", r) for r in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]
    # Ranks that disagree get an error, and continue.
    with pytest.raises(ValueError, match="broadcast"):
        dist.broadcast(torch.ones(2 + rank), 0)
    import torch.distributed._functional_collectives as functional

    assert torch.equal(
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0,
        torch.full((2,), float(size)),
    )
    dist.destroy_process_group()


def test_works_and_objects_do_what_torch_says(trio):
    trio.run(works_and_objects_do_what_torch_says)


def model_and_data(size):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    return model, torch.randn(5, 4 * size, 8), torch.randint(0, 4, (5, 4 * size))


def train(model, batches, labels, optimizer):
    for batch, label in zip(batches, labels, strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp_equals_one_process_with_all_data():
    rank, size = begin()
    model, batches, labels = model_and_data(size)
    expected = train(model, batches, labels, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9))
    for options in (
        {},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ):
        model, batches, labels = model_and_data(size)
        parallel = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), 0.5, momentum=0.9)
        own = slice(4 * rank, 4 * rank + 4)
        found = train(parallel, batches[:, own], labels[:, own], optimizer)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True)), (
            options
        )
    dist.destroy_process_group()


def test_ddp_equals_one_process_with_all_data(pair):
    pair.run(ddp_equals_one_process_with_all_data)


def groups_are_process_sets():
    rank, size = begin()
    pairs = [dist.new_group([a, b]) for a, b in [(0, 1), (1, 2), (0, 1)]]
    everyone = dist.new_group()
    for group, members in zip(pairs, [(0, 1), (1, 2), (0, 1)], strict=True):
        if rank not in members:
            continue
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((3,), float(sum(members))))
        dist.broadcast(tensor.fill_(rank), members[1], group=group)
        assert torch.equal(tensor, torch.full((3,), float(members[1])))
        gathered = [None] * 2
        dist.all_gather_object(gathered, rank, group=group)
        assert gathered == list(members)
        dist.barrier(group=group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=everyone)
    assert torch.equal(tensor, torch.full((2,), float(size)))
    if torch.__version__ >= "2.14":  # before that, torch splits no group on a host
        half = dist.split_group(split_ranks=[[0, 2], [1]])
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=half)
        assert tensor.item() == (1 if rank == 1 else 2)
    if rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(tensor := torch.ones(1), group=alone)
        assert tensor.item() == 1
    if rank in (0, 1):
        dist.destroy_process_group(pairs[0])
    dist.destroy_process_group()


def test_groups_are_process_sets(fresh_world):
    fresh_world(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}).run(groups_are_process_sets)


def fully_sharded_training_equals_one_process():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = begin()
    model, batches, labels = model_and_data(size)
    expected = train(model, batches, labels, torch.optim.SGD(model.parameters(), 0.5))
    model, batches, labels = model_and_data(size)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = slice(4 * rank, 4 * rank + 4)
    train(model, batches[:, own], labels[:, own], torch.optim.SGD(model.parameters(), 0.5))
    found = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    dist.destroy_process_group()


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 asks the CPU for streams of a GPU"
)
def test_fully_sharded_training_equals_one_process(pair):
    pair.run(fully_sharded_training_equals_one_process)
