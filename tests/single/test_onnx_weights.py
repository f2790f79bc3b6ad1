# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An ONNX file with weights beside it, which is replaced by another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from farandole.spark.common.model.onnx import write_atomically
from farandole.spark.torch.columns.model_calls import ModelCall
from farandole.spark.torch.saving import onnx as torch_onnx

pytestmark = pytest.mark.timeout(120)
VALUES = 500


def write_model(path, value):
    """Writes a model that returns a value, and weights beside it as torch's exporter does."""
    weights = numpy_helper.from_array(np.full(VALUES, value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [VALUES])],
        [weights],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, path, save_as_external_data=True, location=f"{path.name}.data")


def predict(path):
    """Returns the value that ONNX Runtime predicts from a file, which it maps into memory."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = set(session.run(None, {})[0].tolist())
    return found


class Cut(BaseException):
    """The process ends."""


@pytest.mark.parametrize("name", ["model.onnx", "model", "a.b.onnx"])
@pytest.mark.parametrize("step", range(6))
def test_one_whole_model_is_there_when_the_process_ends_at_any_step(
    tmp_path, monkeypatch, name, step
):
    target = tmp_path / name
    for value in (1.0, 2.0):
        with write_atomically(target) as made:
            write_model(made, value)
        assert predict(target) == value
        assert len(list(tmp_path.iterdir())) == 2, "the old weights are gone"
    calls = []

    def cut(real):
        def call(*arguments, **named):
            if Path(arguments[0]).parent in (tmp_path, *tmp_path.glob(".*")):
                calls.append(arguments)
                if len(calls) > step:
                    raise Cut
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for operation in ("replace", "unlink"):
            patch.setattr(Path, operation, cut(getattr(Path, operation)))
        try:
            with write_atomically(target) as made:
                write_model(made, 3.0)
        except Cut:
            assert predict(target) == (2.0 if step < 2 else 3.0)
        else:
            assert step >= 3
            assert predict(target) == 3.0
    with write_atomically(target) as made:
        write_model(made, 4.0)
    assert predict(target) == 4.0


def test_weights_of_other_models_and_files_of_others_stay(tmp_path):
    theirs = [
        tmp_path / name
        for name in ("model.onnx.data", "model-0123abcd.onnx.data", "other-0123abcd.onnx.data")
    ]
    for path in theirs:
        path.write_bytes(b"of the user")
    for value in (1.0, 2.0):
        for name in ("model.onnx", "other.onnx"):
            with write_atomically(tmp_path / name) as made:
                write_model(made, value)
            assert predict(tmp_path / name) == value
    assert all(path.read_bytes() == b"of the user" for path in theirs)


def test_a_model_with_weights_of_the_earlier_name_is_replaced(tmp_path):
    target = tmp_path / "model.onnx"
    write_model(target, 1.0)
    assert (tmp_path / "model.onnx.data").exists()
    with write_atomically(target) as made:
        write_model(made, 2.0)
    assert predict(target) == 2.0
    assert not (tmp_path / "model.onnx.data").exists()


def test_a_large_model_of_torch_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_onnx, "_MAX_INLINE_WEIGHT_BYTES", 0)
    signature = [{"columns": ["x"], "shape": [-1, 64], "dtype": "float32"}]
    for seed in range(2):
        torch.manual_seed(seed)
        network = torch.nn.Linear(64, 64)
        call = ModelCall(arguments=((),), labels=("y",))
        with write_atomically(tmp_path / "model.onnx") as made:
            torch_onnx.export_onnx(network, signature, ["y"], made, None, None, call)
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
        x = np.ones((3, 64), np.float32)
        (found,) = session.run(None, {"x": x})
        np.testing.assert_allclose(found, network(torch.from_numpy(x)).detach(), atol=1e-4)
        assert len(list(tmp_path.iterdir())) == 2
