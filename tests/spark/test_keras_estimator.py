# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras in the estimator: what two processes learn, what comes back, what is kept."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from dataclasses import replace
from pathlib import Path

import cloudpickle
import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from farandole.common import pickling
from farandole.keras import Compression
from farandole.keras.callbacks import BestModelCheckpoint, LearningRateWarmupCallback
from farandole.spark import task
from farandole.spark.common import Backend, LocalBackend, LocalStore
from farandole.spark.common.datamodule import NVTabularDataModule, ParquetDataModule
from farandole.spark.keras import KerasEstimator
from farandole.spark.keras.predict import KerasPredictor
from farandole.spark.keras.remote import train_rank
from farandole.spark.keras.saving import model_bytes
from farandole.spark.keras.training.learning_rate import ScaledLearningRate

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Here(Backend):
    """Trains in this process. As Horovod's it takes no `on_progress`."""

    def run(self, fn, args=(), kwargs=None, env=None):
        assert env["KERAS_BACKEND"] == keras.backend.backend()
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


class Told(Exception):
    """Carries what a training process would have been told."""

    def __init__(self, job):
        self.job = job


class Tells(Here):
    """Trains nothing."""

    def run(self, _, args=(), **__):
        raise Told(args[0])


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    # TensorFlow runs in this process already: the number of its threads is what it is.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows_of(count, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 3)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    return pd.DataFrame(
        {"x": list(x), "a": x[:, 0], "b": x[:, 1], "y": y, "w": random.uniform(0, 2, count)}
    )


def store_of(directory, train_rows, val_rows=None):
    for name, rows in (("train", train_rows), ("val", val_rows)):
        if rows is not None:
            (directory / name).mkdir(parents=True)
            rows.to_parquet(directory / name / "part.parquet")
    return LocalStore(
        str(directory), train_path=str(directory / "train"), val_path=str(directory / "val")
    )


def dense(units, activation=None):
    """A layer of known weights; `keras.utils.set_random_seed` would import every backend there
    is.
    """
    return keras.layers.Dense(
        units, activation, kernel_initializer=keras.initializers.GlorotUniform(units)
    )


def network():
    return keras.Sequential([keras.Input((3,)), dense(4, "tanh"), dense(1, "sigmoid")])


def estimator(store, model=None, **params):
    known = {
        "backend": Here(),
        "model": network() if model is None else model,
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "binary_crossentropy",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "random_seed": 3,
        "verbose": 0,
        "store": store,
    }
    return KerasEstimator(**known | params)


def job_of(estimator):
    with pytest.raises(Told) as told:
        estimator.setBackend(Tells()).fit_on_parquet()
    job = told.value.job
    # The job runs after this fit has released its lease.
    return replace(job, store=replace(job.store, lease_name=None))


def scenarios(names, directory, batch_size, rate):
    """The same runs for one process and for two."""
    odd, few = rows_of(101), rows_of(17)
    val = rows_of(45, seed=1)
    metrics = [keras.metrics.AUC(20, name="auc"), "accuracy"]
    decay = keras.optimizers.schedules.ExponentialDecay(rate, 5, 0.5)
    deeper = [keras.Input((3,)), dense(4), keras.layers.LayerNormalization(), dense(1, "sigmoid")]
    weighted = network()
    weighted.compile("sgd", "mse", weighted_metrics=["mae"])
    runs = {
        "odd": ((odd, val), {"metrics": metrics}),
        "few": ((few, rows_of(1)), {"metrics": metrics}),
        "weights": ((odd, val), {"model": weighted, "sample_weight_col": "w"}),
        "halves": ((odd, val), {"metrics": metrics, "gradient_compression": Compression.fp16}),
        "accumulated": ((rows_of(96), None), {"backward_passes_per_step": 2}),
        "schedule": ((odd, None), {"optimizer": keras.optimizers.SGD(decay)}),
        "in memory": ((rows_of(96), val), {"inmemory_cache_all": True, "shuffle": False}),
        "longer": ((odd, val), {"train_steps_per_epoch": 10, "validation_steps_per_epoch": 1}),
        "layers": ((odd, val), {"model": keras.Sequential(deeper), "metrics": metrics}),
    }
    jobs = {}
    for name in names:
        (rows, held), params = runs[name]
        store = store_of(directory / name, rows, held)
        known = {
            "optimizer": keras.optimizers.SGD(rate),
            "batch_size": batch_size,
            "val_batch_size": batch_size,
        }
        jobs[name] = job_of(estimator(store, epochs=2, run_id="run", **known | params))
    return jobs


