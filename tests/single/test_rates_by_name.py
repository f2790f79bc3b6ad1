# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Schedules by name, groups of parameters by name, and rates that fall from layer to layer."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tests.single.training import fit, line, linear, weights, write
from tests.text_checkpoints import make_network, make_reviews, write_checkpoint
from transformers import ResNetConfig, ResNetForImageClassification, get_scheduler

from farandole.spark.common import LocalBackend
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch.callbacks import Callback
from farandole.spark.torch.parameter_groups import depths_below_head, split_parameter_groups
from farandole.spark.torch.rate_schedules import RateSchedule
from farandole.spark.transformers import TextClassifier

pytestmark = pytest.mark.timeout(300)
STEPS_OF_EPOCH = 6


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


class RateRecorder(Callback):
    """Writes the rates of all groups after each step, and fails once after some steps.

    Args:
        path: file of the rates, a line for each step.
        failing_step: step of the second epoch after which the run fails.
    """

    def __init__(self, path, failing_step=0):
        self.path = path
        self.failing_step = failing_step

    def on_batch_end(self, state):
        lines = self.path.read_text() if self.path.exists() else ""
        rates = " ".join(str(group["lr"]) for group in state.optimizer.param_groups)
        self.path.write_text(f"{lines}{rates}\n")
        marker = self.path.with_suffix(".failed")
        if (state.epoch, state.step) == (1, self.failing_step) and not marker.exists():
            marker.touch()
            raise RuntimeError("the process fails")


def fit_recorded(data, model, failing_step=0, **params):
    """Returns the fitted model, and the rates after each step: (steps, groups)."""
    path = data / "rates"
    path.unlink(missing_ok=True)
    recorder = RateRecorder(path, failing_step)
    fitted = fit(data, model, **{"batch_size": 16, "epochs": 2, "callbacks": [recorder]} | params)
    return fitted, np.loadtxt(path, ndmin=2)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [None, 4, 0.25])
def test_a_schedule_by_name_has_the_rates_of_transformers(data, name, warmup):
    steps = 2 * STEPS_OF_EPOCH
    _, rates = fit_recorded(data, linear(), lr_scheduler=name, warmup_steps=warmup)
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.05)
    theirs = "constant_with_warmup" if name == "constant" else name
    count = round(warmup * steps) if isinstance(warmup, float) else warmup or 0
    scheduler, wanted = get_scheduler(theirs, optimizer, count, steps), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        wanted.append(scheduler.get_last_lr())
    assert rates == pytest.approx(np.array(wanted), abs=1e-9)


def test_a_schedule_ends_with_the_steps_of_the_run(data):
    _, rates = fit_recorded(data, linear(), lr_scheduler="linear", max_steps=8)
    assert rates[:, 0] == pytest.approx(0.05 * (1 - np.arange(1, 9) / 8))
    _, rates = fit_recorded(data, linear(), lr_scheduler="linear", backward_passes_per_step=2)
    assert rates[1::2, 0] == pytest.approx(0.05 * (1 - np.arange(1, 7) / 6))


def test_a_run_that_failed_continues_its_schedule(data):
    known = {"lr_scheduler": "cosine", "warmup_steps": 3, "parameter_groups": {"bias": {"lr": 0.2}}}
    whole, _ = fit_recorded(data, linear(), run_id="whole", epochs=3, **known)
    with pytest.raises(RuntimeError, match="the process fails"):
        fit_recorded(data, linear(), failing_step=4, run_id="parts", epochs=3, **known)
    parts, rates = fit_recorded(data, linear(), failing_step=4, run_id="parts", epochs=3, **known)
    assert len(rates) == 2 * STEPS_OF_EPOCH
    assert torch.equal(weights(parts), weights(whole))
    found = [group["lr"] for group in parts.getOptimizer().param_groups]
    assert found == pytest.approx([0.0, 0.0], abs=1e-9)


def test_a_schedule_does_not_continue_over_another_length(data):
    fit(data, linear(), lr_scheduler="cosine", epochs=1, run_id="run")
    message = r"the length of lr_scheduler='cosine' was epochs=1 and is epochs=2"
    with pytest.raises(ValueError, match=message):
        fit(data, linear(), lr_scheduler="cosine", epochs=2, run_id="run")


def test_two_processes_have_the_schedule_of_one(data):
    found = []
    for processes, size, rate in ((1, 16, 0.05), (2, 8, 0.025)):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        fitted = fit(
            data, model, optimizer=optimizer, batch_size=size, epochs=2, lr_scheduler="cosine",
            warmup_steps=5, layer_decay=None, parameter_groups={"bias": {"lr": rate / 2}},
            backend=LocalBackend(processes, verbose=0),
        )  # fmt: skip
        found.append(weights(fitted))
    assert torch.allclose(*found, atol=1e-5)


def test_patterns_set_options_of_the_optimizer(data):
    fitted = fit(data, linear(), parameter_groups={"weight": {"lr": 0.0}}, epochs=2)
    before = linear()
    model = fitted.getModel()
    assert torch.equal(model.weight, before.weight)
    assert not torch.equal(model.bias, before.bias)
    assert [group["lr"] for group in fitted.getOptimizer().param_groups] == [0.0, 0.05]


