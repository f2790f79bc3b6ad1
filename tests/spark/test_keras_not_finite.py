# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loss of Keras that is NaN or infinite ends training, whatever backend runs ahead of its
callbacks.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
from tests.single.training import Here, write

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.common.runs.finite_loss import NotFiniteError
from farandole.spark.keras import KerasEstimator

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def fitting(tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    write(tmp_path / "intermediate_train_data", x=x, y=x[:, 0])

    def made(**params):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(
            optimizer=keras.optimizers.SGD(params.pop("rate", 1e30)), loss=params.pop("lost", "mse")
        )
        known = {
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "batch_size": 8,
            "verbose": 0,
            "random_seed": 1,
        }
        store = LocalStore(str(tmp_path))
        return KerasEstimator(
            **{"model": model, "epochs": 2, "store": store, "backend": Here()} | known | params
        )

    return made


@pytest.mark.backends
def test_a_loss_that_runs_away_ends_the_run(fitting, tmp_path):
    with pytest.raises(
        NotFiniteError,
        match=r"the loss is (infinite|not a number \(NaN\)) in epoch 1, step 2, on rank 0",
    ):
        fitting(run_id="r").fit_on_parquet()
    assert not (tmp_path / "runs/r/checkpoint").exists()


def test_terminate_on_nan_false_and_keras_own_callback_do_as_they_did(fitting):
    assert len(fitting(terminate_on_nan=False).fit_on_parquet().getHistory()["loss"]) == 2
    ended = fitting(callbacks=[keras.callbacks.TerminateOnNaN()]).fit_on_parquet()
    assert len(ended.getHistory()["loss"]) == 1


def test_all_ranks_end_together_and_the_one_that_met_it_is_named(fitting):
    def on_rank_1(label, output):
        import os

        import keras

        return keras.ops.mean((output - label) ** 2) * (
            float("nan") if os.environ.get("RANK") == "1" else 1.0
        )

    began = time.monotonic()
    with pytest.raises(FarandoleJobError) as failed:
        fitting(
            lost=on_rank_1, rate=0.01, backend=LocalBackend(2, verbose=0), on_failure="restart"
        ).fit_on_parquet()
    assert failed.value.rank == 1
    assert "NaN) in epoch 1, step 1, on rank 1" in str(failed.value.__cause__)
    assert time.monotonic() - began < 120, (
        "a run that would fail again is not started again, and no rank waits"
    )