ROWS = ["odd", "few", "weights", "halves"]
LOOPS = ["accumulated", "schedule", "in memory", "longer", "layers"]
NAMES = [pytest.param(ROWS, id="rows"), pytest.param(LOOPS, id="loops", marks=pytest.mark.slow)]
if keras.backend.backend() != "torch":
    NAMES = [
        pytest.param(
            ["odd", "few", "weights", "halves", "accumulated", "schedule", "layers"], id="differing"
        )
    ]


@pytest.mark.backends
@pytest.mark.parametrize("names", NAMES)
def test_two_processes_learn_what_one_learns_and_end_together_with_one_model(tmp_path, names):
    alone = scenarios(names, tmp_path / "one", 16, 0.2)
    shared = scenarios(names, tmp_path / "two", 8, 0.1)
    ending = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), dense(4), dense(1, "sigmoid")]
    )
    store = store_of(tmp_path / "ending", rows_of(64), rows_of(20, seed=1))
    ends = job_of(estimator(store, ending, epochs=5, run_id="run", callbacks=[Leaves(tmp_path)]))
    # Processes take longest to start: one pair does it all.
    together = LocalBackend(2, verbose=0).run(
        lambda jobs: {name: train_rank(job) for name, job in jobs.items()},
        (shared | {"ends": ends},),
    )
    assert together[1] == dict.fromkeys(together[0])
    ended_together(ending, together[0].pop("ends"), tmp_path)
    if "halves" in names:
        del alone["halves"]
        # What travelled as halves has lost something, and not much.
        halves, whole = (weights(together[0][name].model) for name in ("halves", "odd"))
        assert (
            0
            < max(np.abs(half - full).max() for half, full in zip(halves, whole, strict=True))
            < 1e-3
        )
    for name, job in alone.items():
        one, two = train_rank(job), together[0][name]
        assert list(one.history) == list(two.history), name
        for score, values in one.history.items():
            # a step of two processes validates on twice the rows
            if (name, score) != ("longer", "val_loss"):
                np.testing.assert_allclose(
                    two.history[score], values, rtol=2e-5, atol=1e-6, err_msg=f"{name} {score}"
                )
        for left, right in zip(weights(two.model), weights(one.model), strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-6, err_msg=name)
        assert rate(two.model) == pytest.approx(rate(one.model) / 2)


