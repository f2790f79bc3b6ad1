# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups of torch.distributed in ways that Gloo does not have, and worlds without a launcher."""

import copy
import os
import socket
import subprocess
import sys
import textwrap
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

LIMIT = 100.0
"""Seconds for processes of this test's own."""


def begin(backend="farandole", **options):
    import farandole.torch.distributed  # noqa: F401 - registers the backend

    dist.init_process_group(backend, init_method="farandole://", **options)
    return dist.get_rank(), dist.get_world_size()


def groups_in_any_order():
    rank, size = begin()
    pairs = [(i, (i + 1) % size) for i in range(size)]
    # Each rank begins with another pair, so in any round each waits for a rank that is elsewhere.
    own = [tuple(sorted(pair)) for pair in pairs[rank:] + pairs[:rank] if rank in pair]
    for _ in range(8):
        groups = {pair: dist.new_group(list(pair), use_local_synchronization=True) for pair in own}
        works = []
        for pair, group in groups.items():
            tensor = torch.ones(2) * rank
            works.append((pair, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
        for pair, tensor, work in works:
            assert work.wait()
            assert tensor.tolist() == [sum(pair)] * 2
        for group in groups.values():
            dist.destroy_process_group(group)
    dist.destroy_process_group()


def test_ranks_create_groups_in_any_order(trio):
    trio.run(groups_in_any_order)


def a_late_barrier_names_the_rank_and_the_next_one_works():
    rank, size = begin()
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank < size - 1:
        with pytest.raises(TimeoutError, match=rf"rank {size - 1} did not call it"):
            dist.barrier(group)
        with pytest.raises(RuntimeError, match="did not complete"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()  # the last rank comes to it first
    if rank == size - 1:
        dist.barrier(group)
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size
    dist.barrier(group)
    dist.destroy_process_group()


def test_a_late_barrier_names_the_rank_and_the_next_one_works(trio):
    trio.run(a_late_barrier_names_the_rank_and_the_next_one_works)


def works_tell_their_states():
    rank, _ = begin()
    if rank == 0:
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match="wait"):
            work.result()
        dist.send(torch.ones(1), 1)
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0] is tensor
    else:
        source = dist.irecv(received := torch.zeros(1), tag=0)
        assert source.source_rank() == 0
        assert received.item() == 1
        dist.all_reduce(torch.ones(3))
    # Ranks that disagree get an error, which the work keeps.
    work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    with pytest.raises(ValueError, match="allreduce"):
        work.wait()
    assert isinstance(work.exception(), ValueError)
    assert not work.is_success()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    with pytest.raises(ValueError, match="own one"):
        dist.isend(torch.ones(1), rank)
    dist.destroy_process_group()


def test_works_tell_their_states(pair):
    pair.run(works_tell_their_states)


def messages_wake_no_thread_if_the_caller_waits():
    rank, _ = begin()
    from farandole._native import engine
    from farandole.torch.distributed import _point_to_point

    waited = []

    class RecordingEngine:
        def broadcast(self, *arguments):
            waited.append(arguments[-1])
            return engine.broadcast(*arguments)

    _point_to_point.engine = RecordingEngine()
    message = torch.ones(1)
    first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    first(message, 1 - rank)
    then(message, 1 - rank)
    works = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(message, 1 - rank)]
    assert all(work.wait() for work in works)
    assert waited == [True, True, False, False]
    _point_to_point.engine = engine
    dist.destroy_process_group()


def test_messages_wake_no_thread_if_the_caller_waits(pair):
    pair.run(messages_wake_no_thread_if_the_caller_waits)


def a_future_of_a_late_operation_fails():
    rank, _ = begin()
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError, match="did not complete"):
            dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group()


def test_a_future_of_a_late_operation_fails(pair):
    pair.run(a_future_of_a_late_operation_fails)


