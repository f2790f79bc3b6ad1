# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cases that run on Gloo and on Farandole: one line a case, a function of rank and size.

A case returns tensors, objects or an error; a rank runs all cases of a backend one after the other.
"""

import threading
import time
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from tests.parallel import function_states

DTYPES = ["uint8", "int8", "int16", "int32", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "bool", "complex64"]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
SHORT = timedelta(seconds=2)


def values(rank, dtype=torch.float32, count=6):
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


def done(tensor, work):
    """Waits for a work; returns the tensor and the states of the work."""
    work.wait()
    return tensor, work.is_completed(), work.is_success(), work.result()


def reduced_empty(op, rank, size):
    tensor = torch.zeros(0, dtype=torch.int64)
    return done(tensor, dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), async_op=True))


def reduced(call, op, dtype, rank, size):
    dtype, op = getattr(torch, dtype), getattr(dist.ReduceOp, op)
    if call == "all_reduce":
        dist.all_reduce(tensor := values(rank, dtype), op)
    elif call == "reduce":
        dist.reduce(tensor := values(rank, dtype), 1, op)
        return tensor if rank == 1 else None
    elif call == "reduce_scatter":
        parts = [values(rank + i, dtype) for i in range(size)]
        dist.reduce_scatter(tensor := torch.empty(6, dtype=dtype), parts, op)
    else:
        tensor = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(tensor, values(rank, dtype, 2 * size), op)
    return tensor


def moved(call, dtype, rank, size):
    own = values(rank, getattr(torch, dtype))
    if call == "broadcast":
        dist.broadcast(own, 1)
        return own
    if call == "all_gather":
        dist.all_gather(found := [torch.empty_like(own) for _ in range(size)], own)
    elif call == "all_gather_into_tensor":
        dist.all_gather_into_tensor(found := torch.empty(6 * size, dtype=own.dtype), own)
    elif call == "gather_into_tensor":
        found = torch.zeros(6 * size, dtype=own.dtype)
        dist.gather_into_tensor(own, found if rank == 1 else None, 1)
    elif call == "all_gather_coalesced":
        found = [[torch.empty_like(own), torch.empty_like(own)] for _ in range(size)]
        dist.all_gather_coalesced(found, [own, own])
    elif call == "gather":
        found = [torch.empty_like(own) for _ in range(size)] if rank == 1 else None
        dist.gather(own, found, 1)
    elif call == "scatter":
        parts = [values(i, own.dtype) for i in range(size)] if rank == 1 else None
        dist.scatter(found := torch.empty_like(own), parts, 1)
    elif call == "all_to_all":
        own = [torch.full((i + 1,), 10 * rank + i).to(own.dtype) for i in range(size)]
        found = [torch.empty(rank + 1, dtype=own[0].dtype) for _ in range(size)]
        dist.all_to_all(found, own)
    else:
        sends = torch.full((size * (rank + 1), 2), rank).to(own.dtype)
        found = torch.empty(sum(range(size + 1)), 2, dtype=own.dtype)
        dist.all_to_all_single(found, sends, [r + 1 for r in range(size)], [rank + 1] * size)
    return found


def sparse(rank, size, shape=(5, 2), op=None, **more):
    indices = torch.tensor([[rank, rank + 1, rank, 4]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(4, 2) * (rank + 1), shape, **more)
    dist.all_reduce(tensor, op or dist.ReduceOp.SUM)
    return tensor.coalesce().to_dense(), tensor.is_sparse


def sparse_scalar(rank, size):
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank], [1]]), torch.ones(1), (4, 4))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor.to_dense()


def sparse_empty(rank, size):
    count = 0 if rank == 0 else 2
    tensor = torch.sparse_coo_tensor(torch.arange(count)[None], torch.ones(count), (4,))
    dist.all_reduce(tensor)
    return tensor.to_dense()


def trained_embedding(rank, size):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor([rank, step, 9])).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained(hook, rank, size, **options):
    """Trains a model with a communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    # Gloo has two threads: with several buckets, hooks that wait in callbacks leave it none.
    size_limit = 25 if hook == "power" else 0.0005
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=size_limit, **options)
    if hook == "power":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "local":
        group, _ = dist.new_subgroups(1)
        state = local.PostLocalSGDState(None, group, start_localSGD_iter=2)
        parallel.register_comm_hook(state, local.post_localSGD_hook)
    elif hook:
        parallel.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def objects(call, group, rank, size):
    """Object collectives of a group of the ranks 0 and 1; its second rank is the root."""
    if group is not None and rank > 1:
        return None
    count = dist.get_world_size(group)
    mine = {"rank": rank, "text": "x" * 50 * rank}
    if call == "all_gather_object":
        dist.all_gather_object(found := [None] * count, mine, group)
    elif call == "gather_object":
        found = [None] * count if rank == 1 else None
        dist.gather_object(mine, found, 1, group)
    elif call == "broadcast_object_list":
        dist.broadcast_object_list(found := [mine, rank], 1, group)
    else:
        found = [None]
        parts = [(i, "for") for i in range(count)] if rank == 1 else None
        dist.scatter_object_list(found, parts, 1, group)
    return found