class Leaves(keras.callbacks.Callback):
    """The second rank has enough after two epochs; each leaves its weights behind."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
        if epoch == 1 and os.environ["RANK"] == "1":
            self.model.stop_training = True

    def on_train_end(self, logs=None):  # noqa: ARG002
        np.savez(f"{self.folder}/{os.environ['RANK']}.npz", *self.model.get_weights())


def ended_together(model, trained, folder):
    """Checks what two ranks left that one of them ended."""
    assert len(trained.history["loss"]) == 2
    first, second = (list(np.load(folder / f"{rank}.npz").values()) for rank in (0, 1))
    for mine, theirs, returned, untrained in zip(
        first, second, weights(trained.model), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)  # with the moving mean and variance
        np.testing.assert_array_equal(mine, returned)
        assert not np.array_equal(mine, untrained)


def weights(model):
    return model_bytes.unpack_model(model).get_weights()


def rate(model):
    optimizer = model_bytes.unpack_model(model).optimizer
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


@pytest.mark.backends
def test_one_process_gives_the_history_of_keras_own_fit(tmp_path):
    rows, held = rows_of(50), rows_of(37, seed=1)
    x, y = np.stack(rows.x), rows.y.to_numpy()
    model = network()
    fitted = estimator(
        store_of(tmp_path, rows, held),
        model,
        shuffle=False,
        epochs=2,
        metrics=["accuracy"],
        batch_size=10,
    ).fit_on_parquet()
    own = network()
    own.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    told = own.fit(
        x,
        y[:, None],
        10,
        2,
        verbose=0,
        shuffle=False,
        validation_data=(np.stack(held.x), held.y.to_numpy()[:, None]),
    )
    assert list(fitted.getHistory()) == list(told.history)
    for name, values in told.history.items():
        np.testing.assert_allclose(fitted.getHistory()[name], values, rtol=1e-5, err_msg=name)
    assert list(fitted.history_frame().columns) == ["epoch", *told.history]
    untouched = network().get_weights()
    for left, right in zip(model.get_weights(), untouched, strict=True):
        np.testing.assert_array_equal(left, right)  # the user's own model is left alone


@pytest.mark.slow
@pytest.mark.backends
def test_a_rank_reports_its_wait_for_data_only_where_keras_reads_rows_before_a_step(tmp_path):
    store = store_of(tmp_path, rows_of(64))
    estimator(store, backend=LocalBackend(1, verbose=0), run_id="r").fit_on_parquet()
    (told,) = json.loads((tmp_path / "runs/r/_record.json").read_text())["ranks"]
    assert told["step_seconds"] > 0
    assert ("data_seconds" in told) == (keras.backend.backend() == "torch")
    assert "reduce_seconds" not in told


@pytest.mark.backends
def test_a_compiled_model_needs_nothing_else_and_keeps_its_optimizers_state(tmp_path):
    rows = rows_of(32)
    model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(np.stack(rows.x), rows.y.to_numpy()[:, None], 16, 3, verbose=0)
    fitted = estimator(store_of(tmp_path, rows), model, optimizer=None, loss=None).fit_on_parquet()
    assert list(fitted.getHistory()) == ["loss", "mae"]
    assert int(fitted.getModel().optimizer.iterations) == int(model.optimizer.iterations) + 2
    assert isinstance(fitted.getModel().optimizer, keras.optimizers.Adam)


@pytest.mark.backends
def test_a_run_is_resumed_by_its_id_with_the_same_learning_rate(tmp_path):
    rows, held = rows_of(40), rows_of(20, seed=1)
    whole = estimator(
        store_of(tmp_path / "whole", rows, held), epochs=4, run_id="r"
    ).fit_on_parquet()
    store = store_of(tmp_path / "parts", rows, held)
    first = estimator(store, epochs=2, run_id="r").fit_on_parquet()
    assert len(first.getHistory()["loss"]) == 2
    second = estimator(store, epochs=4, run_id="r").fit_on_parquet()
    for name, values in whole.getHistory().items():
        np.testing.assert_allclose(second.getHistory()[name], values, rtol=1e-5)
    for left, right in zip(
        second.getModel().get_weights(), whole.getModel().get_weights(), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert float(second.getModel().optimizer.learning_rate) == pytest.approx(0.1)
    again = estimator(store, epochs=4, run_id="r").fit_on_parquet()
    assert again.getHistory() == second.getHistory()
    wider = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="checkpoint of run 'r' belongs to another model"):
        estimator(store, wider, epochs=9, run_id="r", resume="force").fit_on_parquet()


@pytest.mark.backends
def test_the_best_model_is_returned_and_the_last_one_resumed(tmp_path):
    class Worsens(keras.callbacks.Callback):
        """Leaves nothing of the model after the first epoch."""

        def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002
            if epoch == 1:
                self.model.set_weights([weight * 0 - 5 for weight in self.model.get_weights()])

    store = store_of(tmp_path, rows_of(64), rows_of(20, seed=1))
    params = {"run_id": "r", "checkpoint_callback": BestModelCheckpoint(monitor="val_loss")}
    fitted = estimator(store, epochs=3, callbacks=[Worsens()], **params).fit_on_parquet()
    losses = fitted.getHistory()["val_loss"]
    assert min(losses) == losses[0] < losses[2]
    held = rows_of(20, seed=1)
    found = fitted.getModel().evaluate(np.stack(held.x), held.y.to_numpy()[:, None], verbose=0)
    assert found == pytest.approx(losses[0], rel=1e-5)
    assert store.exists(f"{store.get_run_path('r')}/checkpoint.best")
    resumed = estimator(store, epochs=4, resume="force", **params).fit_on_parquet()
    assert len(resumed.getHistory()["loss"]) == 4
    assert resumed.getHistory()["val_loss"][3] > losses[0]
    for left, right in zip(
        resumed.getModel().get_weights(), fitted.getModel().get_weights(), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.backends
def test_callbacks_see_scores_and_end_the_run(tmp_path):
    seen = tmp_path / "seen"

    class Notes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open(seen, "a") as file:
                file.write(f"{epoch} {sorted(logs)}\n")

    store = store_of(tmp_path / "store", rows_of(64), rows_of(20, seed=1))
    stopping = keras.callbacks.EarlyStopping(
        monitor="val_loss", patience=1, min_delta=10.0, restore_best_weights=True
    )
    fitted = estimator(
        store,
        epochs=9,
        run_id="r",
        callbacks=[stopping, Notes(), LearningRateWarmupCallback(0.1, 1)],
    ).fit_on_parquet()
    assert len(fitted.getHistory()["loss"]) == 2
    assert seen.read_text().splitlines()[0] == "0 ['loss', 'val_loss']"
    assert fitted.getHistory()["lr"][-1] == pytest.approx(0.1)
    events = store.read(f"{store.get_run_path('r')}/logs/events.out.tfevents.farandole")
    assert b"train/loss" in events
    assert b"val/loss" in events
    assert store.read(f"{store.get_run_path('r')}/logs/history.jsonl").count(b"\n") == 2


def test_a_function_of_nothing_gives_the_rate_as_a_schedule_does():
    optimizer = keras.optimizers.SGD(lambda: 0.25)
    rate = ScaledLearningRate(optimizer, 1)
    rate.rescale_for_world(1, 2)
    assert float(optimizer.learning_rate) == 0.5
    with rate.single_process_rate():
        assert float(optimizer.learning_rate) == 0.25
    assert float(optimizer.learning_rate) == 0.5


class Board(keras.callbacks.TensorBoard):
    """Writes its epochs without TensorBoard's package."""

    def set_model(self, model):
        self._model = model

    def on_train_batch_begin(self, batch, logs=None):
        pass

    on_train_batch_end = on_train_begin = on_train_end = on_epoch_begin = on_test_begin = (
        on_train_batch_begin
    )

    def on_epoch_end(self, epoch, logs=None):
        (Path(self.log_dir) / "train").mkdir(parents=True, exist_ok=True)
        (Path(self.log_dir) / "train" / f"events.{epoch}").write_text(str(sorted(logs)))


