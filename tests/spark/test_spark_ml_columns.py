# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Categories, missing values and columns in Spark ML's manner, on DataFrames, by all three
estimators.
"""

from __future__ import annotations

import pickle
import sys

import cloudpickle
import keras
import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.sql import functions as sf
from tests.single.training import Here

from farandole.data import Pad, ParquetLoader, frame_loader, statistics_of
from farandole.data import prepare_data as prepare_frame
from farandole.data.columns import ColumnRoles
from farandole.data.validation_splits import resolve_validation_split
from farandole.spark.common import LocalStore
from farandole.spark.common.data.prepare import prepare_data
from farandole.spark.common.model import base as model_module
from farandole.spark.common.model.base import FarandoleModel
from farandole.spark.keras import KerasEstimator, KerasModel
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.torch import TorchEstimator, TorchModel

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import tests

ASKED = {
    "predictionCol": "prediction",
    "rawPredictionCol": "raw",
    "probabilityCol": "probability",
    "predictedLabelCol": "named",
    "labelIndexCol": "index",
}
WISH = {
    "categories": {"sex": None, "port": 2, "lived": None},
    "fill": {"age": "mean", "port": "most_frequent"},
}
GROUPS = ["sex", ["age", "age__missing"], "port"]


@pytest.fixture(scope="module")
def people(spark):
    random = np.random.default_rng(0)
    rows = []
    for _ in range(240):
        sex, port = (
            random.choice(["male", "female"]),
            random.choice(["S", "C", "Q"], p=[0.6, 0.3, 0.1]),
        )
        age = float(random.integers(1, 70))
        lived = random.random() < (0.85 if sex == "female" else 0.15)
        rows.append(
            (
                None if random.random() < 0.1 else str(sex),
                None if random.random() < 0.2 else age,
                None if random.random() < 0.1 else str(port),
                "yes" if lived else "no",
            )
        )
    return spark.createDataFrame(rows, "sex string, age double, port string, lived string").cache()


class Embedded(torch.nn.Module):
    """An embedding of each category, beside the numbers."""

    def __init__(self, outputs=2):
        super().__init__()
        torch.manual_seed(0)
        self.sex, self.port = torch.nn.Embedding(4, 2), torch.nn.Embedding(4, 2)
        self.last = torch.nn.Linear(6, outputs)

    def forward(self, sex, numbers, port):
        parts = [self.sex(sex[:, 0]), numbers / torch.tensor([50.0, 1.0]), self.port(port[:, 0])]
        return self.last(torch.cat(parts, dim=1))


def of_torch(kind, home, **params):
    model = Embedded()
    return kind(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=torch.nn.CrossEntropyLoss(),
        store=LocalStore(str(home)), backend=Here(), feature_cols=GROUPS, label_cols=["lived"],
        batch_size=32, epochs=4, verbose=0, random_seed=1, **params,
    )  # fmt: skip


def of_keras(home, **params):
    keras.utils.set_random_seed(0)
    sex, numbers, port = (
        keras.Input((1,), dtype="int64"),
        keras.Input((2,)),
        keras.Input((1,), dtype="int64"),
    )
    embedded = [keras.layers.Flatten()(keras.layers.Embedding(4, 2)(one)) for one in (sex, port)]
    scaled = keras.layers.Rescaling([1 / 50.0, 1.0])(numbers)
    last = keras.layers.Dense(1, activation="sigmoid")(
        keras.layers.Concatenate()([*embedded, scaled])
    )
    return KerasEstimator(
        model=keras.Model([sex, numbers, port], last), optimizer=keras.optimizers.Adam(0.05),
        loss="binary_crossentropy", store=LocalStore(str(home)), backend=Here(),
        feature_cols=GROUPS,
        label_cols=["lived"], batch_size=32, epochs=4, verbose=0, random_seed=1, **params,
    )  # fmt: skip


MAKERS = {
    "torch": lambda home, **params: of_torch(TorchEstimator, home, **params),
    "lightning": lambda home, **params: of_torch(LightningEstimator, home, **params),
    "keras": of_keras,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_strings_and_nulls_go_in_and_spark_evaluators_take_what_comes_out(people, tmp_path, kind):
    fitted = MAKERS[kind](tmp_path, **WISH, **ASKED).fit(people)
    assert isinstance(fitted, FarandoleModel)
    assert fitted.getCategories() == {
        "sex": ["female", "male"],
        "port": ["C", "S"],
        "lived": ["no", "yes"],
    }
    assert fitted.getFill() == {
        "age": pytest.approx(people.agg(sf.avg("age")).first()[0]),
        "port": "S",
    }
    assert fitted.getClasses() == ["no", "yes"]
    scored = fitted.transform(people).cache()
    assert scored.columns == [*people.columns, "lived__output", "raw", "probability",
        *list(ASKED.values())[0:1],
                              "named", "index"]  # fmt: skip
    rows = scored.collect()
    for row in rows:
        assert row.prediction == float(np.argmax(row.probability.toArray()))
        assert row.probability.toArray().sum() == pytest.approx(1.0)
        assert row.named == ["no", "yes"][int(row.prediction)]
        assert row["index"] == ["no", "yes"].index(row.lived)
    told = fitted.evaluate(people)
    roc = BinaryClassificationEvaluator(
        rawPredictionCol="raw", labelCol="index", metricName="areaUnderROC"
    )
    assert told["area_under_roc"] == pytest.approx(roc.evaluate(scored), abs=1e-9)
    assert told["area_under_roc"] > 0.75
    spark_ml = {"accuracy": "accuracy", "f1": "f1", "precision": "weightedPrecision",
        "recall": "weightedRecall",
                "log_loss": "logLoss"}  # fmt: skip
    for ours, theirs in spark_ml.items():
        judge = MulticlassClassificationEvaluator(
            labelCol="index",
            predictionCol="prediction",
            probabilityCol="probability",
            metricName=theirs,
        )
        assert told[ours] == pytest.approx(judge.evaluate(scored), abs=1e-6), ours
    assert (told.rows, sum(map(sum, told.confusion)), told.classes) == (240, 240, ["no", "yes"])
    worse = fitted.importance(people, repeats=2)
    assert next(iter(worse)) == "sex"
    assert set(worse) == {"sex", "age", "port"}
    assert worse["sex"] > 0.1 > abs(worse["age"])
    # A threshold that nothing reaches predicts one class alone.
    fitted.setThreshold(1.0)
    assert {row.prediction for row in fitted.transform(people).collect()} == {0.0}
    scored.unpersist()


@pytest.mark.parametrize("kind", ["torch", "keras"])
def test_a_saved_model_predicts_unseen_and_missing_values_as_before(spark, people, tmp_path, kind):
    fitted = MAKERS[kind](tmp_path, **WISH, **ASKED).fit(people)
    fitted.write().overwrite().save(f"{tmp_path}/model")
    again = (TorchModel if kind == "torch" else KerasModel).load(f"{tmp_path}/model")
    odd = spark.createDataFrame(
        [("other", 30.0, "X", "no"), (None, None, None, "yes"), ("male", None, "S", "maybe")],
        people.schema,
    )
    expected = fitted.transform(odd).collect()
    assert again.transform(odd).collect() == expected
    assert [row["index"] for row in expected] == [0.0, 1.0, None]
    # A missing port is the most frequent one.
    same = spark.createDataFrame([(None, None, "S", "yes")], people.schema)
    assert fitted.transform(same).first().probability == expected[1].probability


def test_prepared_rows_are_found_again_and_their_validation_has_the_same_indices(people, tmp_path):
    held = people.withColumn("held", sf.expr("age is not null and age > 50"))
    estimator = of_torch(TorchEstimator, tmp_path, validation="held", **WISH)
    fitted = estimator.fit(held)
    mean = held.where("not held").agg(sf.avg("age")).first()[0]
    assert fitted.getFill()["age"] == pytest.approx(mean)
    paths = fitted.getPaths()
    batch = next(iter(ParquetLoader(paths["validation data"], 1000)))
    assert set(batch["sex"].tolist()) <= {0, 2, 3}
    assert batch["age"].min() > 50
    assert not batch["age__missing"].any()


def sequences_of_keras(home, pad):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int64")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(1)(pooled))
    return KerasEstimator(
        model=model, optimizer=keras.optimizers.Adam(0.05), loss="mse", store=LocalStore(str(home)),
        backend=Here(),
        feature_cols=["tokens"], label_cols=["y"], epochs=2, verbose=0, random_seed=1,
        ragged={"tokens": pad},
    )  # fmt: skip


class Pooled(torch.nn.Module):
    """The mean of embedded tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = torch.nn.Embedding(20, 4), torch.nn.Linear(4, 1)

    def forward(self, tokens):
        return self.last(self.embedding(tokens).mean(1))


