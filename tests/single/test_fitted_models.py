# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fitted models and their subclasses in Horovod's manner: parameters, hooks, functions of rows and
transformations that remove columns.
"""

from __future__ import annotations

import json

import lightning
import numpy as np
import pytest
import torch
from pyspark import keyword_only
from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasOutputCols
from pyspark.sql import Row
from tests.single.training import Here, line, linear, write

from farandole.data.columns import PreparedColumn
from farandole.spark.common.data.column_metadata import (
    column_metadata,
    metadata_as_plain_values,
    parse_metadata,
)
from farandole.spark.common.transform import UserTransformation, batched
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.lightning import TorchModel as LightningModel
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|tensorboard).*"
    ),
]
KINDS = ["bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "utf8"]


# ruff: noqa: ARG002, ARG005 - `keyword_only` keeps the arguments; lambdas are told apart by theirs


class DeepModel(TorchModel):
    """A model whose constructor takes what its estimator's hook returns, and little else."""

    image_col = Param(Params._dummy(), "image_col", "column of the images")

    @keyword_only
    def __init__(self, *, history=None, model=None, optimizer=None, run_id=None, _metadata=None,
                 image_col="image"):  # fmt: skip
        super().__init__()
        kwargs = dict(self._input_kwargs)
        self._setDefault(image_col="image", outputCols=["scores"])
        self._set(**kwargs)
        self.setFeatureColumns([self.getOrDefault("image_col")])
        self.setLabelColoumns(["y"])


class DeepEstimator(TorchEstimator):
    """An estimator with a class of models, an optimizer and a backend of its own."""

    def get_model_class(self):
        return DeepModel

    def _get_model_kwargs(self, model, history, optimizer, run_id, metadata):
        return {
            "history": history, "model": model, "optimizer": optimizer, "run_id": run_id,
            "_metadata": metadata, "image_col": "x",
        }  # fmt: skip

    def _get_optimizer(self):
        return torch.optim.Adam(self.getModel().parameters(), lr=0.25)

    def _get_or_create_backend(self):
        self.own = Here()
        return self.own


def test_a_subclass_decides_backend_optimizer_and_model(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    estimator = DeepEstimator(
        model=linear(), loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"],
        batch_size=48, epochs=2, verbose=0, store=str(tmp_path), num_proc=1,
    )  # fmt: skip
    fitted = estimator.fit_on_parquet()
    assert estimator.own.runs == 1
    assert type(fitted) is DeepModel
    assert isinstance(fitted.getOptimizer(), torch.optim.Adam)
    assert fitted.getOptimizer().param_groups[0]["lr"] == 0.25
    assert fitted.getFeatureColumns() == ["x"]
    assert fitted.getOutputCols() == ["scores"]
    assert set(fitted._get_metadata()) == {"x", "y"}
    # The constructor has not got these, and the fit has set them all the same.
    assert fitted.getPaths()["checkpoint"].endswith("checkpoint")
    assert fitted.getSignature()[0]["columns"] == ["x"]


class PredictionParams(Params):
    """Accessors that clients mix in after Horovod's class, which has none of these names."""

    prediction_col = Param(Params._dummy(), "prediction_col", "column of the class")

    def __init__(self):
        super().__init__()
        self._setDefault(prediction_col="prediction")

    def setPredictionCol(self, value):  # noqa: N802
        return self._set(prediction_col=value)

    def getPredictionCol(self):  # noqa: N802
        return self.getOrDefault(self.prediction_col)

    def getThresholds(self):  # noqa: N802
        return "of the client"


@pytest.mark.parametrize("kind", [TorchModel, LightningModel, TorchEstimator, LightningEstimator])
def test_accessors_that_a_subclass_mixes_in_are_those_of_the_mixed_in_class(kind):
    class Client(kind, PredictionParams):
        pass

    class Derived(Client):
        pass

    for client in (Client(), Derived()):
        assert client.getPredictionCol() == "prediction"
        assert client.setPredictionCol("mine").getPredictionCol() == "mine"
        assert client.getThresholds() == "of the client"
        # Farandole's parameters of these names are what they were.
        assert client.getOrDefault("predictionCol") is None
        assert client.setProbabilityCol("p").getProbabilityCol() == "p"
    assert kind().getPredictionCol() is None


@pytest.mark.parametrize("kind", [TorchModel, LightningModel])
def test_the_parameters_of_horovods_models_can_be_set(kind):
    model = kind(label_columns=["y"], _metadata={"y": {"shape": ()}}, optimizer="an optimizer")
    assert isinstance(model, HasOutputCols)
    assert model.getOutputCols() == ["y__output"]
    assert model.copy({model.outputCols: ["z"]}).getOutputCols() == ["z"]
    assert model.getOutputCols() == ["y__output"]
    assert model.setOutputCols(["w"]).getOrDefault(model.outputCols) == ["w"]
    assert model._get_metadata() == {"y": {"shape": ()}}
    assert model.getOptimizer() == "an optimizer"
    assert model.copy({model._metadata: {}, model.optimizer: "other"}).getOptimizer() == "other"


def test_the_parameters_of_horovods_keras_model_can_be_set():
    from farandole.spark.keras import KerasModel

    model = KerasModel(label_columns=["y"], _metadata={"y": {"shape": ()}}, _floatx="float64")
    assert isinstance(model, HasOutputCols)
    assert model.copy({model.outputCols: ["z"]}).getOutputCols() == ["z"]
    assert model.getOutputCols() == ["y__output"]
    assert model._get_metadata() == {"y": {"shape": ()}}
    assert model._get_floatx() == "float64"
    changed = model.copy({model._floatx: "float32", model._metadata: {}})
    assert changed._get_floatx() == "float32"
    assert changed._get_metadata() == {}


def test_a_description_of_columns_is_the_same_after_it_was_written():
    columns = [PreparedColumn(kind, kind, ()) for kind in KINDS]
    described = column_metadata([*columns, PreparedColumn("list", "float32", (3, 2))])
    assert described["list"]["spark_data_type"].__name__ == "DenseVector"
    assert described["list"]["max_size"] == 6
    assert described["utf8"]["spark_data_type"].__name__ == "StringType"
    text = json.dumps(metadata_as_plain_values(described))
    found = parse_metadata("_metadata", json.loads(text))
    assert found == {name: {**one, "shape": list(one["shape"])} for name, one in described.items()}
    with pytest.raises(ValueError, match="no type of this name: Nothing"):
        parse_metadata("_metadata", {"a": {"spark_data_type": "Nothing"}})


def own_function(function):
    """A model whose subclass predicts by this function."""
    return type("Own", (LightningModel,), {"get_prediction_fn": lambda _: function})(
        feature_columns=["a", ["b", "c"]], label_columns=["y"], model=linear()
    )


def by_row(model, row):
    return model(row)


@batched
def by_batch(model, first, second):
    return model(first, second)


def test_a_function_of_rows_and_one_of_batches_are_told_apart_by_the_mark():
    assert own_function(by_row)._row_prediction_fn() is by_row
    assert own_function(by_row)._custom_prediction_fn() is None
    assert own_function(by_batch)._custom_prediction_fn() is by_batch
    assert own_function(by_batch)._row_prediction_fn() is None
    plain = LightningModel(feature_columns=["a"])
    assert plain._custom_prediction_fn() is plain._row_prediction_fn() is None
    for strange in (lambda model, *inputs: inputs, lambda model, a, b: a, lambda model: model):
        with pytest.raises(TypeError, match=r"\(model, row\), or one of whole batches that is"):
            own_function(strange)._row_prediction_fn()


def test_the_function_of_a_model_takes_a_row_too():
    seen = []
    model = LightningModel(feature_columns=["a", ["b", "c"]])
    row = Row(a=[1, 2], b=3.0, c=4, text="unused")
    model.get_prediction_fn()(lambda *inputs: seen.extend(inputs), row)
    assert [one.tolist() for one in seen] == [[[1.0, 2.0]], [[3.0, 4.0]]]
    model.setInputShapes([[-1, 2, 1], [2]])
    seen.clear()
    model.get_prediction_fn()(lambda *inputs: seen.extend(inputs), row)
    assert [tuple(one.shape) for one in seen] == [(1, 2, 1), (2,)]
    assert model.get_prediction_fn()(lambda *inputs: inputs, 1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "expected"), [(None, (2, 3)), ((3,), (2, 3)), ((1, 3), (2, 1, 3)), ((), None)]
)
def test_an_edit_field_without_a_shape_is_whatever_comes(shape, expected):
    estimator = TorchEstimator(transformation_edit_fields=[("ids", int, shape, True)])
    edits = estimator.getTransformationEditFields()
    assert edits == [("ids", "int64", shape, True)]
    change = UserTransformation(lambda row: {"ids": [1.0, 2.0, row["x"]]}, edits)
    if expected is None:
        with pytest.raises(ValueError, match="column 'ids' of transformation_fn is not int64"):
            change({"x": np.arange(2)})
        return
    made = change({"x": np.arange(2)})["ids"]
    assert (made.shape, made.dtype) == (expected, np.dtype("int64"))


