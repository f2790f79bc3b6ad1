# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lightning: the strategy, and the estimator on Parquet without Spark."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from tests.single.training import Here, line, linear, weights, write

import farandole.torch as hvd
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.lightning import TorchEstimator
from farandole.torch.compress import Int8

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|tensorboard).*"
    ),
]


class Line(lightning.LightningModule):
    """Learns y from x."""

    def __init__(self, lr=0.05):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(2, 1)
        self.lr = lr

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, _index):
        assert set(batch) == {"x", "y"}
        loss = torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, _index):
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    x, y = line(20, seed=5)
    write(tmp_path / "intermediate_val_data", x=x, y=y)
    return tmp_path


def fit(directory, model, **params):
    known = {
        "model": model,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        "random_seed": 1,
        "store": LocalStore(str(directory)),
        "backend": Here(),
    }
    return TorchEstimator(**known | params).fit_on_parquet()


def test_a_lightning_module_learns_and_its_logs_are_the_history(data):
    fitted = fit(data, Line(), epochs=12)
    history = fitted.getHistory()
    assert [one["epoch"] for one in history] == list(range(12))
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] / 4
    module = fitted.getModel()
    x, y = line(20, seed=5)
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(
            module(torch.from_numpy(x))[:, 0], torch.from_numpy(y)
        ).item()
    assert history[-1]["validation"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert history[-1]["rows"] == 96


def test_a_run_of_lightning_is_resumed_with_its_optimizer(data):
    whole = fit(data, Line(), epochs=4, run_id="whole")
    fit(data, Line(), epochs=2, run_id="parts")
    parts = fit(data, Line(), epochs=4, run_id="parts")
    assert [one["epoch"] for one in parts.getHistory()] == [0, 1, 2, 3]
    told = [[one["train"]["loss"] for one in fitted.getHistory()] for fitted in (parts, whole)]
    assert told[0] == pytest.approx(told[1], rel=1e-5), "the epoch from which on they differ"
    torch.testing.assert_close(weights(parts), weights(whole), atol=1e-6, rtol=1e-5)


def test_a_plain_module_with_optimizer_and_loss_does_as_well(data):
    model = linear()

    def error(output, label):
        return (output - label).abs().mean()

    fitted = fit(
        data, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=torch.nn.MSELoss(), metrics=[error],
        epochs=30,
    )  # fmt: skip
    assert torch.allclose(weights(fitted), torch.tensor([2.0, -3.0, 1.0]), atol=0.1)
    assert "error" in fitted.getHistory()[0]["validation"]["all_metrics"][0]
    assert isinstance(fitted.getModel(), torch.nn.Linear)


def test_a_scheduler_of_a_plain_module_steps_when_configured(data):
    def fitted(interval, **params):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        # Nothing moves after the scheduler's first step.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
        options = {"lr_scheduler": scheduler, "lr_scheduler_interval": interval, "epochs": 2}
        return weights(
            fit(data, model, optimizer=optimizer, loss=torch.nn.MSELoss(), **options | params)
        )

    one_step, one_epoch = (
        fitted("epoch", epochs=1, train_steps_per_epoch=1),
        fitted("epoch", epochs=1),
    )
    assert not torch.allclose(one_step, one_epoch)
    assert torch.allclose(fitted("step"), one_step)
    assert torch.allclose(fitted("epoch"), one_epoch)


def test_callbacks_loggers_and_checkpoints_of_lightning_reach_the_store(data):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    keep = ModelCheckpoint(filename="best", monitor="val_loss", save_weights_only=True)
    logger = CSVLogger(save_dir="ignored", name="csv")
    fitted = fit(
        data, Line(), run_id="r", callbacks=[keep], logger=logger, log_every_n_steps=1, epochs=3
    )
    run = data / "runs" / "r"
    assert (run / "checkpoint").exists()
    assert (run / "best.ckpt").exists()
    assert list((run / "logs").rglob("metrics.csv"))
    best = torch.load(run / "best.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(best["inner.weight"], fitted.getModel().inner.weight)


def test_parameters_of_the_module_are_refused_in_the_estimator(data):
    module = Line()
    for name, value in {
        "loss": torch.nn.MSELoss(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "loss_weights": [1.0],
    }.items():
        with pytest.raises(ValueError, match=f"{name} is for plain modules"):
            fit(data, module, **{name: value})
    with pytest.raises(ValueError, match="optimizer is required for a plain module"):
        fit(data, linear())
    plain = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "loss": torch.nn.MSELoss()}
    with pytest.raises(
        ValueError, match="the optimizer has parameters that the model does not have: 2"
    ):
        fit(data, linear(), **plain)


def test_a_loss_that_is_no_number_ends_the_run_unless_it_shall_not(data):
    with pytest.raises(
        ValueError,
        match=r"the loss is (infinite|not a number \(NaN\)) in epoch 1, step 2, on rank 0",
    ):
        fit(data, Line(lr=1e30), epochs=5)
    assert len(fit(data, Line(lr=1e30), terminate_on_nan=False, epochs=2).getHistory()) == 2


def test_a_run_of_lightning_ends_early_and_takes_arguments_of_its_trainer(data):
    assert (
        len(
            fit(
                data,
                Line(lr=0.0),
                early_stopping={"patience": 2, "monitor": "val_loss", "min_delta": 1e-4},
                epochs=9,
            ).getHistory()
        )
        == 3
    )
    assert len(fit(data, Line(), trainer_args={"max_epochs": 1}, epochs=9).getHistory()) == 1


def test_two_ranks_of_lightning_train_like_one_with_twice_the_batch(data):
    alone = fit(data, Line(), batch_size=16, epochs=3)
    pair = fit(data, Line(), batch_size=8, epochs=3, backend=LocalBackend(2))
    assert torch.allclose(weights(alone), weights(pair), atol=1e-5)
    for left, right in zip(alone.getHistory(), pair.getHistory(), strict=True):
        assert left["rows"] == right["rows"] == 96
        assert left["train"]["loss"] == pytest.approx(right["train"]["loss"], rel=1e-4)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, Int8()], ids=["fp16", "int8"])
