# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted Keras model as an ONNX file that predicts the same without Keras."""

from __future__ import annotations

import sys

import cloudpickle
import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors

from farandole.spark.keras import KerasModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# the exporting process cannot import tests
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Halved(keras.layers.Layer):
    """A class that only this process has."""

    def call(self, inputs):
        return inputs / 2


class Local(keras.layers.Layer):
    """Computes something else on torch than on other backends."""

    def call(self, inputs):
        return inputs + (1.0 if keras.backend.backend() == "torch" else 0.0)


class Refusing(keras.layers.Layer):
    """Does not work on torch."""

    def call(self, inputs):
        if keras.backend.backend() == "torch":
            raise NotImplementedError("this layer is of another backend")
        return inputs


def input_spec(name, shape, dtype="float32"):
    return {
        "columns": [name] if isinstance(name, str) else name,
        "shape": [-1, *shape],
        "dtype": dtype,
    }


def session_of(path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.backends
def test_an_onnx_file_predicts_what_transform_predicts(spark, tmp_path):
    rows = [
        (Vectors.dense([n / 9, 1.0, 0.5, n % 2]), n / 7, float(n % 3), n % 5) for n in range(40)
    ]
    frame = spark.createDataFrame(rows, ["v", "a", "b", "word"])
    keras.utils.set_random_seed(0)
    inputs = {
        "v": keras.Input((4,), name="v"), "word": keras.Input((1,), name="word", dtype="int64"),
        "ab": keras.Input((2,), name="ab"),
    }  # fmt: skip
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(inputs["word"]))
    joined = keras.layers.Concatenate()([Halved()(inputs["v"]), embedded, inputs["ab"]])
    hidden = keras.layers.Dropout(0.5)(
        keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(joined))
    )
    network = keras.Model(
        inputs, [keras.layers.Dense(3, "softmax")(hidden), keras.layers.Dense(1)(hidden)]
    )
    model = KerasModel(
        model=network, feature_columns=[["a", "b"], "v", "word"], label_columns=["kind", "size"],
        signature=[
            input_spec(["a", "b"], [2]), input_spec("v", [4]), input_spec("word", [1], "int64"),
        ],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    model.to_onnx(path, frame)
    assert [found.name for found in tmp_path.iterdir()] == ["model.onnx"]
    session = session_of(path)
    assert [found.name for found in session.get_inputs()] == ["a_b", "v", "word"]
    kept = frame.collect()
    given = {
        "a_b": np.array([[row.a, row.b] for row in kept], "float32"),
        "v": np.array([row.v.toArray() for row in kept], "float32"),
        "word": np.array([[row.word] for row in kept], "int64"),
    }
    kind, size = session.run(["kind__output", "size__output"], given)
    predicted = model.transform(frame).collect()
    np.testing.assert_allclose(
        kind, [row.kind__output.toArray() for row in predicted], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        size[:, 0], [row.size__output for row in predicted], rtol=1e-4, atol=1e-5
    )


def test_images_and_sequences_are_exported_with_any_number_of_rows(tmp_path):
    keras.utils.set_random_seed(0)
    image, tokens = keras.Input((8, 8, 1)), keras.Input((6,), dtype="int64")
    pooled = keras.layers.MaxPooling2D()(
        keras.layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    )
    seen = keras.layers.Flatten()(pooled)
    read = keras.layers.Embedding(9, 4)(tokens)
    read = keras.layers.LayerNormalization()(
        read + keras.layers.MultiHeadAttention(2, 4)(read, read)
    )
    read = keras.layers.LSTM(5)(keras.layers.GRU(5, return_sequences=True)(read))
    network = keras.Model(
        [image, tokens], keras.layers.Dense(2)(keras.layers.Concatenate()([seen, read]))
    )
    model = KerasModel(
        model=network, feature_columns=["image", "tokens"], label_columns=["y"],
        signature=[input_spec("image", [8, 8, 1]), input_spec("tokens", [6], "int64")],
    )  # fmt: skip
    model.to_onnx(tmp_path / "model.onnx")  # it checks other rows than those that were traced
    random = np.random.default_rng(0)
    given = {
        "image": random.random((17, 8, 8, 1), "float32"),
        "tokens": random.integers(0, 9, (17, 6)),
    }
    (found,) = session_of(tmp_path / "model.onnx").run(None, given)
    wanted = keras.ops.convert_to_numpy(network([given["image"], given["tokens"]], training=False))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def exported(tmp_path, *layers):
    network = keras.Sequential([keras.Input((2,)), *layers])
    KerasModel(
        model=network, feature_columns=["x"], label_columns=["y"], signature=[input_spec("x", [2])]
    ).to_onnx(tmp_path / "model.onnx")  # fmt: skip


@pytest.mark.backends
def test_a_file_that_predicts_something_else_is_not_kept(tmp_path):
    if keras.backend.backend() == "torch":
        pytest.skip("the model and the file are of one backend")
    with pytest.raises(
        ValueError, match="does not predict what the model predicts: y__output differs by up to 1,"
    ):
        exported(tmp_path, Local())
    with pytest.raises(ValueError, match=r"Sequential.*this layer is of another backend"):
        exported(tmp_path, Refusing())
    assert not list(tmp_path.iterdir())


def test_an_export_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    from farandole.spark.keras.saving import onnx

    monkeypatch.setattr(onnx, "_EXPORT_TIMEOUT_SECONDS", 0.5)
    with pytest.raises(
        TimeoutError, match=r"the export of Sequential to ONNX has not ended after 0\.5 s"
    ):
        exported(tmp_path, keras.layers.Dense(1))
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_the_extras_that_bring_it(tmp_path, monkeypatch):
    from farandole.spark.common.model import onnx

    monkeypatch.setattr(onnx, "ONNX_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(ImportError, match=r"farandole\[torch,onnx\]"):
        exported(tmp_path, keras.layers.Dense(1))