def sequences_of_torch(home, pad):
    model = Pooled()
    return TorchEstimator(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=torch.nn.MSELoss(),
        store=LocalStore(str(home)), backend=Here(), feature_cols=["tokens"], label_cols=["y"],
        epochs=2, verbose=0,
        random_seed=1, ragged={"tokens": pad},
    )  # fmt: skip


@pytest.mark.parametrize("maker", [sequences_of_torch, sequences_of_keras], ids=["torch", "keras"])
def test_sequences_of_different_lengths_go_in_and_a_loaded_model_pads_them_too(
    spark, tmp_path, maker
):
    random = np.random.default_rng(0)
    rows = [
        ([int(one) for one in random.integers(1, 20, random.integers(0, 12))], float(row % 5))
        for row in range(64)
    ]
    frame = spark.createDataFrame(rows, "tokens array<int>, y double")
    fitted = maker(tmp_path, Pad(max_length=8)).fit(frame)
    assert fitted.getRagged() == {
        "tokens": {"dtype": "int32", "value": 0, "max_length": 8, "buckets": 1, "nested": False}
    }
    fitted.write().overwrite().save(f"{tmp_path}/model")
    again = type(fitted).load(f"{tmp_path}/model")
    odd = spark.createDataFrame(
        [([1, 2], 0.0), ([], 0.0), (None, 0.0), (list(range(1, 12)), 0.0)], frame.schema
    )
    by_hand = spark.createDataFrame(
        [([1, 2, *[0] * 6], 0.0), ([0] * 8, 0.0), ([0] * 8, 0.0), (list(range(1, 9)), 0.0)],
        frame.schema,
    )
    expected = [row.y__output for row in fitted.transform(by_hand).collect()]
    assert [row.y__output for row in fitted.transform(odd).collect()] == expected
    assert [row.y__output for row in again.transform(odd).collect()] == expected


