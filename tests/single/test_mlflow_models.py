# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A model that a fit has logged to MLflow loads, and predicts the same, in a process that has no
Farandole.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.programs import program_path
from tests.single.training import Here, estimator, line, linear, write

from farandole.spark.common import LocalStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOADING = program_path(__file__, "predict_without_farandole")


def torch_model(directory):
    fitted = estimator(directory, linear(), epochs=1, mlflow=True, run_id="logged").fit_on_parquet()
    return fitted.getModel(), lambda network, rows: network(torch_of(rows)).detach().numpy()


def torch_of(rows):
    import torch

    return torch.from_numpy(rows)


def keras_model(directory):
    import keras

    from farandole.spark.keras import KerasEstimator

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)]
    )
    fitted = KerasEstimator(
        model=model, optimizer=keras.optimizers.SGD(0.05), loss="mse", feature_cols=["x"],
        label_cols=["y"],
        batch_size=8, epochs=1, verbose=0, random_seed=1, store=LocalStore(str(directory)),
        backend=Here(),
        mlflow=True, run_id="logged",
    ).fit_on_parquet()  # fmt: skip
    return fitted.getModel(), lambda network, rows: keras.ops.convert_to_numpy(network(rows))


@pytest.mark.parametrize(("flavor", "fit"), [("pytorch", torch_model), ("keras", keras_model)])
def test_a_logged_model_predicts_the_same_without_farandole(mlflow, tmp_path, flavor, fit):
    pytest.importorskip(f"mlflow.{flavor}")
    x, y = line()
    write(tmp_path / "data" / "intermediate_train_data", x=x, y=y)
    network, predict = fit(tmp_path / "data")
    (model,) = mlflow.search_logged_models(output_format="list")
    rows, found = tmp_path / "rows.npy", tmp_path / "found.npy"
    np.save(rows, x[:5])
    command = [sys.executable, LOADING, flavor, model.artifact_location, str(rows), str(found)]
    # torch imports the backends of all packages that are installed, so Farandole's too
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(found), predict(network, x[:5]), rtol=1e-6)