def test_a_tensorboard_callback_writes_into_the_store(tmp_path):
    store = store_of(tmp_path / "store", rows_of(32))
    estimator(
        store, run_id="r", epochs=2, callbacks=[Board(tmp_path / "elsewhere")]
    ).fit_on_parquet()
    logs = store.get_logs_path("r")
    assert [store.read(f"{logs}/train/events.{epoch}") for epoch in (0, 1)] == [b"['loss']"] * 2
    assert not (tmp_path / "elsewhere").exists()


@keras.saving.register_keras_serializable("mine")
class Doubled(keras.layers.Layer):
    """A class that workers do not have."""

    def call(self, x):
        return x * halved(4.0)


def halved(value):
    return value / 2


def squares(y, output):
    return keras.ops.mean(keras.ops.square(y - output), axis=-1)


def test_classes_and_functions_of_ones_own_travel_without_being_listed(tmp_path):
    model = keras.Sequential(
        [keras.Input((3,)), Doubled(), keras.layers.Dense(1, activation=squashed)]
    )
    fitted = estimator(
        store_of(tmp_path, rows_of(32)), model, loss=squares, metrics=[squares]
    ).fit_on_parquet()
    assert list(fitted.getHistory()) == ["loss", "squares"]
    assert fitted.getHistory()["squares"] == pytest.approx(fitted.getHistory()["loss"])
    assert fitted.getCustomObjects()["Doubled"] is Doubled


def squashed(x):
    return keras.ops.sigmoid(x)


def test_a_loss_keeps_what_keras_does_not_save_of_it(tmp_path):
    rows = rows_of(16)
    fitted = estimator(
        store_of(tmp_path, rows), loss=keras.losses.Huber(0.1), loss_weights=[1.0]
    ).fit_on_parquet()
    expected = keras.losses.Huber(0.1)(rows.y.to_numpy()[:, None], network()(np.stack(rows.x)))
    assert fitted.getHistory()["loss"][0] == pytest.approx(float(expected), rel=1e-5)


def test_several_inputs_and_labels_by_order_and_by_name(tmp_path):
    left, right = keras.Input((2,), name="left"), keras.Input((), name="a")
    joined = keras.layers.Concatenate()([left, keras.layers.Reshape((1,))(right)])
    outputs = {
        "y": keras.layers.Dense(1, activation="sigmoid", name="of_y")(joined),
        "x": keras.layers.Dense(3, name="of_x")(joined),
    }
    model = keras.Model({"left": left, "a": right}, outputs)
    by_name = estimator(
        store_of(tmp_path, rows_of(32), rows_of(9)),
        model,
        feature_cols=["a", ["b", "w"]],  # inputs go by the order of their names: a, left
        label_cols=["x", "y"],
        loss={"x": "mse", "y": "binary_crossentropy"},
    )
    assert by_name.fit_on_parquet().getHistory()["loss"]
    with pytest.raises(ValueError, match="model input at index 0"):
        by_name.setFeatureCols([["b", "w"], "a"]).fit_on_parquet()
    by_order = by_name.setModel(keras.Model([left, right], [outputs["x"], outputs["y"]]))
    by_order.setLoss(["mse", "binary_crossentropy"]).setLossWeights([0.5, 2.0])
    history = by_order.fit_on_parquet().getHistory()
    total = 0.5 * history["of_x_loss"][0] + 2.0 * history["of_y_loss"][0]
    assert history["loss"][0] == pytest.approx(total, rel=1e-5)


