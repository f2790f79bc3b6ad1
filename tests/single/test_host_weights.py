# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Processes of a host that predict with one module share one copy of its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark import Broadcast
from tests.programs import program_path

from farandole.spark.common.model import predictor as predictor_module
from farandole.spark.job import host_memory_files
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.torch.saving import host_weights
from farandole.spark.torch.saving.host_weights import HostWeights, load_module, pack_module

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the files are Linux's"),
]
LAYER_BYTES = 4 * (1600 * 1600 + 1600)


def large_network(layers=1, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(1600, 1600) for _ in range(layers)))


def sent_weights(packed):
    """The weights as a small session sends them."""
    return HostWeights(hashlib.sha256(packed.weights).hexdigest(), packed.weights)


def packed_name(packed):
    """The name of the file of the weights."""
    return f"farandole-bytes-{hashlib.sha256(packed.weights).hexdigest()}"


def mapped_names():
    with open("/proc/self/maps") as lines:
        return {line.split(maxsplit=5)[5].strip() for line in lines if "farandole-bytes" in line}


@contextlib.contextmanager
def run_workers(count, folder):
    """Starts the program so often, and kills what is still alive in the end."""
    paths = [str(folder / name) for name in ("module", "weights")]
    command = [sys.executable, str(program_path(__file__, "predict_with_host_weights")), *paths]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=60)


def measure_workers(count, folder):
    """Returns what each of some workers prints after all have predicted."""
    with run_workers(count, folder) as workers:
        for worker in workers:
            assert worker.stdout.readline() == "loaded\n"
        answers = []
        for worker in workers:
            worker.stdin.write("measure\n")
            worker.stdin.flush()
            answers.append(json.loads(worker.stdout.readline()))
    return answers


