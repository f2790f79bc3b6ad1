# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Options of the torch estimator beyond the plain loop, on Parquet, in this process."""

from __future__ import annotations

import json
import sys
import time
import types

import numpy as np
import pytest
import torch
from tests.single.training import Here, estimator, fit, line, linear, weights, write

import farandole.torch as hvd
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import Backend, LocalBackend, LocalStore
from farandole.spark.common.datamodule import DataModule, NVTabularDataModule
from farandole.spark.common.transform import batched
from farandole.spark.torch.callbacks import Callback
from farandole.spark.torch.saving.state_bytes import unpack_state
from farandole.torch.compress import Int8, PowerSGD, TopK

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(
        tmp_path / "intermediate_train_data",
        x=x,
        y=y,
        c=(y > 0).astype(np.int32),
        w=np.ones(len(y)),
    )
    return tmp_path


def test_columns_listed_together_are_one_input(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", a=x[:, 0].astype(np.float64), b=x[:, 1], y=y)
    fitted = fit(tmp_path, linear(), feature_cols=[["a", "b"]], epochs=60)
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.05)


def test_a_backend_written_for_horovod_knows_of_no_progress_and_trains_all_the_same(data):
    class Theirs(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):  # noqa: ARG002
            return [fn(*args, **(kwargs or {}))]

        def num_processes(self):
            return 1

    assert len(fit(data, linear(), epochs=2, backend=Theirs()).getHistory()) == 2


def test_the_mapping_is_tried_on_rows_of_the_data_and_printed(data, capfd):
    fit(data, linear(), epochs=1, verbose=1, batch_size=48)
    told = capfd.readouterr().err
    assert (
        "the model gets x -> float32 (rows, 2); it returns (rows, 1) with y float32 by MSELoss"
        in told
    )


def test_an_input_of_indices_may_be_whole_numbers(tmp_path):
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Embedding(3, 1)

        def forward(self, index):
            assert index.dtype == torch.int64
            return self.inner(index[:, 0])

    index = np.arange(90, dtype=np.int32) % 3
    write(tmp_path / "intermediate_train_data", i=index, y=(index * 2.0).astype(np.float32))
    model = Embedded()
    fitted = fit(tmp_path, model, feature_cols=["i"], input_dtypes=["int64"], epochs=60)
    assert torch.allclose(weights(fitted), torch.tensor([0.0, 2.0, 4.0]), atol=0.1)


def test_a_transformation_of_rows_changes_what_the_model_sees(data):
    def double(row):
        return {"x": row["x"] * 2, "y": row["y"]}

    @batched
    def double_batch(batch):
        return batch | {"x": batch["x"] * 2}

    expected = torch.tensor([1.0, -1.5, 1.0])
    by_row = fit(data, linear(), transformation_fn=double, epochs=30)
    by_batch = fit(data, linear(), transformation_fn=double_batch, epochs=30)
    assert torch.allclose(weights(by_row), expected, atol=0.05)
    assert torch.equal(weights(by_row), weights(by_batch))


def test_edit_fields_say_what_a_transformation_makes(data):
    def sum_up(row):
        return {"x": [row["x"].sum()], "y": row["y"], "junk": "dropped"}

    one = torch.nn.Linear(1, 1)
    fitted = fit(
        data,
        one,
        transformation_fn=sum_up,
        transformation_edit_fields=[("x", np.float32, (1,), False)],
        transformation_removed_fields=["junk"],
        epochs=1,
    )
    assert fitted.getModel().weight.shape == (1, 1)
    with pytest.raises(
        ValueError, match="transformation_fn returns no columns with these names: x"
    ):
        fit(data, one, transformation_fn=lambda row: {"y": row["y"]}, epochs=1)