@pytest.mark.backends
def test_mixed_precision_keeps_its_loss_scale(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        store = store_of(tmp_path, rows_of(64))
        model = network()
        first = estimator(store, model, epochs=1, run_id="r").fit_on_parquet().getModel().optimizer
        assert isinstance(first, keras.optimizers.LossScaleOptimizer)
        fitted = estimator(store, model, epochs=2, run_id="r").fit_on_parquet()
    finally:
        keras.config.set_dtype_policy("float32")
    assert fitted.getHistory()["loss"][1] < fitted.getHistory()["loss"][0]
    assert int(fitted.getModel().optimizer.step_counter) == 8
    assert float(fitted.getModel().optimizer.learning_rate) == pytest.approx(0.1)


def test_a_warm_up_from_the_rate_of_one_process_is_no_part_of_global_batches(tmp_path):
    warmup = LearningRateWarmupCallback(0.1, warmup_epochs=2)
    options = {"global_batch_size": 16, "callbacks": [warmup]}
    fit = estimator(store_of(tmp_path, rows_of(32)), **options)
    fit.clear(fit.getParam("batch_size"))
    with pytest.raises(ValueError, match="with LearningRateWarmupCallback, which begins"):
        fit.fit_on_parquet()


def test_rows_are_transformed_before_the_model_sees_them(tmp_path):
    def wider(row):
        return {**row, "x": np.concatenate([row["x"], [row["a"]]]).astype(np.float32)}

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    params = {"feature_cols": ["x"], "sample_weight_col": "w", "transformation_fn": wider}
    store = store_of(tmp_path, rows_of(32))
    with pytest.raises(ValueError, match="'x' with size 3"):
        estimator(store, model, **params | {"transformation_fn": None}).fit_on_parquet()
    with pytest.raises(KeyError, match="'a'"):
        estimator(store, model, **params).fit_on_parquet()  # only columns that are used are read
    fitted = estimator(store, model, transformation_fn=lambda row: wider({**row, "a": row["w"]}),
                       feature_cols=["x"], sample_weight_col="w").fit_on_parquet()  # fmt: skip
    assert len(fitted.getHistory()["loss"]) == 1


class Dies(keras.callbacks.Callback):
    """Takes the second rank along in the third epoch, once."""

    def __init__(self, marker):
        super().__init__()
        self.marker = str(marker)

    def on_epoch_begin(self, epoch, logs=None):  # noqa: ARG002
        if epoch == 2 and os.environ["RANK"] == "1" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_costs_the_epochs_after_its_checkpoint(tmp_path, capfd):
    store = store_of(tmp_path / "store", rows_of(64))
    params = {
        "epochs": 4,
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "backend": LocalBackend(2, verbose=0),
    }
    whole = estimator(store, run_id="whole", **params).fit_on_parquet()
    again = estimator(
        store,
        run_id="again",
        callbacks=[Dies(tmp_path / "killed")],
        on_failure="restart",
        **params | {"verbose": 1},
    ).fit_on_parquet()
    assert (tmp_path / "killed").exists()
    assert "starting again from the last checkpoint, restarts left: 2" in capfd.readouterr().err
    np.testing.assert_allclose(again.getHistory()["loss"], whole.getHistory()["loss"], rtol=1e-5)
    for left, right in zip(
        again.getModel().get_weights(), whole.getModel().get_weights(), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5)


class Ones(ParquetDataModule):
    """Labels that are all 1, whatever the data says."""

    def train_data(self):
        while True:
            for batch in super().train_data():
                yield batch["x"], np.ones((len(batch["x"]), 1), np.float32)

    def val_data(self):
        return self.train_data()


def test_a_data_module_of_ones_own_gives_the_batches(tmp_path):
    store = store_of(tmp_path, rows_of(64), rows_of(32, seed=1))
    history = (
        estimator(store, epochs=20, data_module=Ones, metrics=["accuracy"])
        .fit_on_parquet()
        .getHistory()
    )
    assert history["val_accuracy"][-1] > 0.9
    with pytest.raises(NotImplementedError, match="NVTabular has been retired"):
        estimator(store, data_module=NVTabularDataModule).fit_on_parquet()


@pytest.mark.backends
def test_batches_that_are_prepared_ahead_are_the_same_ones(tmp_path):
    store = store_of(tmp_path, rows_of(50), rows_of(20, seed=1))
    params = {"epochs": 3, "sample_weight_col": "w"}
    ahead, plain = (
        estimator(store, tensorflow_dataset_prefetch_buffer_size=count, **params).fit_on_parquet()
        for count in (2, 0)
    )
    assert ahead.getHistory() == plain.getHistory()
    for left, right in zip(
        ahead.getModel().get_weights(), plain.getModel().get_weights(), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_mlflow_gets_metrics_and_the_model(tmp_path, monkeypatch):
    told = []
    fake, flavor = types.ModuleType("mlflow"), types.ModuleType("mlflow.keras")
    started = types.SimpleNamespace(info=types.SimpleNamespace(run_id="a run"))
    fake.active_run = lambda: started if told else None
    for name in ("start_run", "log_params", "log_metrics", "end_run"):
        setattr(fake, name, lambda *args, _name=name, **kwargs: told.append((_name, args, kwargs)))
    flavor.log_model = lambda model, name=None: told.append(("log_model", (model,), {"name": name}))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.keras", flavor)

    class Telling(Here):
        def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
            monkeypatch.setattr(task, "report", lambda record: on_progress(0, record))
            return super().run(fn, args, kwargs, env)

    store = store_of(tmp_path, rows_of(32))
    fitted = estimator(
        store, epochs=2, mlflow=True, run_id="named", backend=Telling()
    ).fit_on_parquet()
    expected = ["start_run", "log_params", "log_metrics", "log_metrics", "log_model", "end_run"]
    assert [name for name, *_ in told] == expected
    assert told[0][2] == {"run_name": "named"}
    assert told[1][1][0]["batch_size"] == "16"
    assert [one[1][0]["loss"] for one in told[2:4]] == pytest.approx(fitted.getHistory()["loss"])
    assert told[4][1][0] is fitted.getModel()
    assert told[-1][2] == {"status": "FINISHED"}


@pytest.mark.backends
def test_predictions_are_as_exact_as_the_model():
    x = keras.Input((1,), dtype="float64")
    whole = keras.ops.cast(x * 3, "int32") + (2**24 + 1)  # no float32 holds it
    model = keras.Model(x, [keras.layers.Rescaling(1 / 3, dtype="float64")(x), whole])
    predictor = KerasPredictor(
        model=model_bytes.pack_model(model),
        custom_objects=pickling.pickle_by_value({}),
        backend=keras.backend.backend(),
        columns=("x",),
        groups=(("x",),),
        labels=("third", "whole"),
        kinds=("float64", "int64"),
        batch_size=4096,
    )
    batch = pa.RecordBatch.from_pydict({"x": [1.0, 2.0**-30 + 5.0]})
    [found] = predictor.predict_batches(iter([batch]))
    for index, expected in enumerate(model(np.array([[1.0], [2.0**-30 + 5.0]]))):
        np.testing.assert_array_equal(
            found[f"output{index}"], keras.ops.convert_to_numpy(expected)[:, 0]
        )


def test_nulls_are_filled_and_the_history_is_drawn(tmp_path):
    rows = rows_of(32).astype({"a": object})
    rows.loc[3, "a"] = None
    table = rows[["a", "b", "y"]].astype({"a": "Float32"})
    params = {
        "feature_cols": [["a", "b"]],
        "model": keras.Sequential([keras.Input((2,)), dense(1, "sigmoid")]),
    }
    with pytest.raises(ValueError, match="column a has nulls in 1 of 32 rows"):
        estimator(LocalStore(str(tmp_path)), **params).fit(table)
    fitted = estimator(LocalStore(str(tmp_path)), fill=0.5, validation=0.3, epochs=2, **params).fit(
        table
    )
    assert fitted.getFill() == 0.5
    fitted.plot_history("loss").save(f"{tmp_path}/history.svg")
    assert (tmp_path / "history.svg").read_text().count("<polyline") == 2
