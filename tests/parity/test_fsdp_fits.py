# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `strategy="fsdp"` equal fits with whole models."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.runner.backend import LocalBackend
from farandole.spark.common.store import Store
from farandole.spark.torch import TorchEstimator

EPOCHS = 3


class TiedModel(nn.Module):
    """A model with a tied and a frozen weight, batch norm, buffers, and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(3, 5, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(3)
        )
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.table.weight
        self.head = nn.Linear(3, 1)
        self.blocks[1][0].weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("same_scale", self.scale)
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x):
        hidden = self.table(x)
        for block in self.blocks:
            hidden = hidden + block(hidden) * self.scale * self.cache.mean()
        return self.head(hidden @ self.back.weight) * self.same_scale


def tied_model():
    """Returns the model in float64: batch norm makes rounding errors of float32 large."""
    return TiedModel().double()


TIED_OPTIONS = {"model": tied_model, "input_dtypes": ["float64"]}


def write(folder):
    """Writes 37 rows to train on, and 5 to validate: some ranks have none in the last batch."""
    x = np.random.default_rng(5).normal(size=(42, 3)).astype("float32")
    for name, part in (("train", x[:37]), ("val", x[37:])):
        pq.write_table(pa.table({"x": list(part), "y": part.sum(1)}), folder / f"{name}.parquet")
    return str(folder / "train.parquet")


def plain_model():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def fit(gang, folder, path, optimizer=torch.optim.AdamW, model=plain_model, **options):
    torch.manual_seed(0)
    model = model()
    known = {"epochs": EPOCHS, "batch_size": 12 // gang.num_processes()}
    return TorchEstimator(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        metrics=[nn.L1Loss()],
        feature_cols=["x"],
        label_cols=["y"],
        shuffle=False,
        verbose=0,
        backend=gang,
        **{"store": str(folder)} | known | options,
    ).fit_on_parquet(path=path, val_path=path.replace("train", "val"))


def assert_close(expected, found):
    for name, value in expected.getModel().state_dict().items():
        other = found.getModel().state_dict()[name]
        assert torch.allclose(value, other, rtol=1e-4, atol=1e-5), name
    for one, other in zip(expected.getHistory(), found.getHistory(), strict=True):
        for part in ("train", "validation"):
            assert one[part]["loss"] == pytest.approx(other[part]["loss"], rel=1e-4)
            assert one[part]["all_metrics"][0]["L1Loss"] == pytest.approx(
                other[part]["all_metrics"][0]["L1Loss"], rel=1e-4
            )


def assert_equal_optimizers(expected, found):
    mine, other = expected.getOptimizer().state_dict(), found.getOptimizer().state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, state in mine["state"].items():
        for key, value in state.items():
            if value is None:
                continue
            assert torch.allclose(value, other["state"][index][key], rtol=1e-3, atol=1e-6), key


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, TIED_OPTIONS | {"optimizer": momentum, "backward_passes_per_step": 2}),
        (3, TIED_OPTIONS | {"optimizer": momentum, "gradient_clip_norm": 0.05}),
        (2, {"optimizer": torch.optim.Adagrad, "precision": "bf16"}),
        (3, {"global_batch_size": 12, "batch_size": 2, "lr_scheduler": schedule}),
    ],
    ids=["1", "2", "3", "tied and passes", "tied and clip", "adagrad and bf16", "global batch"],
)
def test_the_fitted_model_is_that_of_whole_models(size, options, gangs, tmp_path):
    path = write(tmp_path)
    whole = fit(gangs(size), tmp_path / "whole", path, **options)
    divided = fit(gangs(size), tmp_path / "divided", path, strategy="fsdp", **options)
    assert_close(whole, divided)
    assert_equal_optimizers(whole, divided)


@pytest.mark.parametrize("rest", [1, 3])
def test_a_run_resumes_on_another_number_of_processes(rest, gangs, tmp_path):
    path, options = write(tmp_path), {"run_id": "parts", "resume": "force", **TIED_OPTIONS}
    options |= {"optimizer": momentum, "best_checkpoint": "val_loss"}
    fitted = {}
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        fit(gangs(2), folder, path, epochs=1, strategy=strategy, **options)
        fitted[strategy] = fit(gangs(rest), folder, path, strategy=strategy, **options)
        assert len(fitted[strategy].getHistory()) == EPOCHS
    assert_close(fitted["ddp"], fitted["fsdp"])
    # The last checkpoint, the one before and the best one have parts; the first state is deleted.
    parts = list((tmp_path / "fsdp" / "runs" / "parts" / "parts").iterdir())
    assert 2 <= len(parts) <= 3
    assert not any(directory.name.startswith("start") for directory in parts)


def test_a_run_that_is_complete_gives_its_model_again(gangs, tmp_path):
    path, options = write(tmp_path), {"run_id": "parts", "strategy": "fsdp"}
    first = fit(gangs(2), tmp_path, path, **options)
    assert_close(first, fit(gangs(2), tmp_path, path, **options))


@pytest.mark.parametrize("damage", ["content", "missing", "other strategy"])
def test_a_damaged_checkpoint_is_refused(damage, gangs, tmp_path):
    path, options = write(tmp_path), {"run_id": "parts", "resume": "force"}
    strategy = "ddp" if damage == "other strategy" else "fsdp"
    fit(gangs(2), tmp_path, path, epochs=1, strategy=strategy, **options)
    words = "was written without strategy"
    if strategy == "fsdp":
        words = "missing or damaged.*safetensors"
        (directory,) = (tmp_path / "runs" / "parts" / "parts").iterdir()
        part = min(directory.iterdir())
        content = part.read_bytes()
        part.unlink()
        if damage == "content":
            part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RuntimeError, match=words):
        fit(gangs(2), tmp_path, path, strategy="fsdp", **options)


class ScalarModel(nn.Linear):
    """A model with a parameter that is one number."""

    def __init__(self):
        super().__init__(3, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))


class MixedModel(nn.Linear):
    """A model with parameters of two types."""

    def __init__(self):
        super().__init__(3, 1)
        self.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, 'fsdp" cannot be combined with precision="fp16"'),
        ({"sync_every": 2}, "sync_every=2 cannot be combined with strategy"),
        ({"shard_optimizer": True}, "shard_optimizer=True cannot be combined with strategy"),
        ({"compile": True}, 'fsdp" cannot be combined with compile=True'),
        ({"ema_decay": 0.9}, 'fsdp" cannot be combined with ema_decay'),
        ({"train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
        ({"gradient_compression": hvd.Compression.fp16}, "gradient_compression"),
        ({"optimizer": torch.optim.Adafactor}, "element-wise"),
        ({"model": ScalarModel}, "'scale' is a single number"),
        ({"model": MixedModel}, "has several types: .*'extra' of torch.float64"),
        ({"model": lambda: nn.LazyLinear(1)}, "'weight' has none before the first call"),
        ({"fsdp_modules": ["Block"]}, "names 'Block', which is neither"),
        ({"strategy": "ddp", "fsdp_modules": []}, "fsdp_modules needs strategy"),
    ],
)
def test_options_that_need_a_whole_model_are_refused(options, words, gangs, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(gangs(2), tmp_path, write(tmp_path), **{"strategy": "fsdp"} | options)


def test_a_store_without_runs_is_refused(gangs, tmp_path):
    path = write(tmp_path)
    with pytest.raises(ValueError, match="so the store must save runs"):
        fit(
            gangs(2), tmp_path, path, strategy="fsdp",
            store=Store.create(str(tmp_path / "store"), save_runs=False),
        )  # fmt: skip


@pytest.mark.parametrize("option", [{"strategy": "fsdp"}, {"shard_optimizer": True}])
def test_an_elastic_backend_is_refused(option, tmp_path):
    backend = LocalBackend(2, min_num_proc=1)
    with pytest.raises(ValueError, match=r"needs a fixed number of processes.* has 1 to 2"):
        fit(backend, tmp_path, write(tmp_path), **option)


class BorrowingModel(nn.Module):
    """A model that uses the weights of a module in a list without calling the module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])

    def forward(self, x):
        return self.layers[1](x @ self.layers[0].weight)


def test_weights_of_modules_that_are_not_called_need_other_units(gangs, tmp_path):
    path = write(tmp_path)
    options = {"model": BorrowingModel, "strategy": "fsdp", "epochs": 1}
    options["optimizer"] = momentum
    with pytest.raises(RuntimeError, match="name the modules that it calls by fsdp_modules"):
        fit(gangs(2), tmp_path / "units", path, **options)
    whole = fit(gangs(2), tmp_path / "whole", path, **options | {"strategy": "ddp"})
    assert_close(whole, fit(gangs(2), tmp_path / "one", path, fsdp_modules=[], **options))