def test_a_transformation_makes_numbers_of_words(tmp_path):
    words = np.array(["low", "high", "üblich"], object)[np.arange(90) % 3]
    y = np.array([1.0, 3.0, 2.0], np.float32)[np.arange(90) % 3]
    write(tmp_path / "intermediate_train_data", x=words, y=y)
    one = torch.nn.Linear(1, 1)
    order = {"low": 0.0, "üblich": 1.0, "high": 2.0}

    def ranked(row):
        return row | {"x": np.float32(order[row["x"]])}

    fitted = fit(tmp_path, one, transformation_fn=ranked, epochs=60)
    assert torch.allclose(weights(fitted), torch.tensor([1.0, 1.0]), atol=0.1)
    with pytest.raises(
        ValueError, match="tensors cannot hold strings: a transformation_fn can make numbers of x"
    ):
        fit(tmp_path, one, epochs=1)
    with pytest.raises(ValueError, match="transformation_fn returns column 'x' of"):
        fit(tmp_path, one, transformation_fn=lambda row: row, epochs=1)


def test_a_minibatch_function_with_horovods_arguments_trains_as_the_built_in_one(data):
    def minibatch(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights):
        optimizer.zero_grad()
        outputs = model(*inputs)
        outputs, labels = transform_outputs(outputs, labels)
        loss = loss_fn(outputs, labels, sample_weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    built_in = fit(data, linear(), epochs=3, batch_size=36)  # the last batch is short
    own = fit(data, linear(), epochs=3, batch_size=36, train_minibatch_fn=minibatch)
    assert torch.allclose(weights(own), weights(built_in), atol=1e-6)
    assert [one["train"]["loss"] for one in own.getHistory()] == pytest.approx(
        [one["train"]["loss"] for one in built_in.getHistory()]
    )


def test_a_minibatch_function_that_steps_before_a_batch_gets_its_last_step(data):
    def minibatch(
        model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, index
    ):
        if index > 0 and index % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        return outputs, loss

    built_in = fit(data, linear(), epochs=2, backward_passes_per_step=2)
    own = fit(data, linear(), epochs=2, backward_passes_per_step=2, train_minibatch_fn=minibatch)
    assert torch.allclose(weights(own), weights(built_in), atol=1e-6)


def test_loss_constructors_make_the_losses_in_the_training_process(data):
    def make(model, size):
        assert isinstance(model, torch.nn.Module)
        assert size == 1
        return torch.nn.MSELoss()

    fitted = fit(data, linear(), loss=None, loss_constructors=[make], epochs=2)
    assert torch.equal(weights(fitted), weights(fit(data, linear(), epochs=2)))
    with pytest.raises(ValueError, match="at most one of parameters loss and loss_constructors"):
        fit(data, linear(), loss_constructors=[make])


def test_metrics_of_torchmetrics_are_computed_over_all_rows(data):
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = [
        torchmetrics.classification.MulticlassAccuracy(2, average="micro"),
        torchmetrics.MeanMetric(),
    ]

    class Correct(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("right", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, output, label):
            self.right += (output.argmax(1) == label).sum()

        def compute(self):
            return self.right

    fitted = fit(
        data, linear(2), label_cols=["c"], loss=torch.nn.CrossEntropyLoss(),
        metrics=[metrics[0], Correct()], epochs=3,
        batch_size=36,
    )  # fmt: skip
    last = fitted.getHistory()[-1]["train"]["all_metrics"]
    assert last[0]["MulticlassAccuracy"] == pytest.approx(last[1]["Correct"] / 96)


def test_the_learning_rate_follows_its_scheduler_on_fresh_and_resumed_runs(data):
    def scheduled(model, **params):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.1)
        return fit(data, model, optimizer=optimizer, lr_scheduler=scheduler, **params)

    whole = scheduled(linear(), epochs=4, run_id="whole")
    assert whole.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.001)
    scheduled(linear(), epochs=2, run_id="parts")
    parts = scheduled(linear(), epochs=4, run_id="parts")
    assert torch.allclose(weights(parts), weights(whole), atol=1e-6)
    assert parts.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("kind", ["LinearLR", "LambdaLR", "OneCycleLR"])