def backends_of_devices():
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = begin("cpu:farandole")
    mesh = init_device_mesh("cpu", (size,))
    assert [device.type for device in mesh.get_group()._device_types] == ["cpu"]
    dist.all_reduce(tensor := torch.ones(1), group=mesh.get_group())
    assert tensor.item() == size
    dist.destroy_process_group()
    if torch.__version__ < "2.14":
        with pytest.raises(ValueError, match="a group of farandole and other backends needs"):
            begin("cpu:farandole,cuda:gloo")
        return
    begin("cpu:farandole,cuda:gloo")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.item() == size * size
    pair = dist.new_group([0, 1])
    dist.all_gather_object(found := [None, None], rank, group=pair)
    assert found == [0, 1]
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.destroy_process_group()


def test_a_group_has_backends_by_device(pair):
    pair.run(backends_of_devices)


PROGRAM = textwrap.dedent("""
    import sys
    import torch, torch.distributed as dist, farandole.torch.distributed
    method, rank = sys.argv[1], int(sys.argv[2])
    own = {} if method == "env://" else {"rank": rank, "world_size": 2}
    dist.init_process_group("farandole", init_method=method, **own)
    dist.all_reduce(tensor := torch.ones(2))
    group = dist.new_group([0, 1])
    dist.all_gather_object(found := [None, None], dist.get_rank(), group=group)
    sys.stdout.write(f"sum {tensor.tolist()} {found}\\n")
    dist.destroy_process_group()
""")


def dropped_works_release_their_tensors():
    from farandole.torch.distributed import _work

    begin()
    _work.MIN_HOLD_SECONDS, held = 0.0, _work.MIN_HOLD_SECONDS  # only torch 2.6 holds works
    tensors = []
    for _ in range(40):
        tensor = torch.ones(1000)
        tensors.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)
    late = dist.all_reduce(torch.ones(3), async_op=True)
    for _ in range(60):
        dist.barrier()
    _work.MIN_HOLD_SECONDS = held
    del tensor
    assert sum(one() is not None for one in tensors) == 0
    assert late.result()[0].tolist() == [2.0] * 3
    dist.destroy_process_group()


def test_works_that_are_dropped_without_a_wait_release_their_tensors(pair):
    pair.run(dropped_works_release_their_tensors)


def a_group_splits_by_its_method():
    rank, _ = begin()
    world = dist.group.WORLD
    # torch 2.13 copies the options of a group that it splits, and checks a number of the new one.
    options = copy.deepcopy(world._get_backend(torch.device("cpu")).options)
    half = world.split_group([2, 0] if rank != 1 else [1], opts=options, group_name="half")
    half._get_backend(torch.device("cpu"))._set_sequence_number_for_group()
    assert (half.group_name, half.size()) == ("half", 1 if rank == 1 else 2)
    tensor = torch.ones(1) * (rank + 1)
    half.allreduce([tensor]).wait()
    assert tensor.item() == (2 if rank == 1 else 4)
    dist.destroy_process_group()


def test_a_group_splits_by_its_method(trio):
    trio.run(a_group_splits_by_its_method)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def plain_environment(**more):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FARANDOLE_", "HOROVOD_", "RANK", "WORLD", "MASTER", "LOCAL"))
    }
    return {**environment, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.parametrize("method", ["tcp", "file", "env"])
def test_processes_without_a_launcher_form_a_world(method, tmp_path):
    port = free_port()
    url = {
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{tmp_path}/store",
        "env": "env://",
    }[method]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, str(rank)],
            env=plain_environment(**({**variables, "RANK": str(rank)} if method == "env" else {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("sum [2.0, 2.0] [0, 1]" in output for output in outputs), outputs


def test_torchrun_starts_and_restarts_a_world(tmp_path):
    failing = PROGRAM.replace(
        "method, rank =",
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(3)\n"
        "method, rank =",
    )
    script = tmp_path / "program.py"
    script.write_text(failing)
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--max-restarts=1", f"--master-port={free_port()}", str(script), "env://", "0"),
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert launched.stdout.count("sum [2.0, 2.0] [0, 1]") == 2, launched.stderr[-3000:]