def make_blocks():
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))


def describe_groups(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        tuple(names[id(parameter)] for parameter in group["params"]): (
            pytest.approx(group["lr"]),
            group["weight_decay"],
        )
        for group in optimizer.param_groups
    }


def test_later_patterns_win_and_the_optimizer_of_the_user_stays():
    model = make_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    patterns = {"bias": {"weight_decay": 0.0, "lr": 0.2}, r"^1\.": {"lr": 0.4}}
    split = split_parameter_groups(model, optimizer, patterns, None)
    assert type(split) is torch.optim.AdamW
    assert describe_groups(model, split) == {
        ("0.weight", "2.weight"): (0.1, 0.3),
        ("0.bias", "2.bias"): (0.2, 0.0),
        ("1.weight",): (0.4, 0.3),
        ("1.bias",): (0.4, 0.0),
    }
    assert len(optimizer.param_groups) == 1
    split = split_parameter_groups(model, optimizer, {"bias": {"weight_decay": 0.0}}, 0.5)
    rates = {names: rate for names, (rate, _) in describe_groups(model, split).items()}
    assert rates == {
        (f"{layer}.{kind}",): 0.1 * 0.5 ** (3 - layer)
        for layer in range(3)
        for kind in ("weight", "bias")
    }


def test_layers_are_counted_from_the_head():
    depths = depths_below_head(make_network())
    by_depth = {
        depth: {re.sub(r"(layer\.\d)?\..*", r"\1", name.removeprefix("bert."))}
        for name, depth in depths.items()
    }
    assert list(by_depth) == [3, 2, 1, 0]
    assert depths["bert.embeddings.word_embeddings.weight"] == 3
    assert depths["bert.encoder.layer.0.output.dense.weight"] == 2
    assert depths["bert.encoder.layer.1.output.dense.weight"] == 1
    assert depths["cls.predictions.bias"] == 0
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    depths = depths_below_head(ResNetForImageClassification(config))
    assert depths["resnet.embedder.embedder.convolution.weight"] == 3
    assert depths["resnet.encoder.stages.1.layers.0.layer.0.convolution.weight"] == 1
    assert depths["classifier.1.weight"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"parameter_groups": {"head": {"lr": 0.1}}}, "'head', which matches no parameter"),
        ({"parameter_groups": {"bias": {"decay": 0}}}, "'decay' for 'bias', which is no option of"),
        ({"layer_decay": 0.5}, "layer_decay finds no layers in the model, a Linear"),
        ({"warmup_steps": 3}, "warmup_steps needs lr_scheduler by name"),
        ({"lr_scheduler": "cosine", "warmup_steps": 240}, "warmup_steps=240 is not below the"),
    ],
)
def test_names_that_do_not_fit_are_errors(data, params, message):
    with pytest.raises(ValueError, match=message):
        fit(data, linear(), **params)
    assert not (data / "runs").exists() or not list((data / "runs").glob("*/checkpoint"))


def test_a_scheduler_of_other_groups_is_refused(data):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="set lr_scheduler to a function that creates it"):
        fit(
            data, model, optimizer=optimizer, lr_scheduler=scheduler,
            parameter_groups={"bias": {"lr": 0.2}},
        )  # fmt: skip


@pytest.mark.parametrize("lora", [None, 2])
def test_estimators_on_checkpoints_take_names(tmp_path, lora):
    recorder = RateRecorder(tmp_path / "rates")
    known = {
        "checkpoint": write_checkpoint(tmp_path / "checkpoint"), "text_col": "review",
        "label_col": "mood", "store": str(tmp_path / "store"), "verbose": 0, "random_seed": 1,
        "learning_rate": 0.1, "batch_size": 8, "lora": lora, "callbacks": [recorder],
        "backend": LocalBackend(1, verbose=0),
    }  # fmt: skip
    rows = make_reviews(16)
    TextClassifier(lr_scheduler="linear", layer_decay=0.5, **known).fit(rows)
    rates = np.loadtxt(tmp_path / "rates", ndmin=2)
    depths = [1, 2, 0] if lora else [3, 2, 1, 0]
    assert sorted(rates[0]) == pytest.approx(sorted(0.05 * 0.5**depth for depth in depths))
    with pytest.raises(ValueError, match="'embedder', which matches no parameter"):
        TextClassifier(parameter_groups={"embedder": {"lr": 0.1}}, **known).fit(rows)


@pytest.mark.parametrize(
    "params",
    [{"lr_scheduler": "cosine"}, {"layer_decay": 0.5}, {"parameter_groups": {"bias": {"lr": 1.0}}}],
)
def test_lightning_refuses_names(data, params):
    model = linear()
    estimator = LightningEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], store=str(data), **params,
    )  # fmt: skip
    with pytest.raises(ValueError, match="by name is for TorchEstimator"):
        estimator.fit_on_parquet()


def test_a_warm_up_rises_from_zero_to_the_full_rate():
    schedule = RateSchedule("cosine", 0.25)
    found = [schedule.rate_factor(share) for share in (0.0, 0.125, 0.25, 0.625, 1.0, 1.1)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])