def test_a_scheduler_that_is_made_on_the_spot_continues_where_it_was_in_a_resumed_run(
    data, kind, interval
):
    def make(optimizer):
        schedulers = torch.optim.lr_scheduler
        if kind == "LinearLR":
            return schedulers.LinearLR(optimizer, 0.25, total_iters=10)
        if kind == "LambdaLR":
            return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)
        return schedulers.OneCycleLR(optimizer, 0.05, total_steps=50)

    def scheduled(**params):
        torch.manual_seed(0)
        return fit(data, linear(), lr_scheduler=make, lr_scheduler_interval=interval, **params)

    whole = scheduled(epochs=4, run_id="whole")
    scheduled(epochs=2, run_id="parts")
    parts = scheduled(epochs=4, run_id="parts")
    assert parts.getOptimizer().param_groups[0]["lr"] == pytest.approx(
        whole.getOptimizer().param_groups[0]["lr"]
    )
    assert torch.allclose(weights(parts), weights(whole), atol=1e-6)


def test_a_scheduler_may_be_made_on_the_spot_and_step_with_every_batch(data):
    def make(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    fitted = fit(
        data, linear(), lr_scheduler=make, lr_scheduler_interval="step", epochs=1, batch_size=32
    )
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05 / 8)


def test_gradients_are_clipped_to_a_norm(data):
    before = torch.cat([one.detach().reshape(-1) for one in linear().parameters()])
    model = linear()
    fitted = fit(
        data,
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        gradient_clip_norm=0.01,
        max_steps=1,
    )
    assert torch.linalg.vector_norm(weights(fitted) - before).item() == pytest.approx(
        0.01, rel=1e-3
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_the_line(data, precision):
    fitted = fit(data, linear(), precision=precision, epochs=40)
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.2)
    assert fitted.getModel().weight.dtype == torch.float32


def test_a_run_that_becomes_no_better_ends_early(data):
    model = linear()
    still = torch.optim.SGD(model.parameters(), lr=1e-12)
    assert (
        len(
            fit(
                data,
                model,
                optimizer=still,
                early_stopping={"monitor": "loss", "patience": 2, "min_delta": 1e-3},
            ).getHistory()
        )
        == 3
    )
    with pytest.raises(
        ValueError, match="there is no 'val_accuracy' in the history, there is: loss"
    ):
        fit(data, linear(), early_stopping={"monitor": "val_accuracy"})


def test_the_best_epoch_is_kept_and_returned_and_every_so_many_stay(data):
    def worsen(state):
        if state.epoch == 2:
            with torch.no_grad():
                state.model.weight.add_(100.0)

    fitted = fit(
        data,
        linear(),
        epochs=4,
        best_checkpoint="loss",
        checkpoint_every=2,
        run_id="r",
        callbacks=[worsen],
    )
    losses = [one["train"]["loss"] for one in fitted.getHistory()]
    assert int(np.argmin(losses)) == 2
    assert losses[3] > losses[2]
    run = data / "runs" / "r"
    names = {path.name for path in run.iterdir() if path.is_file()}
    kept = {
        "_fingerprint.json",
        "_record.json",
        "_run.json",
        "checkpoint",
        "checkpoint.previous",
        "checkpoint.best",
    }
    assert names == kept | {"checkpoint.epoch-0002", "checkpoint.epoch-0004"}
    best = unpack_state((run / "checkpoint.best").read_bytes())
    assert len(best["history"]) == 3
    assert torch.equal(best["model"]["weight"], fitted.getModel().weight)


SEEN = []


class Noted(Callback):
    """Notes its moments, and ends the run after two epochs."""

    def on_train_begin(self, state):
        SEEN.append(("begin", state.rank, state.size))

    def on_batch_end(self, state):
        if state.step == 12:
            SEEN.append(("batch", state.epoch))

    def on_epoch_end(self, state):
        SEEN.append(("epoch", state.history[-1]["epoch"]))
        if state.epoch == 1:
            state.stop()

    def on_train_end(self, state):
        SEEN.append(("end", state.epoch))