@pytest.mark.parametrize("layers", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_four_workers_take_the_memory_of_one_copy(tmp_path, layers):
    network = large_network(layers)
    packed = pack_module(network)
    (tmp_path / "module").write_bytes(packed.module)
    (tmp_path / "weights").write_bytes(packed.weights)
    with torch.inference_mode():
        expected = float(network(torch.ones(4, 1600)).sum())
    one_answer = measure_workers(1, tmp_path)
    four_answers = measure_workers(4, tmp_path)
    grown = sum(growth for growth, _, _ in four_answers)
    print(f"one: {one_answer}, four: {four_answers}, weights: {layers * LAYER_BYTES}")
    assert one_answer[0][0] > layers * LAYER_BYTES * 0.9
    assert grown <= 1.3 * one_answer[0][0]
    assert sum(reads for _, reads, _ in four_answers) == 1
    for _, _, total in [*one_answer, *four_answers]:
        assert total == pytest.approx(expected, rel=1e-4)


def test_the_memory_is_free_after_all_workers_were_killed(tmp_path):
    packed = pack_module(large_network(seed=1))
    (tmp_path / "module").write_bytes(packed.module)
    (tmp_path / "weights").write_bytes(packed.weights)
    digest = hashlib.sha256(packed.weights).hexdigest()
    with run_workers(2, tmp_path) as workers:
        for worker in workers:
            assert worker.stdout.readline() == "loaded\n"
        found = host_memory_files._find_open_file(digest)
        assert found is not None
        with pytest.raises(OSError, match=r"not permitted|denied"):
            os.open(f"/proc/self/fd/{found}", os.O_WRONLY | os.O_TRUNC)
        os.close(found)
    assert host_memory_files._find_open_file(digest) is None


def test_a_planted_file_with_other_bytes_is_passed_over(monkeypatch):
    digest = hashlib.sha256(b"genuine").hexdigest()
    genuine_digest = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda _: genuine_digest(b"genuine"))
    planted = host_memory_files._create_sealed_file(digest, b"planted")
    monkeypatch.undo()
    opened = host_memory_files.open_host_memory_file(digest, lambda: b"genuine")
    try:
        assert os.read(opened, 20) == b"genuine"
    finally:
        os.close(opened)
    with pytest.raises(ValueError, match=f"7 bytes arrived damaged: their SHA-256 is not {digest}"):
        host_memory_files.open_host_memory_file(digest, lambda: b"damaged")
    os.close(planted)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_lock_of_another_user_is_not_waited_for(monkeypatch, is_silent):
    digest = hashlib.sha256(b"awaited").hexdigest()
    monkeypatch.setattr(host_memory_files, "_MAX_SILENT_LOCK_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as lock:
        lock.bind(f"\0farandole-bytes-{digest}-{os.getuid()}")
        if not is_silent:
            lock.listen()
            assert host_memory_files._lock_holder_uid(lock.getsockname().decode()) == os.getuid()
            monkeypatch.setattr(host_memory_files, "_lock_holder_uid", lambda _: os.getuid() + 1)
        # a wait for the lock would not end
        monkeypatch.setattr(host_memory_files, "MAX_CREATION_WAIT_SECONDS", float("inf"))
        os.close(host_memory_files.open_host_memory_file(digest, lambda: b"awaited"))


def test_a_module_is_restored_with_its_shared_and_other_tensors():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(1600, 1600)
            self.head = torch.nn.Linear(1600, 1600, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("shift", torch.ones(1600), persistent=False)
            self.register_buffer("scale", torch.tensor(2.0))
            self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            return self.head(self.table(x)) * self.scale + self.shift

    network = Tied()
    packed = pack_module(network)
    assert len(packed.weights) < 1.1 * 4 * 1600 * 1600  # the tied weight is there once
    restored = load_module(packed.module, sent_weights(packed))
    assert len(mapped_names()) == 1
    assert restored.head.weight is restored.table.weight
    assert not restored.frozen.requires_grad
    rows = torch.tensor([0, 3, 1599])
    torch.testing.assert_close(restored(rows), network(rows))
    with torch.no_grad():  # of this process alone
        restored.table.weight.zero_()
    again = load_module(packed.module, sent_weights(packed))
    torch.testing.assert_close(again(rows), network(rows))
    descriptors = len(os.listdir("/proc/self/fd"))
    del restored, again
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2


def test_buffers_outside_of_the_state_are_shared_too():
    network = large_network()
    network.register_buffer("mask", torch.ones(1600, 1600).tril(), persistent=False)
    network.register_buffer("links", torch.eye(3).to_sparse(), persistent=False)
    packed = pack_module(network, in_bfloat16=True)
    assert len(packed.module) < 1 << 20
    restored = load_module(packed.module, sent_weights(packed))
    assert torch.equal(restored.mask, network.mask)
    assert torch.equal(restored.links.to_dense(), torch.eye(3))
    assert "mask" not in restored.state_dict()
    del restored


def test_a_broadcast_variable_is_read_in_a_task_and_not_kept(tmp_path):
    with (tmp_path / "broadcast").open("wb") as file:
        pickle.dump(b"weights", file)
    variable = Broadcast(path=str(tmp_path / "broadcast"))  # as Spark makes it in a task
    sent = HostWeights("digest", variable)
    assert sent.read_content() == b"weights"
    assert "_value" not in vars(variable)
    assert sent.read_content() == b"weights"


def test_weights_in_bfloat16_take_half_and_predict_nearly_the_same():
    network = torch.nn.Sequential(large_network(), torch.nn.LayerNorm(1600), torch.nn.ReLU())
    full, half = pack_module(network), pack_module(network, in_bfloat16=True)
    assert len(half.weights) < 0.51 * len(full.weights)
    restored = load_module(half.module, sent_weights(half))
    assert {one.dtype for one in restored.parameters()} == {torch.bfloat16, torch.float32}
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found = restored(torch.ones(2, 1600)).float()
    torch.testing.assert_close(found, network(torch.ones(2, 1600)), rtol=0.05, atol=0.05)


def test_a_predictor_computes_in_bfloat16_with_shared_weights():
    network = large_network(seed=3)
    packed = pack_module(network, in_bfloat16=True)
    seen = []

    def predict(module, x):
        found = module(x)
        seen.append(found.dtype)
        return found

    predictor = TorchPredictor(
        model=packed.module,
        weights=sent_weights(packed),
        precision="bf16",
        columns=("x",),
        groups=(("x",),),
        labels=("y",),
        batch_size=2,
        shapes=None,
        dtypes=None,
        call=ModelCall(arguments=((),), labels=("y",)),
        use_gpu=False,
        function=predict,
    )
    values = np.random.default_rng(0).random((3, 1600), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 1600)
    (found,) = predictor.predict_outputs(pa.RecordBatch.from_arrays([column], names=["column0"]))
    assert seen == [torch.bfloat16] * 2
    assert found.dtype == np.float32
    expected = network(torch.from_numpy(values)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert any(packed_name(packed) in name for name in mapped_names())
    predictor_module._MODEL_CACHE.clear()


class PreciseEnd(torch.nn.Module):
    """Computes its last layer in float32, as some heads do, whatever the autocast outside."""

    def __init__(self):
        super().__init__()
        self.body, self.end = torch.nn.Linear(1600, 1600), torch.nn.Linear(1600, 2)

    def forward(self, x):
        states = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.end(states.float())


def test_a_layer_outside_of_autocast_gets_its_weights_in_float32():
    network = PreciseEnd()
    packed = pack_module(network, in_bfloat16=True)
    predictor = TorchPredictor(
        model=packed.module, weights=sent_weights(packed), precision="bf16", columns=("x",),
        groups=(("x",),), labels=("y",), batch_size=2, shapes=None, dtypes=None,
        call=ModelCall(arguments=((),), labels=("y",)), use_gpu=False,
    )  # fmt: skip
    values = np.random.default_rng(0).random((3, 1600), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 1600)
    (found,) = predictor.predict_outputs(pa.RecordBatch.from_arrays([column], names=["column0"]))
    expected = network(torch.from_numpy(values)).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=0.02)
    restored = predictor._find_model()
    assert (restored.body.weight.dtype, restored.end.weight.dtype) == (
        torch.bfloat16, torch.float32,
    )  # fmt: skip
    predictor_module._MODEL_CACHE.clear()


@pytest.mark.parametrize("kind", ["small", "sparse", "subclass"])
def test_other_modules_are_sent_whole(kind):
    class Marked(torch.Tensor):
        pass

    network = torch.nn.Linear(4, 4) if kind == "small" else large_network()
    if kind == "sparse":
        network.register_buffer("links", torch.eye(3).to_sparse())
    if kind == "subclass":
        network.register_buffer("marked", torch.ones(3).as_subclass(Marked))
    packed = pack_module(network)
    assert packed.weights is None
    x = torch.ones(2, network.in_features if kind == "small" else 1600)
    torch.testing.assert_close(load_module(packed.module, None)(x), network(x))


def test_without_memory_files_each_process_has_a_copy(monkeypatch):
    network = large_network(seed=2)
    packed = pack_module(network)
    monkeypatch.setattr(host_weights.host_memory_files, "open_host_memory_file", lambda *_: None)
    restored = load_module(packed.module, sent_weights(packed))
    assert not mapped_names()
    torch.testing.assert_close(restored(torch.ones(1, 1600)), network(torch.ones(1, 1600)))
