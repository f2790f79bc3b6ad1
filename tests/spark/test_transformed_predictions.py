# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fitted models that apply their `transformation_fn` before they predict, as models of images
must.
"""

from __future__ import annotations

import io
import logging
import sys

import cloudpickle
import keras
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image as Picture
from tests.single.training import Here

from farandole.data import Decode, Image
from farandole.spark.common import LocalStore
from farandole.spark.common.transform import UserTransformation
from farandole.spark.keras import KerasEstimator, KerasModel
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests

ROWS = 40
DECODE = Decode({"image": Image(8)})


def files():
    """PNG files of one grey, which is what the model learns."""
    found = []
    for row in range(ROWS):
        out = io.BytesIO()
        Picture.new("RGB", (12, 9), (row * 6, row * 6, row * 6)).save(out, "png")
        found.append(out.getvalue())
    return found


def pixels():
    return DECODE({"image": files()})["image"]


@pytest.fixture(scope="module")
def images(spark):
    """Rows to predict: files with a number, and no label."""
    schema = "id long, image binary"
    return spark.createDataFrame(
        [(row, file) for row, file in enumerate(files())], schema
    ).repartition(2)


@pytest.fixture(params=["torch", pytest.param("keras", marks=pytest.mark.slow)])
def fitted(request, tmp_path):
    rows = pa.table({"image": files(), "y": [row / ROWS for row in range(ROWS)]})
    known = {
        "feature_cols": ["image"], "label_cols": ["y"], "batch_size": 8, "epochs": 1, "verbose": 0,
        "random_seed": 1,
        "store": LocalStore(str(tmp_path / "store")), "backend": Here(),
        "transformation_fn": DECODE,
    }  # fmt: skip
    if request.param == "torch":
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 1))
        options = {
            "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
            "loss": torch.nn.MSELoss(),
            "input_shapes": [[-1, 3, 8, 8]],
        }  # fmt: skip
        return TorchEstimator(**known, **options).fit(rows)
    model = keras.Sequential(
        [keras.Input((3, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    return KerasEstimator(
        model=model, optimizer=keras.optimizers.SGD(1e-4), loss="mse", **known
    ).fit(rows)


def predicted(model, frame):
    return np.array([row["y__output"] for row in model.transform(frame).orderBy("id").collect()])


def expected(model):
    """Returns the predictions of the model itself for the decoded files."""
    if isinstance(model, TorchModel):
        return model.getModel().cpu()(torch.from_numpy(pixels())).detach().numpy().ravel()
    return np.asarray(keras.ops.convert_to_numpy(model.getModel()(pixels()))).ravel()


def test_images_are_predicted_on_request(fitted, images, tmp_path, caplog, monkeypatch):
    with pytest.raises(ValueError, match="feature column 'image' has type binary"):
        fitted.transform(images)
    fitted.setApplyTransformation(True).setBatchSize(16)
    wanted = expected(fitted)
    assert predicted(fitted, images) == pytest.approx(wanted, rel=1e-4)
    assert np.ptp(wanted) > 0
    fitted.write().save(f"{tmp_path}/model")
    loaded = type(fitted).load(f"{tmp_path}/model")
    assert predicted(loaded, images) == pytest.approx(wanted, rel=1e-4)
    if isinstance(fitted, KerasModel):  # is no pickle itself
        monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")
        with caplog.at_level(logging.WARNING, "farandole"):
            bare = KerasModel.load(f"{tmp_path}/model")
        assert "the transformation_fn saved at" in caplog.text
    else:
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 1))
        bare = TorchModel.read().model(module).load(f"{tmp_path}/model")
    with pytest.raises(ValueError, match="apply_transformation needs a transformation_fn"):
        bare.transform(images)
    assert predicted(bare.setTransformationFn(DECODE), images) == pytest.approx(wanted, rel=1e-4)


def test_only_columns_of_training_are_reported_as_absent():
    def looks_up(row):
        return {"x": {"known": 1.0}[row["x"]]}

    made = UserTransformation(
        looks_up, [("made", "float32", (), False)], ["text"]
    ).without_label_columns(["x"], ["y"])
    assert made.transform_features({"x": np.array(["known"])}, ["x"])["x"].tolist() == [1.0]
    with pytest.raises(KeyError, match="unknown"):
        made.transform_features({"x": np.array(["unknown"], object)}, ["x"])
    for name in ("y", "made", "text"):
        with pytest.raises(
            ValueError, match=f"transformation_fn asks for column '{name}'.* which are x"
        ) as told:
            made.transform_features({"x": np.array([name], object)}, ["x"])
        assert isinstance(told.value.__cause__, KeyError)


def test_a_function_of_rows_gets_the_features_alone(spark, tmp_path):
    def grow(row):
        return {**row, "x": row["x"] * 10, "y": row.get("y", 0.0)}

    def asks_for_labels(row):
        return {"x": row["x"] * row["y"]}

    rows = pa.table({"x": [[1.0, 2.0], [3.0, 4.0]] * 4, "y": [1.0, 2.0] * 4})
    model = torch.nn.Linear(2, 1, bias=False)
    made = TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loss=torch.nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], store=LocalStore(str(tmp_path)), backend=Here(),
        verbose=0,
        transformation_fn=grow,
        transformation_edit_fields=[("x", "float32", (2,), False), ("y", "float64", (), False)],
    ).fit(rows)  # fmt: skip
    frame = spark.createDataFrame([(0, [1.0, 2.0])], "id int, x array<double>")
    plain = predicted(made, frame)
    grown = predicted(made.setApplyTransformation(True), frame)
    assert grown == pytest.approx(10 * plain, rel=1e-5)
    with pytest.raises(
        Exception, match=r"transformation_fn asks for column 'y'.* only the features, which are x"
    ):
        predicted(made.setTransformationFn(asks_for_labels), frame)
