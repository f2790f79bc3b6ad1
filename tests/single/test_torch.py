# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""farandole.torch in a world of one: semantics that need no peer."""

import gc
import inspect
import os
import subprocess
import sys
import weakref

import pytest
import torch
from tests.programs import program_path

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_a_process_without_a_launcher_is_a_world_of_one(hvd):
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.global_process_set.ranks == [0]
    assert hvd.global_process_set.included()
    assert not hvd.mpi_built()
    assert hvd.nccl_built() == 0


def test_init_does_nothing_while_running_and_works_again_after_shutdown(hvd):
    hvd.init()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1


def test_operations_over_sets_that_are_not_registered_are_refused(hvd):
    for operation in (
        hvd.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda x, **o: hvd.broadcast(x, 0, **o),
    ):
        with pytest.raises(ValueError, match="not registered"):
            operation(torch.ones(1), process_set=hvd.ProcessSet([0]))


def test_every_name_of_horovods_torch_module_is_there(hvd):
    names = """elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
    allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
    grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
    grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
    start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank mpi_threads_supported
    mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet
    global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product HorovodInternalError
    DistributedOptimizer SyncBatchNorm"""  # noqa: E501
    assert [
        name for name in names.split() if name not in hvd.__all__ or not hasattr(hvd, name)
    ] == []
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert hvd.mpi_ops._basics.rank() == 0
    assert hvd.mpi_ops.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert hvd.mpi_ops.num_rank_is_power_2(4)
    assert not hvd.mpi_ops.num_rank_is_power_2(6)
    assert isinstance(hvd.nccl_built(), int)


FACTORS = "prescale_factor=1.0 postscale_factor=1.0"
SIGNATURES = {
    "allreduce": f"tensor average=None name=None compression op=None {FACTORS} process_set",
    "allreduce_async_": f"tensor average=None name=None op=None {FACTORS} process_set",
    "grouped_allreduce": (
        f"tensors average=None name=None compression op=None {FACTORS} process_set"
    ),
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "reducescatter": f"tensor name=None compression op=0 process_set {FACTORS}",
    "reducescatter_async": f"tensor name=None op=0 process_set {FACTORS}",
    "grouped_reducescatter": f"tensors name=None compression op=0 process_set {FACTORS}",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "DistributedOptimizer": (
        "optimizer named_parameters=None compression backward_passes_per_step=1 op=0 "
        "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set "
        "gradient_as_bucket_view=False fault_tolerant=False shard_states=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(hvd, name):
    def show(parameter):
        plain = parameter.default is parameter.empty or parameter.name in (
            "compression",
            "process_set",
        )
        return parameter.name if plain else f"{parameter.name}={parameter.default}"

    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    assert " ".join(map(show, parameters)) == SIGNATURES[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_of_one_scales_and_keeps_the_input(hvd, dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    result = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=2.0)
    assert torch.equal(result, tensor * 2)
    assert torch.equal(tensor, torch.arange(6).reshape(2, 3).to(dtype))
    assert result.dtype == dtype


def test_in_place_operations_return_the_same_object(hvd):
    tensor = torch.ones(3)
    assert hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=3.0) is tensor
    assert hvd.broadcast_(tensor, 0) is tensor
    assert tensor.tolist() == [3, 3, 3]


def test_views_are_copied_out_of_place_and_refused_in_place(hvd):
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(hvd.allreduce(whole.t()), whole.t())
    assert torch.equal(hvd.broadcast(whole[:, 1], 0), whole[:, 1])
    assert torch.equal(hvd.allgather(whole.t()), whole.t())
    for operation in (hvd.allreduce_, lambda tensor: hvd.broadcast_(tensor, 0)):
        with pytest.raises(ValueError, match="contiguous"):
            operation(whole.t())


def test_conjugated_and_negated_views_come_out_as_their_values(hvd):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert hvd.allgather(tensor.conj()).tolist() == [1 - 2j, 3 + 1j]
    assert hvd.broadcast(tensor.conj().imag, 0).tolist() == [-2, 1]


def test_empty_and_scalar_tensors(hvd):
    assert hvd.allreduce(torch.tensor(3.0)).shape == ()
    assert hvd.broadcast(torch.tensor(3), 0).item() == 3
    assert hvd.allreduce(torch.empty(0, 4)).shape == (0, 4)
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="at least one dimension"):
        hvd.allgather(torch.tensor(3.0))


def test_wrong_arguments_are_refused_and_the_engine_continues(hvd):
    with pytest.raises(ValueError, match="op must be one of"):
        hvd.allreduce(torch.ones(1), op=6)
    with pytest.raises(ValueError, match="either op or"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast(torch.ones(1), 1)
    with pytest.raises(ValueError, match="dense"):
        hvd.allreduce(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allreduce([])
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == 1


def test_process_sets_are_not_made_of_communicators(hvd):
    class Communicator:
        def Get_rank(self):  # noqa: N802 - MPI's name
            return 0

    for take in (hvd.ProcessSet, hvd.add_process_set):
        with pytest.raises(ValueError, match="does not use MPI"):
            take(Communicator())


def test_a_handle_can_be_polled_and_synchronized_once(hvd):
    handle = hvd.allreduce_async(torch.ones(3), name="once")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]
    for consume in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match="no operation has this handle"):
            consume(handle)


def test_grouped_allreduce_keeps_order_and_dtypes(hvd):
    tensors = [
        torch.ones(2),
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.bfloat16),
    ]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [result.dtype for result in results] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(result, tensor) for result, tensor in zip(results, tensors, strict=True))
    handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, postscale_factor=4.0)
    written = hvd.synchronize(handle)
    assert all(result is tensor for result, tensor in zip(written, tensors, strict=True))
    assert tensors[1].tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression_restores_the_dtype(hvd, name):
    compression = getattr(hvd.Compression, name)
    tensor = torch.tensor([0.5, 2.0])
    assert torch.equal(hvd.allreduce(tensor, compression=compression), tensor)
    whole = torch.tensor([1, 2])
    assert hvd.allreduce(whole, compression=compression).dtype == torch.int64


