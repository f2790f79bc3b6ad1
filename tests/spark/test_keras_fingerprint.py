# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Changes of a Keras model that begin a new run."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from tests.single.training import Here, write

from farandole.spark.common import LocalStore
from farandole.spark.common.runs.fingerprint import Fingerprint
from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
from farandole.spark.keras import KerasEstimator
from farandole.spark.keras.fingerprint_parts import model_parts

pytestmark = pytest.mark.timeout(300)


def model(units=3, rate=0.1, loss="mse"):
    made = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(units),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    made.compile(optimizer=keras.optimizers.SGD(rate), loss=loss)
    return made


def test_a_model_counts_whatever_names_keras_gives_it():
    def made(**options):
        return Fingerprint(tuple(model_parts(model(**options), None, None)))

    keras.utils.set_random_seed(1)
    first = made()
    assert not first.differences_to(made())
    assert first.has_other_initial_weights(made())
    assert [one.name for one in first.differences_to(made(units=4))] == ["model"]
    assert [str(one) for one in first.differences_to(made(rate=0.25, loss="mae"))] == [
        "optimizer was SGD(learning_rate=0.1) and is SGD(learning_rate=0.25)",
        "loss was 'mse' and is 'mae'",
    ]


LAYER = """
import keras
def metric(label, output):
    return {metric}
class Scaled(keras.layers.Layer):
    def call(self, x):
        return {call}
class Loss(keras.losses.Loss):
    def call(self, label, output):
        return {loss}
"""


def test_the_code_of_the_users_layers_and_losses_counts_and_that_of_metrics_does_not():
    usual = {"metric": "label", "call": "x * 2", "loss": "keras.ops.mean((label - output) ** 2)"}

    def fingerprint_of_layer(**changed):
        known = {"__name__": "users"}
        exec(LAYER.format(**usual | changed), known)
        made = keras.Sequential([keras.Input((2,)), known["Scaled"](), keras.layers.Dense(1)])
        made.compile(loss=known["Loss"](), metrics=[known["metric"]])
        return Fingerprint(tuple(model_parts(made, None, None)))

    def differ(**changed):
        return {
            one.name
            for one in fingerprint_of_layer().differences_to(fingerprint_of_layer(**changed))
        }

    assert not differ()
    assert not differ(metric="label * 2")
    assert differ(call="x * 3") == {"model"}
    assert "loss" in differ(loss="keras.ops.mean(label - output)")


def test_a_run_continues_with_its_model_and_no_other(tmp_path):
    x = np.random.default_rng(0).normal(size=(32, 2)).astype(np.float32)
    write(tmp_path / "intermediate_train_data", x=x, y=x[:, 0])

    def fit(made, epochs, **params):
        known = {
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "verbose": 0,
            "random_seed": 1,
        }
        store = LocalStore(str(tmp_path))
        estimator = KerasEstimator(
            model=made, run_id="r", epochs=epochs, store=store, backend=Here(), **known | params
        )
        return estimator.fit_on_parquet()

    fit(model(), 1)
    logs = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    assert len(fit(model(), 2, callbacks=[logs]).getHistory()["loss"]) == 2
    with pytest.raises(RunDiffersError, match=r"loss was 'mse' and is 'mae'"):
        fit(model(loss="mae"), 3)
    stops = keras.callbacks.EarlyStopping("loss", patience=3)
    with pytest.raises(RunDiffersError, match=r"callbacks was None and is \[EarlyStopping\]"):
        fit(model(), 3, callbacks=[stops])