def noted(state):
    SEEN.append(state.epoch)


def test_callbacks_are_called_at_their_moments_and_can_end_the_run(data):
    SEEN.clear()
    assert len(fit(data, linear(), epochs=5, callbacks=[Noted()]).getHistory()) == 2
    assert SEEN == [
        ("begin", 0, 1),
        ("batch", 0),
        ("epoch", 0),
        ("batch", 1),
        ("epoch", 1),
        ("end", 1),
    ]
    SEEN.clear()
    fit(data, linear(), epochs=3, callbacks=[noted])
    assert SEEN == [0, 1, 2]
    with pytest.raises(TypeError, match="a callback must be a function or have one of the methods"):
        fit(data, linear(), callbacks=[3])


def test_a_run_ends_after_so_many_steps_or_seconds(data):
    fitted = fit(data, linear(), max_steps=15, epochs=5)
    assert [one["rows"] for one in fitted.getHistory()] == [96, 24]
    assert len(fit(data, linear(), max_time=1e-6, epochs=5).getHistory()) == 1


def test_more_steps_than_a_pass_continue_with_the_next_pass(data):
    fitted = fit(data, linear(), train_steps_per_epoch=30, epochs=1)
    assert fitted.getHistory()[0]["rows"] == 2 * 96 + 6 * 8


def test_rows_kept_in_memory_teach_the_same_number_of_steps(data):
    fitted = fit(data, linear(), inmemory_cache_all=True, epochs=40, batch_size=36)
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.2)
    assert [one["rows"] for one in fitted.getHistory()] == [96] * 40


def test_deterministic_runs_have_equal_bits(data):
    first = fit(data, linear(), deterministic=True, random_seed=None, epochs=2)
    assert torch.equal(
        weights(first), weights(fit(data, linear(), deterministic=True, random_seed=None, epochs=2))
    )
    torch.use_deterministic_algorithms(False)


def test_a_data_module_of_ones_own_gives_the_batches(data):
    fitted = fit(data, linear(), data_module=Fixed, epochs=2, batch_size=48)
    assert [one["rows"] for one in fitted.getHistory()] == [96, 96]
    with pytest.raises(NotImplementedError, match="NVTabular has been retired"):
        fit(data, linear(), data_module=NVTabularDataModule)


class Fixed(DataModule):
    """Two batches, again and again."""

    def train_data(self):
        x, y = line()
        for start in (0, 48):
            yield {"x": x[start : start + 48], "y": y[start : start + 48]}

    def val_data(self):
        return iter(())


def test_labels_that_are_not_a_number_are_said_with_their_column(tmp_path):
    x, y = line()
    y[5] = np.nan
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    with pytest.raises(ValueError, match=r"column y has 1 NaN in row group 0 of .*part-0\.parquet"):
        fit(tmp_path, linear(), epochs=1)

    def undo(row):
        return row | {"y": row["y"] - row["y"] + np.float32("nan" if row["x"][0] > 0 else 1)}

    write(tmp_path / "intermediate_train_data", x=x, y=np.ones(len(x), np.float32))
    for loss, outputs in ((torch.nn.MSELoss(), 1), (torch.nn.CrossEntropyLoss(), 2)):
        told = r"label column 'y' has values that are not a number \(NaN\): \d+ of 8 rows"
        with pytest.raises(ValueError, match=told):
            fit(tmp_path, linear(outputs), loss=loss, epochs=1, transformation_fn=undo)


def test_weights_that_are_all_zero_are_said_with_their_column(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y, w=np.zeros(len(y)))
    with pytest.raises(ValueError, match="the weights in column 'w' add up to 0"):
        fit(tmp_path, linear(), sample_weight_col="w", epochs=1)