def test_gradients_of_two_ranks_travel_compressed(data, compression):
    plain = fit(data, Line(), epochs=3, backend=LocalBackend(2))
    small = fit(data, Line(), epochs=3, backend=LocalBackend(2), gradient_compression=compression)
    assert torch.allclose(weights(small), weights(plain), atol=0.05)
    assert not torch.equal(weights(small), weights(plain))


def test_an_object_that_is_no_compression_is_refused(data):
    with pytest.raises(TypeError, match="gradient_compression must be a member of Compression"):
        fit(data, Line(), gradient_compression="fp16")


def _train_by_name(name):
    import farandole.lightning
    import farandole.torch as hvd

    x, y = line()
    rows = [{"x": torch.from_numpy(x[i]), "y": torch.tensor(y[i])} for i in range(len(y))]
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    trainer = lightning.Trainer(
        strategy=name, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Line()
    trainer.fit(module, loader)
    sampler = trainer.train_dataloader.sampler
    told = (trainer.world_size, trainer.global_rank, sampler.num_replicas, sampler.rank)
    assert isinstance(trainer.strategy, farandole.lightning.FarandoleStrategy)
    return told, hvd.rank(), np.asarray(module.inner.weight.detach())


def _train_without_pickle(folder):
    import pickle

    import cloudpickle
    from torch.distributed import distributed_c10d

    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    pickle.loads = pickle.load = pickle.Unpickler = refuse
    cloudpickle.loads = cloudpickle.load = distributed_c10d._unpickler = refuse
    x, y = line()
    rows: Any = [{"x": torch.from_numpy(x[i]), "y": torch.tensor(y[i])} for i in range(len(y))]
    trainer = lightning.Trainer(
        strategy="farandole", accelerator="cpu", max_epochs=2, logger=False,
        default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Timer(duration={"hours": 1})],
    )  # fmt: skip
    trainer.fit(Line(), torch.utils.data.DataLoader(rows, batch_size=8))
    group: Any = torch.distributed.new_group([1])
    written: Any = trainer.checkpoint_callback
    return written.best_model_path, torch.distributed.get_world_size(group)


def test_two_ranks_of_lightning_unpickle_nothing(tmp_path):
    (first, outside), (second, inside) = LocalBackend(2, verbose=0).run(
        _train_without_pickle, (str(tmp_path),)
    )
    assert first == second
    assert first.startswith(str(tmp_path))
    assert (outside, inside) == (-1, 1)


def _broadcast(objects):
    strategy: Any = lightning.Trainer(
        strategy="farandole", accelerator="cpu", logger=False, enable_checkpointing=False
    ).strategy
    alone = strategy.broadcast("before the session")
    strategy.setup_distributed()
    return alone, [
        strategy.broadcast(one if hvd.rank() == root else None, root) for root, one in objects
    ]


def test_lightning_broadcasts_objects_of_any_type():
    objects = [(0, "a"), (1, {"rate": 0.5}), (1, {1, 2}), (0, Decimal("0.1"))]
    assert (
        LocalBackend(2, verbose=0).run(_broadcast, (objects,))
        == [("before the session", [one for _, one in objects])] * 2
    )


@pytest.mark.parametrize("name", ["farandole", "horovod"])
def test_a_trainer_takes_the_strategy_by_name(name):
    (first, rank, weight), (second, _, other) = LocalBackend(2, verbose=0).run(
        _train_by_name, (name,)
    )
    assert rank == 0
    assert first == (2, 0, 2, 0)
    assert second == (2, 1, 2, 1)
    assert np.array_equal(weight, other)
