# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model as a function of columns, in expressions, in SQL and on a stream."""

from __future__ import annotations

import sys

import cloudpickle
import keras
import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as sf
from tests.pages import blocks_of

from farandole.spark.common.model.column_function import (
    ColumnPrediction,
    FunctionColumns,
    make_pandas_function,
)
from farandole.spark.keras import KerasModel
from farandole.spark.lightning import TorchModel as LightningModel
from farandole.spark.torch import TorchModel

pytestmark = pytest.mark.timeout(600)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests

NUMBER = {"label_dtype": "float32", "label_is_vector": False, "size": 1}
CLASSES = {"label_dtype": "int64", "label_is_vector": False, "size": 3}


def sum_network(outputs=1):
    """Returns a x 1 + b x 10, times 1, 2, ... in each output."""
    network = torch.nn.Linear(2, outputs, bias=False)
    with torch.no_grad():
        network.weight.copy_(
            torch.tensor([[1.0, 10.0]]) * torch.arange(1, outputs + 1).unsqueeze(1)
        )
    return network


def keras_sum():
    x = keras.Input((2,))
    model = keras.Model(x, keras.layers.Dense(1, use_bias=False)(x))
    model.set_weights([np.array([[1.0], [10.0]])])
    return model


def number_model(kind=TorchModel, network=None, **params):
    known = {
        "model": sum_network() if network is None else network,
        "feature_columns": [["a", "b"]],
        "label_columns": ["y"],
        "outputs": [NUMBER],
        "verbose": 0,
    }
    return kind(**known | params)


def class_model(**params):
    return number_model(
        network=sum_network(3),
        outputs=[CLASSES],
        output_form="logits",
        class_names=["x", "y", "z"],
        **params,
    )


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(float(n), n / 4, Vectors.dense([n, 1.0]), n) for n in range(20)]
    frame = spark.createDataFrame(rows, ["a", "b", "pair", "it's.a `name`"]).coalesce(1)
    frame.createOrReplaceTempView("numbers")
    return frame.cache()


@pytest.mark.parametrize(
    "make_model",
    [
        pytest.param(number_model, id="torch"),
        pytest.param(lambda: number_model(LightningModel), id="lightning"),
        pytest.param(
            lambda: number_model(KerasModel, keras_sum()), id="keras", marks=pytest.mark.slow
        ),
    ],
)
def test_a_model_is_a_function_of_columns_and_of_sql(spark, frame, make_model):
    model = make_model()
    predict = model.udf()
    found = frame.select("a", "b", predict("a", sf.col("b") * 1.0).alias("p"), predict().alias("q"))
    assert found.schema["p"].dataType.simpleString() == "float"
    for row in found.collect():
        assert row.p == row.q == pytest.approx(row.a + 10 * row.b)
    model.register(spark, "predict_sum")
    (row,) = spark.sql("SELECT sum(predict_sum(a, b) + 1) AS s FROM numbers").collect()
    assert row.s == pytest.approx(sum(n + 10 * n / 4 + 1 for n in range(20)))


def test_several_columns_are_a_struct_and_vectors_are_arrays(spark, frame):
    model = class_model(probabilityCol="probability", predictedLabelCol="name", labelIndexCol="i")
    model.register(spark, "classify")
    rows = spark.sql(
        "SELECT a, p.name AS name, p.y__output[2] AS third, size(p.probability) AS n "
        "FROM (SELECT a, classify(a, b) AS p FROM numbers)"
    ).collect()
    for row in rows:
        assert (row.name, row.n) == ("z" if row.a else "x", 3)
        assert row.third == pytest.approx(3 * (row.a + 10 * row.a / 4))
    names = frame.select("a", model.udf("name")("a", "b").alias("name")).collect()
    assert {row.name for row in names if row.a} == {"z"}
    with pytest.raises(ValueError, match=r"no output column 'kind': y__output, probability, name"):
        model.udf("kind")


def test_vectors_and_odd_names_are_arguments(frame):
    vector = number_model(feature_columns=["pair"])
    for row in frame.select("a", vector.udf()().alias("p")).collect():
        assert row.p == pytest.approx(row.a + 10)
    odd = number_model(feature_columns=[["it's.a `name`", "it's.a `name`__missing"]])
    for row in frame.select("a", odd.udf()().alias("p")).collect():
        assert row.p == pytest.approx(row.a)  # no value is missing


