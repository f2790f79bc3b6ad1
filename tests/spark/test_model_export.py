# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model in words, and as an ONNX file that predicts the same without torch."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from tests.single.training import Here

from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests


class Network(torch.nn.Module):
    """Takes a vector, two numbers side by side, and the index of a category."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4 + 2 + 3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5)
        )
        self.head = torch.nn.Linear(8, 3)
        self.table.weight.requires_grad = False

    def forward(self, image, numbers, word):
        return self.head(self.body(torch.cat([image, numbers, self.table(word[:, 0])], 1)))


class Surprising(torch.nn.Module):
    """Predicts something else each time, as no ONNX file can."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 3)

    def forward(self, image):
        return self.line(image) + np.random.default_rng().random()


@pytest.fixture(scope="module")
def frame(spark):
    words = ["red", "green", "blue"]
    rows = [
        (
            Vectors.dense([n / 9, 1.0, 0.5, n % 2]),
            n / 7,
            None if n == 5 else n / 3,
            words[n % 3],
            n % 3,
        )
        for n in range(60)
    ]
    return spark.createDataFrame(rows, ["image", "a", "b", "word", "y"]).cache()


def fitted(frame, home, model, **params):
    torch.manual_seed(0)
    known = {
        "backend": Here(),
        "store": LocalStore(str(home)),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.CrossEntropyLoss(),
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 1,
        "verbose": 0,
        "random_seed": 3,
        "run_id": "exported",
    }
    return TorchEstimator(**known | params).fit(frame)


@pytest.fixture(scope="module")
def model(frame, tmp_path_factory):
    features = ["image", ["a", "b"], "word"]
    options = {
        "feature_cols": features,
        "fill": {"b": "mean"},
        "categories": ["word"],
        "statistics": True,
    }
    return fitted(
        frame, tmp_path_factory.mktemp("export"), Network(), class_names=["x", "y", "z"], **options
    )


def test_a_model_is_explained_in_words(model):
    told = model.explain()
    print(told)
    assert told.splitlines()[0] == "TorchModel of run exported"
    for line in (
        "image: float32 [rows, 4]",
        "a, b: float32 [rows, 2]",
        "word: int64 [rows, 1] (word: 3 categories)",
        "y__output: vector of 3, logits",
        "classes: x, y, z",
        "122 parameters, 15 of them frozen, 488 B",
    ):
        assert f"  {line}" in told.splitlines(), line
    assert "b: 9.97175 (mean)" in told
    rows = [line.split() for line in told.splitlines() if line.startswith("  body.0")]
    assert rows == [["body.0", "Linear", "in_features=9,", "out_features=8,", "bias=True", "80"]]


def test_the_signature_is_saved_with_the_model(model, tmp_path):
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.read().model(Network()).load(str(tmp_path / "model"))
    assert loaded.getSignature() == model.getSignature()
    assert loaded.getSignature()[1] == {"columns": ["a", "b"], "shape": [-1, 2], "dtype": "float32"}
    assert loaded.explain() == model.explain()


def test_rows_are_compared_with_those_of_the_training_also_by_a_loaded_model(
    model, frame, tmp_path
):
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.read().model(Network()).load(str(tmp_path / "model"))
    assert loaded.getStatistics() == model.getStatistics()
    same = loaded.drift(frame)
    assert {name for name, one in same.items() if one.index == 0.0} == {"a", "b", "word", "y"}
    assert np.isnan(same["image"].index)  # a vector, of which only missing rows are counted
    changed = frame.selectExpr("image", "a + 5 as a", "b", "'grey' as word")
    drifted = loaded.drift(changed)
    assert sorted(list(drifted)[:2]) == ["a", "word"]
    assert (drifted["word"].new, "y" in drifted) == (1.0, False)


@pytest.mark.slow
def test_an_onnx_file_predicts_what_transform_predicts(model, frame, tmp_path):
    import onnxruntime

    path = tmp_path / "model.onnx"
    model.to_onnx(path, frame)
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["image", "a_b", "word"]
    rows = frame.collect()
    mean = np.mean([row.b for row in rows if row.b is not None])
    index = {word: 2 + at for at, word in enumerate(sorted({row.word for row in rows}))}
    given = {
        "image": np.array([row.image.toArray() for row in rows], "float32"),
        "a_b": np.array([[row.a, mean if row.b is None else row.b] for row in rows], "float32"),
        "word": np.array([[index[row.word]] for row in rows], "int64"),
    }
    (found,) = session.run(["y__output"], given)
    wanted = np.array([row.y__output.toArray() for row in model.transform(frame).collect()])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_file_that_predicts_something_else_is_not_kept(frame, tmp_path):
    strange = fitted(frame, tmp_path / "store", Surprising(), feature_cols=["image"])
    with pytest.raises(
        ValueError, match=r"does not predict what the model predicts: y__output differs by up to"
    ):
        strange.to_onnx(tmp_path / "model.onnx")
    assert [one.name for one in tmp_path.iterdir()] == ["store"]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(model, tmp_path, monkeypatch):
    from farandole.spark.common.model import onnx

    monkeypatch.setattr(onnx, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(ImportError, match=r"farandole\[onnx\]"):
        model.to_onnx(tmp_path / "model.onnx")


class Pooled(torch.nn.Module):
    """Means of two lists, whose lengths have nothing to do with each other."""

    def __init__(self, equal=False):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.equal = equal

    def forward(self, first, second):
        if self.equal:
            return self.line((first * second).sum(1, keepdim=True))
        return self.line(
            first.sum(1, keepdim=True) / first.shape[1]
            + second.sum(1, keepdim=True) / second.shape[1]
        )


@pytest.mark.slow
def test_lists_of_different_lengths_stay_apart_in_an_onnx_file(tmp_path):
    import onnxruntime

    lists = [
        {"columns": [name], "shape": [-1, 5], "dtype": "float32", "ragged": True}
        for name in ("first", "second")
    ]
    network = Pooled()
    model = TorchModel(
        model=network, feature_columns=["first", "second"], label_columns=["y"], signature=lists
    )
    model.to_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    given = {"first": np.ones((2, 3), "float32"), "second": np.ones((2, 9), "float32")}
    (found,) = session.run(None, given)
    wanted = network(*map(torch.from_numpy, given.values())).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # A model that needs equal lengths is exported, too.
    model.setModel(Pooled(equal=True)).to_onnx(tmp_path / "equal.onnx")
    assert (tmp_path / "equal.onnx").exists()


def test_operators_that_onnx_lacks_are_refused_by_name(model, tmp_path):
    one = {"columns": ["x"], "shape": [-1, 2], "dtype": "bfloat16"}
    refused = TorchModel(
        model=torch.nn.Linear(2, 1), feature_columns=["x"], label_columns=["y"], signature=[one]
    )
    with pytest.raises(ValueError, match="takes no bfloat16 input: x"):
        refused.to_onnx(tmp_path / "model.onnx")
    refused.setSignature([one | {"dtype": "float32"}]).setOutputCols(["x"])
    with pytest.raises(ValueError, match="need different names: x"):
        refused.to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="model is required"):
        TorchModel().explain()
