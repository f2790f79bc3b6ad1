# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The GPU of a rank, and the tensors that the engine accepts, if torch reports GPUs."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

import farandole.torch as hvd
from farandole.common import basics, handles
from farandole.common.exceptions import FarandoleEnvironmentError
from farandole.torch import _gpu_selection, _gpu_tensors, _handles
from farandole.torch.compress._exchange import EngineExchange
from farandole.torch.distributed import _tensors


@pytest.fixture
def seen(monkeypatch):
    """A rank of four on a host with four GPUs; returns the device that torch gets when CUDA is
    used.
    """
    queued = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(basics, "size", lambda: 4)
    monkeypatch.setattr(basics, "local_size", lambda: 4)
    monkeypatch.setattr(basics, "local_rank", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def run_queued():
        for call in queued:
            call()
        return chosen

    return run_queued


def test_a_rank_takes_the_gpu_of_its_local_rank_once_cuda_is_used(seen):
    _gpu_selection.select_gpu_of_rank()
    assert seen() == [2]


def test_ranks_that_outnumber_gpus_share_them(seen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _gpu_selection.select_gpu_of_rank()
    assert seen() == [0]


def test_the_gpu_that_spark_assigned_comes_first(seen, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TASK_RESOURCES", json.dumps({"gpu": ["3"]}))
    _gpu_selection.select_gpu_of_rank()
    assert seen() == [3]


@pytest.mark.parametrize("reason", ["chosen", "alone", "one", "none"])
def test_a_script_that_has_chosen_or_has_no_choice_is_left_alone(seen, monkeypatch, reason):
    if reason == "chosen":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    elif reason == "alone":
        monkeypatch.setattr(basics, "size", lambda: 1)
    else:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(reason == "one"))
    _gpu_selection.select_gpu_of_rank()
    assert seen() == []


class OnGpu:
    """As much of a tensor on a GPU as is asked for."""

    is_cpu = False
    is_cuda = True

    def get_device(self):
        return 1000


def test_a_gpu_that_cannot_be_used_is_said_once_and_torch_copies(capfd):
    hvd.init()
    _gpu_tensors._usable_by_ordinal.clear()
    assert [_gpu_tensors.is_usable_in_place(OnGpu()) for _ in range(2)] == [False, False]
    run_queued = capfd.readouterr().err
    assert run_queued.count("tensors on GPU 1000 are copied to the host by torch") == 1
    with pytest.raises(FarandoleEnvironmentError):
        _gpu_tensors.engine.open_device(1000, [])


class Resident(torch.Tensor):
    """A tensor that counts as one on a GPU, and whose memory is the host's."""

    is_cpu = False
    is_cuda = True

    def get_device(self):
        return 0

    def cpu(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()


def test_torch_distributed_hands_the_engine_no_address_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_gpu_tensors, "is_usable_in_place", lambda _: True)
    there = torch.arange(3.0).as_subclass(Resident)
    assert _handles.to_engine_tensor(there) is there
    for copied in (
        _tensors.to_host(there),
        _tensors.to_reducible_host(there),
        _tensors.to_flat_host(there),
        _tensors.join_flat([there]),
    ):
        assert copied.is_cpu
        assert copied.tolist() == [0.0, 1.0, 2.0]
        assert copied.data_ptr() != there.data_ptr()


class OnGpuGathered:
    """Two ranks' rows, as they come from a communicator among GPUs."""

    rows = (2, 2)
    ordinal = 1

    def __init__(self):
        self.streams = []

    def __len__(self):
        return 16

    def queue_copy_and_free(self, address, stream):
        ctypes.memmove(address, (ctypes.c_float * 4)(1.0, 2.0, 3.0, 4.0), 16)
        self.streams.append(stream)


def test_a_result_that_a_compressor_gathers_on_a_gpu_is_fetched_by_the_stream(monkeypatch):
    hvd.init()
    monkeypatch.setattr(_gpu_tensors, "current_stream_handle", lambda ordinal: 40 + ordinal)
    exchange = EngineExchange("t", hvd.global_process_set)
    exchange.size = 2
    gathered = OnGpuGathered()
    assert exchange._make_rows_finish(torch.empty(2))([gathered]).tolist() == [
        [1.0, 2.0],
        [3.0, 4.0],
    ]
    assert exchange._make_rows_finish(torch.empty(1, 2))([None]).shape == (2, 0)
    assert gathered.streams == [41]


def test_several_tensors_of_a_stream_ask_for_it_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        _gpu_tensors, "current_stream_handle", lambda ordinal: asked.append(ordinal) or 40 + ordinal
    )
    tensors = [OnGpu(), torch.ones(1), OnGpu()]
    assert _gpu_tensors.gpus_and_streams_of(tensors) == [(1000, 1040), None, (1000, 1040)]
    assert asked == [1000]
    assert _gpu_tensors.gpus_and_streams_of(tensors[1:2]) is None


class Lent(Resident):
    """One that notes the streams that its memory is kept for."""

    def record_stream(self, stream):
        self.lent = [*getattr(self, "lent", ()), stream]


def test_memory_of_an_operation_is_kept_for_the_stream_that_waits_for_it(monkeypatch):
    current = [40]
    monkeypatch.setattr(_gpu_tensors, "current_stream_handle", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: (ordinal, current[0]))
    monkeypatch.setattr(handles, "engine", SimpleNamespace(wait=lambda *_: None))
    table = _handles._TorchHandleTable("t")
    numbers = iter(range(7, 20))

    def lent(stream, where):
        current[0] = 40
        tensors = [torch.zeros(1).as_subclass(Lent) for _ in range(2)]
        keep = (tensors[0], [(tensors[1], torch.zeros(1), "slot")])
        handle = table.submit_operation(
            keep, lambda _: "done", lambda *_: next(numbers), "name", where
        )
        current[0] = stream
        assert table.synchronize(handle) == "done"
        return [getattr(tensor, "lent", []) for tensor in tensors]

    for where in ((0, 40), [None, (0, 40), (0, 40)]):
        assert lent(40, where) == [[], []]
        assert lent(41, where) == [[(0, 41)], [(0, 41)]]
    assert lent(41, None) == [[], []]
    assert not table._locations
    with pytest.raises(ValueError, match="no operation has this handle"):
        table.synchronize(7)


def test_a_wait_that_fails_or_is_interrupted_keeps_memory_as_long_as_its_handle(monkeypatch):
    monkeypatch.setattr(_gpu_tensors, "current_stream_handle", lambda _: 40)
    table = _handles._TorchHandleTable("t")

    def wait(*_):
        raise error

    monkeypatch.setattr(handles, "engine", SimpleNamespace(wait=wait, is_pending=lambda _: False))
    table.submit_operation(None, len, lambda *_: 7, "name", (0, 40))
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        table.synchronize(7)
    assert table._locations
    error = RuntimeError("a peer is dead")
    with pytest.raises(RuntimeError, match="a peer is dead"):
        table.synchronize(7)
    assert not table._locations


def test_nccl_is_built_only_where_cuda_is():
    assert hvd.cuda_built() in (True, False)
    assert hvd.cuda_built() or hvd.nccl_built() == 0