class Words(lightning.LightningModule):
    """Learns from columns that the transformation makes of texts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.EmbeddingBag(30, 1)

    def training_step(self, batch, _index):
        assert {name: one.dtype for name, one in batch.items()} == {
            "ids": torch.int64, "labels": torch.float32,
        }  # fmt: skip
        assert batch["ids"].shape[1:] == (2,)
        return torch.nn.functional.mse_loss(self.inner(batch["ids"])[:, 0], batch["labels"])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_ids(row):
    """Two numbers of a text, and a label under another name."""
    words = row["text"].split()
    return {"ids": [len(one) for one in words], "labels": row["y"], "text": row["text"], "y": 0}


@pytest.fixture
def texts(tmp_path):
    _, y = line(24)
    words = np.array([f"{'a' * (one % 5 + 1)} {'b' * (one % 7 + 1)}" for one in range(24)])
    write(tmp_path / "intermediate_train_data", text=words, y=y)
    write(tmp_path / "intermediate_val_data", text=words, y=y)
    return tmp_path


def words_estimator(directory, **params):
    known = {
        "model": Words(), "feature_cols": ["text"], "label_cols": ["y"], "batch_size": 8,
        "epochs": 2, "verbose": 0, "store": str(directory), "backend": Here(),
        "transformation_fn": make_ids, "transformation_removed_fields": ["text", "y"],
        "transformation_edit_fields": [("ids", int, None, True), ("labels", "float32", (), False)],
    }  # fmt: skip
    return LightningEstimator(**known | params)


def test_a_lightning_module_gets_whatever_the_transformation_returns(texts):
    fitted = words_estimator(texts).fit_on_parquet()
    assert len(fitted.getHistory()) == 2
    assert fitted.getLabelColumns() == ["y"]
    assert fitted.getFeatureColumns() == ["text"]
    assert fitted.getOrDefault("outputs") is None


def test_part_of_an_input_and_columns_of_a_plain_module_cannot_be_removed(texts):
    with pytest.raises(ValueError, match="names text, which is one input with other columns"):
        words_estimator(texts, feature_cols=[["text", "y2"]], label_cols=["y"])._sample_columns(
            None, Here()
        )
    module = linear()
    plain = words_estimator(
        texts,
        model=module,
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    )
    with pytest.raises(ValueError, match="returns no columns with these names: text, y"):
        plain.fit_on_parquet()