def objects_of_subgroup(call, rank, size):
    return objects(call, pair_group(), rank, size)


def changed_timeout(rank, size):
    dist.distributed_c10d.set_timeout(timedelta(minutes=20))


def uneven_exchange(rank, size):
    dist.all_to_all_single(torch.empty(1), torch.empty(size + 1))


def uneven_scatter(rank, size):
    dist.reduce_scatter_tensor(torch.empty(3), torch.empty(2))


def pair_group(**options):
    return dist.new_group([0, 1], **options)


def local_group(rank, size):
    """Groups that only their members create."""
    members = [0, 1] if rank < 2 else [rank]
    group = dist.new_group(members, use_local_synchronization=True)
    dist.all_reduce(tensor := torch.ones(2), group=group)
    return tensor, dist.get_world_size(group), dist.get_process_group_ranks(group)


def split(rank, size):
    group = dist.split_group(split_ranks=[[0, 1]] + [[i] for i in range(2, size)])
    dist.all_reduce(tensor := torch.ones(1), group=group)
    name = dist.get_backend(group) == NAME
    return tensor, dist.get_world_size(group), dist.get_rank(group), name


def many_groups(rank, size):
    groups = [dist.new_group([i % size, (i + 1) % size]) for i in range(24)]
    found = []
    # Each rank uses its groups from another one on.
    own = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    works = []
    for group in own:
        found.append(tensor := torch.ones(1) * (rank + 1))
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works[rank:] + works[:rank]:
        work.wait()
    return found


def reversed_group(rank, size):
    """A group in descending order."""
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    own = values(rank)
    dist.all_gather(gathered := [torch.empty(6) for _ in range(size)], own, group=group)
    dist.reduce_scatter_tensor(part := torch.empty(2), values(rank, count=2 * size), group=group)
    sends = torch.arange(size).float() + 10 * rank
    dist.all_to_all_single(received := torch.empty(size), sends, group=group)
    dist.scatter(
        got := torch.empty(1),
        [torch.ones(1) * i for i in range(size)] if rank == 0 else None,
        0,
        group=group,
    )
    return gathered, part, received, got, dist.get_rank(group)


def subgroups(rank, size):
    group, groups = dist.new_subgroups_by_enumeration([[0, 1]] + [[i] for i in range(2, size)])
    dist.all_reduce(tensor := torch.ones(1), group=group)
    return tensor, len(groups)


def late_barrier(rank, size):
    """The last rank does not come to a barrier of a group with a short timeout."""
    group = dist.new_group(timeout=SHORT)
    if rank == size - 1:
        time.sleep(4)
        return "absent"
    try:
        dist.barrier(group)
    except RuntimeError:
        return "late"
    return "complete"


def missing_rank(rank, size, wait_all=False):
    """The last rank does not come to a monitored barrier; the next one works."""
    group = dist.new_group()
    found = None
    if rank < size - 1:
        try:
            dist.monitored_barrier(group, SHORT, wait_all)
        except RuntimeError as error:
            found = str(size - 1) in str(error) or rank > 0
    dist.barrier()
    return found


def passed_barriers(rank, size):
    for _ in range(3):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    return dist.barrier(), dist.barrier(async_op=True).wait()