def test_a_model_of_values_predicts_them_and_has_metrics_of_values(spark, tmp_path, capsys):
    line = spark.range(64).select(
        (sf.col("id") / 64).alias("a"), (sf.col("id") / 32 - 1).alias("y")
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss(),
        store=LocalStore(str(tmp_path)), backend=Here(), feature_cols=["a"], label_cols=["y"],
        verbose=0,
        predictionCol="prediction",
    )  # fmt: skip
    fitted = estimator.fit(line)
    told = fitted.evaluate(line)
    model_module._SHOWN_MESSAGES.clear()
    scored = fitted.transform(line)
    fitted.setVerbose(1).transform(line)
    fitted.transform(line)
    assert capsys.readouterr().err.count("workers imports torch, which takes some seconds") == 1
    assert scored.schema["prediction"].dataType.simpleString() == "double"
    for name in ("mse", "rmse", "mae", "r2"):
        judge = RegressionEvaluator(labelCol="y", predictionCol="prediction", metricName=name)
        assert told[name] == pytest.approx(judge.evaluate(scored), rel=1e-5)
    # (y - w a)**2 grows by 2 w cov(y, a) in the mean over all orders, and y is 2 a - 1.
    slope, spread = float(fitted.getModel().weight.detach()), np.var(np.arange(64) / 64)
    worse = fitted.importance(line.coalesce(1), repeats=100)
    assert worse == {"a": pytest.approx(2 * slope * 2 * spread, rel=0.1)}
    with pytest.raises(ValueError, match="metric must be one of mse, rmse, mae, r2: accuracy"):
        fitted.importance(line, "accuracy")
    with pytest.raises(
        ValueError,
        match="probabilityCol needs a model with classes, but the output_form of this model is",
    ):
        estimator.copy().setProbabilityCol("p").fit(line)
    own = estimator.copy().setOutputForm(None)
    own._set(loss=lambda output, label: ((output - label) ** 2).mean())
    with pytest.raises(
        ValueError, match=r"predictionCol needs to know what the model returns.*set output_form"
    ):
        own.fit(line)