def test_out_of_place_operations_have_gradients(hvd):
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = torch.tensor([3.0, 5.0])
    for operation in (
        hvd.allreduce,
        hvd.allgather,
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.grouped_allreduce([t])[0],
        lambda t: hvd.allreduce(t, op=hvd.Max),
        lambda t: hvd.allreduce(t, op=hvd.Product),
        lambda t: hvd.alltoall(t, splits=[2])[0],
        hvd.reducescatter,
    ):
        tensor.grad = None
        (operation(tensor) * weight).sum().backward()
        assert torch.equal(tensor.grad, weight)
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad


def test_objects_travel(hvd):
    assert hvd.broadcast_object({"a": [1, 2]}) == {"a": [1, 2]}
    assert hvd.allgather_object(("x", 1)) == [("x", 1)]


def test_broadcast_parameters_takes_what_horovod_takes(hvd):
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="must be a mapping"):
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    with pytest.raises(ValueError, match="must hold tensors"):
        hvd.broadcast_parameters({"a": 1}, root_rank=0)


def test_a_forked_child_may_ask_for_its_rank_but_not_communicate():
    # DataLoader workers are forked and ask for the rank; an operation there would race with the
    # parent's.
    program = program_path(__file__, "fork_rank")
    result = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "1.0\n"), result.stderr


def test_init_alone_starts_no_thread_but_the_engines():
    code = """
import os
from farandole.common import basics
basics.init()
print(len(os.listdir("/proc/self/task")))
"""
    environment = {key: value for key, value in os.environ.items() if key != "FARANDOLE_JOB"}
    # The thread of the log is another matter: with this level there is nothing to be logged, and no
    # such thread.
    environment["FARANDOLE_LOG_LEVEL"] = "fatal"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert int(result.stdout) <= 2, result.stdout + result.stderr


def test_memory_outlives_an_interrupt_between_the_engines_call_and_its_handle(hvd, monkeypatch):
    from farandole._native import engine

    submit = engine.allreduce

    def interrupted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "allreduce", interrupted)
    tensor = torch.ones(100)
    kept = weakref.ref(tensor)
    with pytest.raises(KeyboardInterrupt):
        hvd.allreduce_async_(tensor, name="interrupted")
    del tensor
    gc.collect()
    assert kept() is not None
    hvd.shutdown()
    hvd.init()
    assert kept() is None


def test_operations_that_the_engine_refuses_keep_no_memory(hvd, monkeypatch):
    from farandole._native import engine

    def refuses(*_):
        raise ValueError("not today")

    monkeypatch.setattr(engine, "allreduce", refuses)
    tensor = torch.ones(100)
    kept = weakref.ref(tensor)
    with pytest.raises(ValueError, match="not today"):
        hvd.allreduce_async_(tensor)
    del tensor
    gc.collect()
    assert kept() is None