def test_an_older_spark_passes_series_of_pandas(spark, frame):
    def older_function(model, result, *columns, names):
        given = FunctionColumns(list(columns), spark)
        predictor = model._create_predictor(given).with_output_kinds(
            [one.kind for one in model.getOrDefault("outputs")], model._added_class_columns(given)
        )
        return make_pandas_function(ColumnPrediction(predictor, names, None), result)

    from pyspark.sql import types

    number = older_function(number_model(), types.FloatType(), "a", "b", names=("y__output",))
    vector = older_function(
        number_model(feature_columns=["pair"]), types.FloatType(), "pair", names=("y__output",)
    )
    classes = older_function(
        class_model(predictedLabelCol="name"),
        types._parse_datatype_string("y__output array<double>, name string"),
        "a",
        "b",
        names=("y__output", "name"),
    )
    rows = frame.select(
        "a", number("a", "b").alias("p"), vector("pair").alias("v"), classes("a", "b").alias("c")
    ).collect()
    for row in rows:
        assert (row.p, row.v) == pytest.approx((3.5 * row.a, row.a + 10))
        assert row.c.y__output == pytest.approx([3.5 * row.a * n for n in (1, 2, 3)])
        assert row.c.name == ("z" if row.a else "x")


def test_a_wrong_call_names_the_columns(spark, frame):
    model = number_model()
    with pytest.raises(TypeError, match=r"takes 2 columns \(a, b\), and was called with 1"):
        model.udf()("a")
    model.register(spark, "predict_two")
    with pytest.raises(Exception, match=r"takes 2 columns \(a, b\), and was called with 3"):
        spark.sql("SELECT predict_two(a, b, a) FROM numbers").collect()
    unknown = number_model(outputs=None)
    with pytest.raises(ValueError, match=r"function of columns has no row.*setOutputs\(\[\{"):
        unknown.udf()
    unknown.setOutputs([NUMBER])
    assert frame.where("a = 2").select(unknown.udf()().alias("p")).collect()[0].p == 7.0

    class OfRows(LightningModel):
        def get_prediction_fn(self):
            return lambda module, row: module(torch.tensor([row.a, row.b]))

    with pytest.raises(ValueError, match="get_prediction_fn of this model takes whole rows"):
        number_model(OfRows).udf()


def test_the_examples_of_the_page_predict_columns_and_streams(spark, frame, tmp_path):
    blocks = [block.text for block in blocks_of("docs/spark/serving.md")]
    frame.select("a", "b").write.parquet(str(tmp_path / "incoming"))
    names = {
        "model": number_model(),
        "network": sum_network(),
        "TorchModel": TorchModel,
        "spark": spark,
        "df": frame,
    }
    exec(blocks[0], names)
    for found in (names["predicted"], names["answers"]):
        assert found.columns == ["a", "prediction"]
        assert [row.prediction for row in found.collect()] == [n * 3.5 for n in range(20)]
    exec(blocks[1].replace('"/data/', f'"{tmp_path}/'), names)
    try:
        assert names["query"].awaitTermination(300)
    finally:
        names["query"].stop()
    rows = spark.read.parquet(str(tmp_path / "predicted")).collect()
    assert sorted(row.y__output for row in rows) == [n * 3.5 for n in range(20)]
    stream = spark.readStream.schema("a double, b double").parquet(str(tmp_path / "incoming"))
    unknown = number_model(outputs=None)
    with pytest.raises(ValueError, match=r"a stream has no row to determine them.*setOutputs"):
        unknown.transform(stream)
    exec(blocks[2], names)
    assert names["by_hand"].setVerbose(0).transform(stream).isStreaming


class MappedWeights(torch.nn.Module):
    """Returns the sum of its layers' outputs, and whether this process maps weights of a host."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 1500), torch.nn.Linear(1500, 1500))

    def forward(self, x):
        with open("/proc/self/maps") as lines:
            is_mapped = any("farandole-bytes" in line for line in lines)
        return torch.stack([self.layers(x).sum(1), torch.full((len(x),), float(is_mapped))], 1)


def test_workers_map_the_weights_of_a_large_model(frame):
    torch.manual_seed(0)
    large = MappedWeights()
    model = number_model(network=large, outputs=[CLASSES | {"size": 2}])
    for row in model.transform(frame.limit(2)).select("a", "b", "y__output").collect():
        expected = large(torch.tensor([[row.a, row.b]], dtype=torch.float32))[0, 0].item()
        np.testing.assert_allclose(row.y__output.toArray(), [expected, 1.0], rtol=1e-3)


def test_a_keras_model_is_no_program_of_torch(tmp_path):
    signature = [{"columns": ["a", "b"], "shape": [-1, 2], "dtype": "float32"}]
    model = number_model(KerasModel, keras_sum(), signature=signature)
    with pytest.raises(ValueError, match=r"this one is of Keras.*\.onnx"):
        model.export(tmp_path / "model.pt2")