@pytest.mark.parametrize("by", ["stratify", "group", "time"])
def test_a_split_holds_the_same_rows_out_on_spark_as_without(spark, tmp_path, by):
    rows = [(row, ["a", "b", "b", "b"][row % 4], row % 7, float(row % 11)) for row in range(200)]
    frame = spark.createDataFrame(rows, "id int, kind string, user int, day double").repartition(3)
    column = {"stratify": "kind", "group": "user", "time": "day"}[by]

    def held_out(url):
        return sorted(next(iter(ParquetLoader(url, 1000, ["id"])))["id"].tolist())

    roles = ColumnRoles(features=("id", "day"), labels=(), validation=0.25)
    split = resolve_validation_split(
        0.25, *(column if by == one else None for one in ("stratify", "group", "time")), 3
    )
    with prepare_data(
        2, LocalStore(str(tmp_path / "spark")), frame, roles, 3, split=split
    ) as prepared:
        found = held_out(prepared.val_url)
        assert sorted(found + held_out(prepared.train_url)) == list(range(200))
    plain = prepare_frame(frame.toPandas(), tmp_path / "plain", feature_cols=["id", "day"],
        validation=0.25, seed=3,
                          **{f"validation_{by}": column})  # fmt: skip
    assert held_out(plain.val_url) == found


def test_tables_of_a_catalog_are_prepared_as_other_frames(spark, tmp_path):
    rows = spark.range(100).selectExpr("id", "cast(id % 3 as string) as kind", "id / 2 as x")
    rows.write.option("path", f"{tmp_path}/table").partitionBy("kind").saveAsTable("farandole_rows")
    try:
        roles = ColumnRoles(features=("id", "x", "kind"), labels=(), validation=None)
        for frame in (spark.table("farandole_rows"), spark.sql("select * from farandole_rows")):
            with prepare_data(
                2, LocalStore(str(tmp_path / "store")), frame, roles, 3, categories=["kind"]
            ) as prepared:
                batch = next(iter(ParquetLoader(prepared.train_url, 100, shuffle=False)))
                assert sorted(
                    zip(
                        batch["id"].tolist(),
                        batch["x"].tolist(),
                        batch["kind"].tolist(),
                        strict=True,
                    )
                ) == [(row, row / 2, row % 3 + 2) for row in range(100)]
    finally:
        spark.sql("drop table farandole_rows")


@pytest.mark.slow
def test_statistics_and_loaders_of_a_frame_are_made_on_executors(spark, tmp_path):
    rows = (
        spark.range(100).selectExpr("id", "id / 2 as x", "cast(id % 3 as string) as kind").cache()
    )
    counted = statistics_of(rows)
    assert counted == statistics_of(rows.toPandas())
    drifted = counted.drift(rows.where("id > 50"))
    assert drifted["id"].index > 1
    assert drifted["kind"].index < 0.1
    other = spark.sql(
        "select current_timestamp() as at, array(1, 2) as tokens, true as flag, binary('x') as blob"
    )
    assert [one.kind for one in statistics_of(other).columns.values()] == [
        "number",
        "list",
        "value",
        "other",
    ]
    loader = frame_loader(rows, 30, ["id", "x"], cache=tmp_path / "cache")
    again = pickle.loads(pickle.dumps(loader))
    assert sorted(row for batch in again for row in batch["id"].tolist()) == list(range(100))
    with pytest.raises(ValueError, match="the frame has no column 'age': id, x, kind"):
        frame_loader(rows, 30, ["age"], cache=tmp_path / "cache")
    del loader
    assert not list((tmp_path / "cache").iterdir())
    lists = rows.selectExpr(
        "id", "kind", "slice(array(id, 1, 2, 3), 1, cast(id % 5 as int)) as tokens"
    )
    loader = frame_loader(
        lists, 30, cache=tmp_path / "cache", ragged={"tokens": Pad(-1, buckets=2)}, shuffle=False
    )
    found = {
        key: values
        for batch in loader
        for key, values in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True)
    }
    assert found == {key: ([key, 1, 2, 3][: key % 5] + [-1] * 4)[:4] for key in range(100)}
