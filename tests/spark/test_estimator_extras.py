# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Slow parts of the estimator: compiled models, MLflow itself, and frames larger than a driver's
memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
from pyspark.sql import functions as sf
from tests.single.training import estimator, fit, line, linear, weights, write

from farandole.spark.common import LocalBackend, LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def test_a_compiled_model_learns_what_an_eager_one_does(data):
    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    backend = LocalBackend(2, verbose=0, start_timeout=120)
    compiled, eager = (
        fit(data, network(), compile=one, epochs=3, backend=backend) for one in (True, False)
    )
    assert torch.allclose(weights(compiled), weights(eager), atol=1e-5)
    assert type(compiled.getModel()) is torch.nn.Sequential
    x, _ = line()
    assert compiled.getModel()(torch.from_numpy(x)).shape == (96, 1)


def test_a_compiled_module_of_lightning_learns_what_an_eager_one_does(data):
    from farandole.spark.lightning import TorchEstimator as LightningEstimator

    def fitted(compiled):
        model = linear()
        return LightningEstimator(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            loss=torch.nn.MSELoss(),
            feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=3, verbose=0, random_seed=1,
            compile=compiled,
            store=LocalStore(str(data)), backend=LocalBackend(2, verbose=0, start_timeout=120),
        ).fit_on_parquet()  # fmt: skip

    compiled, eager = fitted(True), fitted(False)
    assert torch.allclose(weights(compiled), weights(eager), atol=1e-5)
    assert type(compiled.getModel()) is torch.nn.Linear


def test_mlflow_itself_has_the_run_its_metrics_and_a_model_that_predicts(data, mlflow):
    from mlflow.pytorch import load_model

    fitted = estimator(
        data, linear(), epochs=3, mlflow=True, run_id="told", backend=LocalBackend(1, verbose=0)
    ).fit_on_parquet()
    runs = mlflow.search_runs(output_format="list")
    assert [run.info.run_name for run in runs] == ["told"]
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.params["batch_size"] == "8"
    client = mlflow.MlflowClient()
    # A metric that a model is linked to may be listed once more.
    told = {one.step: one.value for one in client.get_metric_history(runs[0].info.run_id, "loss")}
    assert told == pytest.approx(
        {entry["epoch"]: entry["train"]["loss"] for entry in fitted.getHistory()}
    )
    logged = client.search_logged_models([runs[0].info.experiment_id])
    model = load_model(logged[0].model_uri)
    assert torch.equal(model.weight, fitted.getModel().weight)


def check_logged(mlflow, dtype, width):
    """The only logged model has a signature and an example, from which it predicts; what it
    predicts.
    """
    client = mlflow.MlflowClient()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED"
    (logged,) = client.search_logged_models([run.info.experiment_id])
    signature = mlflow.models.get_model_info(logged.model_uri).signature
    (given,), (made,) = signature.inputs.inputs, signature.outputs.inputs
    assert (given.type, tuple(given.shape)) == (dtype, (-1, width))
    assert (made.type, tuple(made.shape)) == ("float32", (-1, 1))
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    return loaded.predict(loaded.input_example)


@pytest.mark.parametrize("plain", [True, False], ids=["a plain module", "a LightningModule"])
def test_mlflow_has_the_signature_of_a_model_of_lightning(data, mlflow, plain):
    import lightning

    from farandole.spark.lightning import TorchEstimator as LightningEstimator

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, _index):
            return torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    model = linear() if plain else Module()
    more = (
        {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "loss": torch.nn.MSELoss()}
        if plain
        else {}
    )
    LightningEstimator(
        model=model, feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=1, verbose=0,
        mlflow=True,
        store=LocalStore(str(data)), backend=LocalBackend(1, verbose=0), **more,
    ).fit_on_parquet()  # fmt: skip
    assert check_logged(mlflow, "float32", 2).shape == (2, 1)


def test_mlflow_has_the_signature_of_a_model_of_keras(data, mlflow):
    import keras

    from farandole.spark.keras import KerasEstimator

    KerasEstimator(
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.05),
        loss="mean_squared_error", feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=1,
        verbose=0,
        mlflow=True, tensorboard=True, run_id="r", store=LocalStore(str(data)),
        backend=LocalBackend(1, verbose=0),
    ).fit_on_parquet()  # fmt: skip
    assert check_logged(mlflow, "float32", 2).shape == (2, 1)
    assert b"Total params" in (data / "runs/r/logs/events.out.tfevents.details").read_bytes()


def test_tensorboard_itself_reads_the_scalars_of_a_run(data):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    backend = LocalBackend(1, verbose=0)  # which reports

    def slowly(row):  # a fit shorter than 0.2 s reports no step
        time.sleep(0.005)
        return row

    fitted = fit(
        data, linear(), epochs=3, run_id="r", tensorboard=True, batch_size=1, backend=backend,
        transformation_fn=slowly,
    )  # fmt: skip
    logs = data / "runs" / "r" / "logs"
    assert board.EventAccumulator(str(logs / "steps")).Reload().Tensors("step/loss")
    found = board.EventAccumulator(str(logs))
    found.Reload()
    assert {"model", "_hparams_/session_start_info"} <= set(found.Tags()["tensors"])
    losses = [(one.step, one.value) for one in found.Scalars("train/loss")]
    assert losses == [
        (entry["epoch"] + 1, pytest.approx(entry["train"]["loss"], rel=1e-6))
        for entry in fitted.getHistory()
    ]


def resident():
    """MiB that this process holds."""
    return (
        int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / (1 << 20)
    )


class Watch(threading.Thread):
    """Notes the most memory that this process holds while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0.0
        self._over = threading.Event()

    def run(self):
        while not self._over.wait(0.05):
            self.most = max(self.most, resident())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()


def test_a_drivers_memory_does_not_grow_with_the_rows_of_a_frame(spark, tmp_path):
    def fitted(rows):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        numbers = [sf.rand(index).cast("float").alias(f"x{index}") for index in range(4)]
        frame = spark.range(0, rows, 1, 16).select(*numbers, sf.col("id").cast("float").alias("y"))
        made = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
            loss=torch.nn.MSELoss(),
            feature_cols=[[f"x{index}" for index in range(4)]],
            label_cols=["y"],
            batch_size=4096,
            epochs=1,
            verbose=0,
            backend=SparkBackend(2, verbose=0),
            store=LocalStore(f"{tmp_path}/{rows}"),
        ).fit(frame)
        return made.getHistory()[0]["rows"]

    assert fitted(50_000) == 50_000
    before = resident()
    with Watch() as watch:
        assert fitted(5_000_000) == 5_000_000  # 100 MB of columns
    assert watch.most - before < 25
