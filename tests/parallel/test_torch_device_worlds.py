# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets, lost peers, new worlds and memory of NCCL on GPUs that `fake_gpu` plays."""

import ctypes
import os
import signal
import threading
import time

import cloudpickle
import pytest
import torch
from tests.parallel import fake_gpu
from tests.parallel.fake_gpu import FakeGpu

import farandole.torch as hvd
from farandole._native import engine

cloudpickle.register_pickle_by_value(fake_gpu)  # workers import no test


def process_set(share):
    gpu = FakeGpu(0 if share else hvd.local_rank())
    pair = hvd.add_process_set([0, 2])
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.remove_process_set(pair)
        return None
    total = gpu.read(
        hvd.allreduce(torch.ones(4) * hvd.rank(), op=hvd.Sum, process_set=pair)
    ).tolist()
    launches = gpu.count("kernels" if share else "launches")
    hvd.barrier()
    hvd.remove_process_set(pair)
    return total, launches


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_a_process_set_has_a_communicator_of_its_own(fresh_world, cuda, share):
    results = fresh_world(3, env=cuda).run(process_set, share)
    assert results == [([2.0] * 4, 1), None, ([2.0] * 4, 1)]


def joined():
    gpu = FakeGpu(hvd.local_rank())
    results = [
        gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="t")).tolist()
        for _ in range(2 - hvd.rank())
    ]
    return results, hvd.join()


def test_a_joined_rank_is_no_matter(gpus):
    first, second = gpus.run(joined)
    assert first == ([[2.0, 2.0], [1.0, 1.0]], 0)
    assert second == ([[2.0, 2.0]], 0)


def survive(victim, forming, share):
    gpu = FakeGpu(0 if share else hvd.local_rank())
    if not forming:
        hvd.allreduce(torch.ones(1))
        gpu.library.fake_wait(gpu.stream)
    hvd.barrier()
    if hvd.rank() == victim:
        # The other's operation is on its stream already, and waits for this rank's, whose input is
        # late.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        tensor = torch.ones(10)
        gpu.fill(tensor, 1.0, 100.0)
        gpu.read(hvd.allreduce(tensor, name="doomed"))
    began = time.monotonic()
    try:
        hvd.synchronize(hvd.allreduce_async(torch.ones(10), name="doomed"))
        gpu.library.fake_wait(gpu.stream)
        hvd.allreduce(torch.ones(10), name="later")
    except hvd.HorovodInternalError as error:
        # Waits on the GPU were ended: its stream continues.
        gpu.library.fake_wait(gpu.stream)
        assert time.monotonic() - began < 30
        return str(error)
    return None


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("forming", [False, True], ids=["running", "forming"])
def test_a_killed_peer_ends_what_waits_for_it_on_the_gpu(fresh_world, cuda, forming, share):
    survivor, victim = fresh_world(2, env=cuda).run(survive, 1, forming, share, tolerate=True)
    assert repr(victim) == "Died()"
    assert "rank 1" in survivor


def again():
    gpu = FakeGpu(hvd.local_rank())
    totals = []
    for _ in range(2):
        totals.append(gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum)).tolist())
        hvd.shutdown()
        hvd.init()
    return totals


def test_a_new_world_forms_a_new_communicator(gpus):
    assert gpus.run(again) == [[[2.0, 2.0]] * 2] * 2


def in_memory_of_nccl():
    gpu = FakeGpu(hvd.local_rank())
    gpu.read(hvd.allreduce(torch.zeros(1), name="first"))
    count = 1000

    def given():
        return engine.allocate_registered_memory(hvd.local_rank(), gpu.stream.value, 4 * count)

    memory = given()
    if memory is None:
        return None
    described = memory.__cuda_array_interface__
    address, read_only = described.pop("data")
    assert (described, read_only) == (
        {"version": 2, "shape": (4 * count,), "typestr": "|u1"},
        False,
    )
    tensor = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
    found, registered = [], []
    for world in range(2):
        for step in range(2):
            gpu.fill(tensor, hvd.rank() + step)
            hvd.allreduce_(tensor, op=hvd.Sum, name=f"bucket {step}")
            found.append(gpu.read(tensor).unique().tolist())
            registered.append(gpu.count("registered"))
        if world == 0:
            hvd.shutdown()
            hvd.init()
            # The first tensor of the new world on a GPU.
            gpu.read(hvd.allreduce(torch.zeros(1), name="first"))
    other = given()
    del memory
    kept = given().__cuda_array_interface__["data"][0] == address
    return found, registered, kept and other.__cuda_array_interface__["data"][0] != address


def test_memory_that_nccl_gives_is_registered_once_with_every_communicator(fresh_world, cuda):
    world = fresh_world(2, env={**cuda, "FARANDOLE_NCCL_MEMORY": "1"})
    assert world.run(in_memory_of_nccl) == [([[1.0], [3.0]] * 2, [1, 1, 2, 2], True)] * 2


def test_nccl_gives_no_memory_unless_it_is_asked_to(gpus):
    assert gpus.run(in_memory_of_nccl) == [None, None]


def staged_by_choice():
    gpu = FakeGpu(hvd.local_rank())
    total = gpu.read(hvd.allreduce(torch.ones(2), op=hvd.Sum)).tolist()
    return total, gpu.count("launches"), gpu.count("copies") > 0, hvd.cuda_built(), hvd.nccl_built()


def test_nccl_is_not_used_if_a_variable_says_so(fresh_world, cuda):
    world = fresh_world(2, env={**cuda, "FARANDOLE_GPU_TENSORS": "staged"})
    assert world.run(staged_by_choice) == [([2.0, 2.0], 0, True, True, 22703)] * 2
