# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The estimators of Keras and Lightning on Ray."""

import json
import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest

from farandole.ray import RayBackend
from farandole.spark.common.store import LocalStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def line():
    """`y = 2 x + 1`."""
    x = np.random.default_rng(0).normal(size=400).astype("float32")
    return pd.DataFrame({"x": x, "y": 2 * x + 1})


@pytest.fixture
def common(resources, tmp_path):
    """Parameters of an estimator that fits the line in two ranks of Ray."""
    return {
        "backend": RayBackend(2, verbose=0),
        "store": LocalStore(str(tmp_path)),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 8,
        "verbose": 0,
    }


def test_keras_fits_there(common, line, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    from farandole.spark.keras import KerasEstimator

    fitted = KerasEstimator(
        model=keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        **common,
    ).fit(line)
    kernel, bias = fitted.getModel().get_weights()
    assert (kernel.item(), bias.item()) == pytest.approx((2, 1), abs=0.1)


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
def test_lightning_fits_there(common, line):
    import lightning
    import torch

    from farandole.spark.lightning import LightningEstimator

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.inner(x.reshape(-1, 1))[:, 0]

        def training_step(self, batch, _index):
            return torch.nn.functional.mse_loss(self(batch["x"]), batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fitted = LightningEstimator(model=Line(), **common).fit(line)
    inner = fitted.getModel().inner
    assert (inner.weight.item(), inner.bias.item()) == pytest.approx((2, 1), abs=0.1)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_fit_is_recorded_with_its_epochs_ranks_and_output(common, line, tmp_path, elastic):
    import torch

    from farandole.spark.torch import TorchEstimator

    def talk(state):
        print("epoch", state.epoch, "of rank", state.rank)

    model = torch.nn.Linear(1, 1)
    backend = RayBackend(2, verbose=0, min_num_proc=1) if elastic else common["backend"]
    TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss(),
        run_id="mine",
        input_shapes=[[-1, 1]], callbacks=[talk], **common | {"backend": backend, "epochs": 2},
    ).fit(line)  # fmt: skip
    told = json.loads((tmp_path / "runs/mine/_record.json").read_text())
    assert (told["state"], told["size"], told["done"]) == ("ended", 2, 2)
    assert [(one["rank"], one["pid"] > 0, one["step_seconds"] > 0) for one in told["ranks"]] == [
        (0, True, True),
        (1, True, True),
    ]
    for rank in range(2):
        printed = (tmp_path / f"runs/mine/output/rank.{rank}/stdout").read_text()
        assert printed == f"epoch 0 of rank {rank}\nepoch 1 of rank {rank}\n"
