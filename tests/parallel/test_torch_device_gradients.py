# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Gradients and captured graphs on GPUs that `fake_gpu` plays."""

import time

import cloudpickle
import pytest
import torch
from tests.parallel import fake_gpu
from tests.parallel.fake_gpu import LATE_SECONDS, FakeGpu, restore_host_tensors

import farandole.torch as hvd
from farandole.torch import _gpu_tensors, _handles, _reducer

cloudpickle.register_pickle_by_value(fake_gpu)  # workers import no test


def train(on_gpu, as_view):
    restore_host_tensors()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if on_gpu:
        gpu = FakeGpu(hvd.local_rank())
        # A CPU's work is not on the stream: what reads a result must wait for it as the stream
        # would.
        _gpu_tensors.gpu_ordinal_of = lambda tensor: (
            hvd.local_rank() if tensor.is_floating_point() else None
        )
        reach = _handles.table.wait_for_gpu_result

        def reach_and_wait(reached):
            outcome = reach(reached)
            gpu.library.fake_wait(gpu.stream)
            return outcome

        _handles.table.wait_for_gpu_result = reach_and_wait
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), gradient_as_bucket_view=as_view
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_both(as_view):
    host = train(False, as_view)
    device = train(True, as_view)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(host, device, strict=True)), FakeGpu(
        0
    ).count("launches")


@pytest.mark.parametrize("as_view", [False, True], ids=["gradients", "views"])
def test_a_distributed_optimizer_trains_alike_on_gpus(gpus, as_view):
    for same, launches in gpus.run(train_both, as_view):
        assert same
        assert launches > 0


def grouped_scatters():
    gpu = FakeGpu(0)
    hvd.allreduce(torch.zeros(1), name="first")
    blocked = gpu.count("blocked")
    rows = [torch.full((4, 3), float(i)) for i in range(5)]
    results = hvd.grouped_reducescatter(rows, op=hvd.Sum)
    return [gpu.read(result).unique().tolist() for result in results], gpu.count(
        "blocked"
    ) - blocked


def test_results_of_a_group_go_back_to_a_shared_gpu_at_once_and_the_host_waits_for_none(
    shared_world, cuda
):
    results = shared_world(2, "cuda True", cuda).run(grouped_scatters)
    assert results == [([[2.0 * i] for i in range(5)], 0)] * 2


def captured_collective():
    gpu = FakeGpu(hvd.local_rank())
    tensor = torch.zeros(4)
    gpu.fill(tensor, 1.0, LATE_SECONDS)
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="before")
    gpu.library.fake_capture(gpu.stream)
    refused = ""
    try:
        hvd.allreduce(torch.ones(2), op=hvd.Sum, name="captured")
    except ValueError as error:
        refused = str(error)
    # The fake ends a process that looks at an event in a way that would end the capture.
    deadline = time.monotonic() + 20
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    gpu.library.fake_capture(None)
    again = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="captured")
    return refused, gpu.read(hvd.synchronize(handle)).tolist(), gpu.read(again).tolist()


def test_a_graph_cannot_capture_a_collective_and_what_is_under_way_does_not_end_the_capture(
    fresh_world, cuda
):
    for refused, before, again in fresh_world(2, env=cuda).run(captured_collective):
        assert refused.startswith("a CUDA graph is being captured on device ")
        assert (before, again) == ([2.0] * 4, [2.0] * 2)


def captured_backward(as_view):
    restore_host_tensors()
    layer = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0),
        named_parameters=layer.named_parameters(),
        gradient_as_bucket_view=as_view,
    )
    asked, captured = [], _reducer.is_in_cuda_graph_capture
    _reducer.is_in_cuda_graph_capture = lambda tensor: asked.append(tensor) is None
    layer(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
    _reducer.is_in_cuda_graph_capture = captured
    busy = optimizer._reducer.has_started_reduction()
    # As a graph that is replayed: gradients are there, and no hook was called.
    layer.weight.grad.fill_(10.0 * (hvd.rank() + 1))
    optimizer.step()
    return len(asked), busy, layer.weight.tolist()


@pytest.mark.parametrize("as_view", [False, True], ids=["gradients", "views"])
def test_gradients_of_a_captured_backward_pass_are_reduced_in_the_step(gpus, as_view):
    assert gpus.run(captured_backward, as_view) == [(1, False, [[-15.0] * 3])] * 2