def late_reduction(rank, size):
    group = dist.new_group(timeout=SHORT)
    if rank == size - 1:
        time.sleep(4)
        return "absent"
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return "late", 1 < time.monotonic() - started < 4
    return "complete"


def coalesced(call, rank, size):
    tensors = [values(rank), values(rank + 1)]
    if call == "all_reduce_coalesced":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced(tensors)
        return tensors
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        if call == "all_reduce":
            for tensor in tensors:
                dist.all_reduce(tensor)
            found = tensors
        elif call == "all_gather_into_tensor":
            found = [torch.empty(6 * size) for _ in tensors]
            for output, tensor in zip(found, tensors, strict=True):
                dist.all_gather_into_tensor(output, tensor)
        else:
            found = [torch.empty(2) for _ in tensors]
            for output in found:
                dist.reduce_scatter_tensor(output, values(rank, count=2 * size))
    manager.wait()
    return found


def states(rank, size):
    work = dist.all_reduce(tensor := values(rank), async_op=True)
    return done(tensor, work)


def future(rank, size):
    work = dist.all_reduce(values(rank), async_op=True)
    return work.get_future().then(lambda one: one.value()[0].sum()).wait()


def nested_futures(rank, size):
    """A callback that waits for an operation that it starts, as PowerSGD's hook does."""

    def start_second(one):
        second = dist.all_reduce(one.value()[0], async_op=True).get_future()
        return second.wait()[0].sum()

    first = dist.all_reduce(values(rank), async_op=True).get_future()
    return first.then(start_second).then(lambda one: one.value() + 1).wait()


def sent(rank, size, count=6, dtype=torch.float32, tag=0):
    """Every rank sends to the next one, each in two steps."""
    if rank == 0:
        dist.send(values(0, dtype, count), 1, tag=tag)
        return None
    if rank == 1:
        source = dist.recv(found := torch.zeros(count, dtype=dtype), 0, tag=tag)
        return found, source
    return None


def ring(rank, size):
    work = dist.isend(values(rank), (rank + 1) % size)
    receive = dist.irecv(found := torch.zeros(6), (rank - 1) % size)
    receive.wait()
    work.wait()
    return found


def tagged(rank, size):
    """Tags find their messages in any order."""
    if rank == 0:
        works = [dist.isend(torch.ones(1) * tag, 1, tag=tag) for tag in (1, 2, 3)]
        [work.wait() for work in works]
    elif rank == 1:
        found = {}
        for tag in (3, 1, 2):
            dist.recv(tensor := torch.zeros(1), 0, tag=tag)
            found[tag] = tensor.item()
        return found
    return None


def any_source(rank, size):
    if rank:
        dist.send(torch.ones(2) * rank, 0, tag=7)
        return None
    found = {}
    for _ in range(size - 1):
        source = dist.recv(tensor := torch.zeros(2), tag=7)
        found[source] = tensor.tolist()
    return found


def batch(rank, size):
    found = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, found, (rank - 1) % size),
            dist.P2POp(dist.isend, torch.ones(3) * rank, (rank + 1) % size),
        ]
    )
    [work.wait() for work in works]
    return found


def object_messages(rank, size):
    if rank == 0:
        return dist.send_object_list([{"a": 1}, "text"], 1)
    if rank == 1:
        source = dist.recv_object_list(found := [None, None], 0)
        return found, source
    return None


def group_messages(rank, size):
    group = pair_group()
    if rank == 0:
        return dist.send(torch.ones(3), 1, group)
    return dist.recv(torch.zeros(3), 0, group) if rank == 1 else None


def long_message(rank, size):
    if rank == 0:
        dist.send(torch.arange(1 << 20), 1)
    elif rank == 1:
        dist.recv(found := torch.zeros(1 << 20, dtype=torch.int64), 0)
        return found.sum()
    return None


def many_messages(rank, size):
    """Messages of both directions, the receives posted late."""
    if rank > 1:
        return None
    works = [dist.isend(torch.ones(4) * i, 1 - rank) for i in range(40)]
    found = [torch.zeros(4) for _ in range(40)]
    works += [dist.irecv(one, 1 - rank) for one in found]
    [work.wait() for work in works]
    return found