def test_a_class_that_the_output_lacks_is_said_with_both(tmp_path):
    x, _ = line()
    write(tmp_path / "intermediate_train_data", x=x, c=np.arange(96) % 3)
    with pytest.raises(
        ValueError,
        match="label column 'c' holds class 2, the model's output has the classes 0 to 1",
    ):
        fit(tmp_path, linear(2), label_cols=["c"], loss=torch.nn.CrossEntropyLoss(), epochs=1)


def test_a_failed_run_starts_again_from_its_checkpoint(data, capfd):
    class Flaky(Here):
        def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
            if self.runs < 2:
                self.runs += 1
                raise FarandoleJobError(f"rank 1 was ended by signal SIGKILL ({self.runs})")
            return super().run(fn, args, kwargs, env, on_progress)

    fitted = fit(
        data, linear(), epochs=2, backend=Flaky(), on_failure="restart", max_restarts=2, verbose=1
    )
    assert len(fitted.getHistory()) == 2
    assert "starting again from the last checkpoint, restarts left: 0" in capfd.readouterr().err
    with pytest.raises(FarandoleJobError):
        fit(data, linear(), epochs=2, backend=Flaky(), on_failure="restart", max_restarts=1)
    with pytest.raises(ValueError, match="the store must save runs"):
        fit(data, linear(), on_failure="restart", store=LocalStore(str(data), save_runs=False))


def test_mlflow_gets_parameters_metrics_and_the_model(data, monkeypatch):
    told = []
    fake = types.ModuleType("mlflow")
    started = types.SimpleNamespace(info=types.SimpleNamespace(run_id="a run"))
    fake.active_run = lambda: started if told else None
    for name in ("start_run", "log_params", "log_metrics", "end_run"):
        setattr(fake, name, lambda *args, _name=name, **kwargs: told.append((_name, args, kwargs)))
    flavor = types.ModuleType("mlflow.pytorch")
    flavor.log_model = lambda model, name=None: told.append(("log_model", (model,), {"name": name}))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.pytorch", flavor)
    # where MLflow itself was imported
    monkeypatch.setitem(sys.modules, "mlflow.data.dataset_source_registry", None)
    made = estimator(data, linear(), epochs=2, mlflow=True, run_id="named", backend=Telling())
    made.fit_on_parquet()
    assert [name for name, *_ in told] == [
        "start_run",
        "log_params",
        "log_metrics",
        "log_metrics",
        "log_model",
        "end_run",
    ]
    assert told[0][2] == {"run_name": "named"}
    assert told[1][1][0]["batch_size"] == "8"
    assert told[2][1][0]["loss"] > told[3][1][0]["loss"]
    assert told[-1][2] == {"status": "FINISHED"}
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        made.fit_on_parquet()


@pytest.mark.slow
def test_mlflow_has_signature_example_data_and_load_of_a_run(data, mlflow, monkeypatch):
    pytest.importorskip("mlflow.pytorch")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", "1")

    class Slow(Telling):
        def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
            end = time.monotonic() + 60
            while not any(
                name.startswith("system/")
                for run in mlflow.search_runs(output_format="list")
                for name in run.data.metrics
            ):
                assert time.monotonic() < end, "MLflow looks at the host's load meanwhile"
                time.sleep(0.1)
            return super().run(fn, args, kwargs, env, on_progress)

    estimator(
        data, linear(), epochs=2, mlflow=True, run_id="named", backend=Slow()
    ).fit_on_parquet()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.run_name == "named"
    assert run.data.params["epochs"] == "2"
    # A metric that a model is linked to may be listed once more.
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert {metric.step for metric in history} == {0, 1}
    (dataset,) = (one.dataset for one in run.inputs.dataset_inputs)
    fingerprint = json.loads((data / "runs" / "named" / "_fingerprint.json").read_text())
    digests = {one["name"]: one["digest"] for one in fingerprint["parts"]}
    assert (dataset.name, dataset.digest) == (f"{len(line()[0])} rows", digests["training data"])
    assert any(name.startswith("system/") for name in run.data.metrics)
    (model,) = mlflow.search_logged_models(output_format="list")
    information = mlflow.models.get_model_info(model.model_uri)
    assert information.signature.inputs.to_dict()[0]["tensor-spec"]["dtype"] == "float32"
    assert information.signature.outputs is not None
    assert information.saved_input_example_info is not None