def late_receive(rank, size):
    group = dist.new_group(timeout=SHORT)
    if rank == 0:
        try:
            dist.recv(torch.zeros(1), 1, group)
        except RuntimeError:
            return "late"
    return None


def pipeline(rank, size):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    if rank > 1:
        pair_group()
        return None
    group = pair_group()
    torch.manual_seed(3)
    parts = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)]
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    data, target = torch.randn(8, 4), torch.randn(8, 2)
    if rank == 0:
        schedule.step(data)
        return [parameter.grad for parameter in parts[0].parameters()]
    losses = []
    output = schedule.step(target=target, losses=losses)
    return output.detach(), torch.stack(losses).detach(), parts[1].weight.grad


def mesh(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    found = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size)
    tensor = DTensor.from_local(whole.chunk(size)[rank], found, [Shard(0)])
    return tensor.full_tensor(), tensor.sum().full_tensor()


def threads(rank, size):
    """Groups that are used by threads at the same time."""
    groups = [dist.new_group() for _ in range(3)]
    found = [values(rank + i) for i in range(3)]
    pairs = zip(found, groups, strict=True)
    started = [
        threading.Thread(target=lambda t, g: dist.all_reduce(t, group=g), args=one) for one in pairs
    ]
    [thread.start() for thread in started]
    [thread.join() for thread in started]
    return found


def premultiplied(factor, dtype, rank, size):
    op = dist._make_nccl_premul_sum(factor)
    dist.all_reduce(tensor := values(rank, dtype), op)
    return tensor


def profiled(rank, size):
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
    names = {event.key for event in profile.key_averages()}
    return {"c10d::allreduce_", "c10d::broadcast_", "c10d::barrier"} <= names


def own_events(rank, size):
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
    names = {event.key for event in profile.key_averages()}
    return any(name.partition(":")[2] in ("all_reduce", "allreduce") for name in names)


def views(rank, size):
    tensor = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(tensor)
    return tensor


def names(rank, size):
    group = pair_group()
    found = dist.get_backend(), dist.get_backend_config()
    pair = dist.get_backend(group) if rank < 2 else None
    return *(one == NAME for one in found), pair == NAME if rank < 2 else None


def logged_name(rank, size):
    parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True)
    parallel(torch.ones(1, 2)).sum().backward()
    return parallel._get_ddp_logging_data()["backend_name"] == NAME


NAME = ""
"""The backend that runs."""

REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVEMENTS = ["broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"]
MOVEMENTS += ["all_to_all", "all_to_all_single"]
OBJECTS = ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"]
MESSAGE_DTYPES = ["bool", "complex64", "bfloat16"]