class Telling(Here):
    """Hands on what the worker's epochs say."""

    def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):
        results = super().run(fn, args, kwargs, env, on_progress)
        for entry in results[0].history:
            on_progress(
                0,
                {"kind": "epoch", "entry": entry, "epochs": 2, "steps": 1, "rows_per_second": 1.0},
            )
        return results


def reports(state):
    """A user's callback that sends reports of its own."""
    from farandole.spark.task import report

    report({"kind": "epoch", "entry": {"epoch": state.epoch}})
    scores = {"loss": 0.5, "all_metrics": [{"note": "good"}]}
    shown = {"epochs": 1, "steps": 1, "rows_per_second": 1.0}
    report({"kind": "epoch", "entry": {"epoch": state.epoch, "train": scores}, **shown})


def test_reports_of_a_callback_do_not_end_the_fit(data, capfd, caplog):
    fitted = fit(data, linear(), epochs=1, callbacks=[reports], backend=LocalBackend(1), verbose=1)
    assert len(fitted.getHistory()) == 1
    assert capfd.readouterr().err.count("epoch 1/1  loss") == 1
    assert "is left out: the metric 'note' of its part 'train' is no number" in caplog.text


def test_tensorboard_reads_the_events_of_a_run(data):
    fitted = fit(data, linear(), epochs=2, run_id="r")
    events = (data / "runs" / "r" / "logs" / "events.out.tfevents.farandole").read_bytes()
    assert events[:8] == (26).to_bytes(8, "little")
    assert b"train/loss" in events
    history = [
        json.loads(text)
        for text in (data / "runs" / "r" / "logs" / "history.jsonl").read_text().splitlines()
    ]
    assert history == fitted.getHistory()


def test_two_ranks_agree_on_stateful_metrics_clipping_and_schedules(data):
    torchmetrics = pytest.importorskip("torchmetrics")
    one, two = linear(2), linear(2)

    def options(model, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            "gradient_clip_norm": 0.05,
            "label_cols": ["c"],
            "loss": torch.nn.CrossEntropyLoss(),
            "metrics": [torchmetrics.classification.MulticlassAUROC(2)],
            "epochs": 3,
        }

    alone = fit(data, one, batch_size=40, **options(one, 0.2))
    pair = fit(data, two, batch_size=20, backend=LocalBackend(2), **options(two, 0.1))
    assert torch.allclose(weights(alone), weights(pair), atol=1e-5)
    for left, right in zip(alone.getHistory(), pair.getHistory(), strict=True):
        assert left["train"]["all_metrics"][0]["MulticlassAUROC"] == pytest.approx(
            right["train"]["all_metrics"][0]["MulticlassAUROC"], abs=1e-5
        )
    assert pair.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_a_batch_norm_over_two_ranks_is_that_of_one_with_twice_the_batch(data):
    def network(norm, lr):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), norm(4), torch.nn.Linear(4, 1))
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=lr),
            "epochs": 2,
        }

    alone = fit(data, batch_size=32, **network(torch.nn.BatchNorm1d, 0.1))
    pair = fit(data, batch_size=16, backend=LocalBackend(2), **network(hvd.SyncBatchNorm, 0.05))
    assert torch.allclose(weights(alone), weights(pair), atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(
            getattr(alone.getModel()[1], name), getattr(pair.getModel()[1], name), atol=1e-5
        )


@pytest.mark.parametrize(
    "compressor", [Int8(), TopK(0.5), PowerSGD(2)], ids=["int8", "top-k", "powersgd"]
)
def test_a_compressor_travels_to_the_training_processes(data, compressor):
    fitted = fit(
        data, linear(), backend=LocalBackend(2), gradient_compression=compressor, epochs=12
    )
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.2)