# fmt: off
CASES = {
    **{f"all_reduce {o} {d}": partial(reduced, "all_reduce", o, d) for o in OPS for d in DTYPES},
    **{f"all_reduce {o} of nothing": partial(reduced_empty, o) for o in OPS if o != "AVG"},
    **{f"{c} {o} float32": partial(reduced, c, o, "float32") for c in REDUCTIONS for o in OPS},
    **{f"{c} {o} int64": partial(reduced, c, o, "int64") for c in REDUCTIONS for o in OPS},
    **{f"{c} {d}": partial(moved, c, d) for c in MOVEMENTS for d in DTYPES},
    "gather_into_tensor float32": partial(moved, "gather_into_tensor", "float32"),
    "all_gather_coalesced float32": partial(moved, "all_gather_coalesced", "float32"),
    "all_reduce PREMUL_SUM float32": partial(premultiplied, 2.5, torch.float32),
    "PREMUL_SUM of whole numbers": partial(premultiplied, 2.5, torch.int32),
    "all_reduce of a view": views,
    "all_reduce sparse": sparse,
    "all_reduce sparse of scalars": sparse_scalar,
    "all_reduce sparse without entries": sparse_empty,
    "all_reduce sparse MAX": lambda r, n: sparse(r, n, op=dist.ReduceOp.MAX),
    "all_reduce sparse of different shapes": lambda r, n: sparse(r, n, (5 + r, 2)),
    "DDP with sparse gradients": trained_embedding,
    "DDP": partial(trained, None),
    "DDP static graph": lambda r, n: trained(None, r, n, static_graph=True),
    "DDP unused parameters": lambda r, n: trained(None, r, n, find_unused_parameters=True),
    "DDP allreduce_hook": partial(trained, "allreduce_hook"),
    "DDP fp16_compress_hook": partial(trained, "fp16_compress_hook"),
    "DDP powerSGD_hook": partial(trained, "power"),
    "DDP post_localSGD_hook": partial(trained, "local"),
    "DDP logs the name": logged_name,
    "names": names,
    **{c: partial(objects, c, None) for c in OBJECTS},
    **{f"{c} of a subgroup": partial(objects_of_subgroup, c) for c in OBJECTS},
    "new_group use_local_synchronization": local_group,
    "new_group many": many_groups,
    "new_group of another order": reversed_group,
    "new_group used by threads": threads,
    "new_subgroups_by_enumeration": subgroups,
    "split_group": split,
    "set_timeout": changed_timeout,
    "barrier": passed_barriers,
    "barrier of a late rank": late_barrier,
    "all_reduce of a late rank": late_reduction,
    "monitored_barrier of a missing rank": missing_rank,
    "monitored_barrier of a missing rank, all named": partial(missing_rank, wait_all=True),
    "coalesced all_reduce": partial(coalesced, "all_reduce"),
    "coalesced all_reduce_coalesced": partial(coalesced, "all_reduce_coalesced"),
    "coalesced all_gather_into_tensor": partial(coalesced, "all_gather_into_tensor"),
    "coalesced reduce_scatter_tensor": partial(coalesced, "reduce_scatter_tensor"),
    "work states": states,
    "work future": future,
    "work nested futures": nested_futures,
    "profiler events of c10d": profiled,
    "profiler events of the backend": own_events,
    "send and recv": sent,
    "send and recv with a tag": lambda r, n: sent(r, n, tag=5),
    **{f"send and recv of {d}": partial(sent, dtype=getattr(torch, d)) for d in MESSAGE_DTYPES},
    "send and recv of nothing": lambda r, n: sent(r, n, count=0),
    "send and recv of 8 MiB": long_message,
    "send and recv in a group": group_messages,
    "isend and irecv in a ring": ring,
    "isend and irecv with tags": tagged,
    "isend and irecv, 40 each way": many_messages,
    "recv from any rank": any_source,
    "recv without a sender": late_receive,
    "batch_isend_irecv": batch,
    "send_object_list and recv_object_list": object_messages,
    "pipelining": pipeline,
    "DeviceMesh": mesh,
    "send to itself": lambda r, _: dist.send(torch.ones(1), r),
    "send with a negative tag": lambda r, n: dist.send(torch.ones(1), (r + 1) % n, tag=-1),
    "all_to_all_single that is not even": uneven_exchange,
    "reduce_scatter of other sizes": uneven_scatter,
    "shrink_group": lambda _, n: dist.distributed_c10d.shrink_group([n - 1]),
}
# fmt: on


def plain(outcome):
    """Returns an outcome without tensors, for another process."""
    if isinstance(outcome, torch.Tensor):
        return outcome.dtype, tuple(outcome.shape), outcome.tolist()
    if isinstance(outcome, list | tuple):
        return [plain(one) for one in outcome]
    return outcome


def run_cases(backend, folder, rank, size, wanted=None):
    """Runs all cases on a backend; returns the outcomes by name."""
    global NAME  # noqa: PLW0603 - one backend at a time
    import farandole.torch.distributed  # noqa: F401 - registers the backend

    NAME = backend
    dist.init_process_group(
        backend, store=dist.FileStore(f"{folder}/{backend}{size}", size), rank=rank, world_size=size
    )
    found = {}
    for name, case in CASES.items():
        if (wanted and name not in wanted) or not function_states.has_oracle(name):
            continue
        try:
            found[name] = "result", plain(case(rank, size))
        except Exception as error:  # noqa: BLE001 - compared
            found[name] = "error", f"{type(error).__name__}: {error}"[:300]
    dist.destroy_process_group()
    return found


def run_cases_on_this_rank(backend, folder):
    """Like `run_cases`, on a rank of a world of Farandole; returns the outcomes by backend."""
    from farandole.common import basics

    return {backend: run_cases(backend, folder, basics.rank(), basics.size())}
