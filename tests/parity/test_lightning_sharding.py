# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Models of Lightning that are divided among ranks equal whole ones."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import farandole.lightning
import farandole.torch as hvd
from farandole.lightning import elastic
from farandole.runner.backend import LocalBackend

STEP_ROWS = 12
EPOCHS = 4
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance|LeafSpec).*"),
]


class DividedModel(lightning.LightningModule):
    """Two layers, divided where the strategy has a device mesh."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self.trainer.strategy, "device_mesh") or self.device_mesh is None:
            return
        for layer in (self.layers[0], self.layers[2], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _index):
        features, targets = batch
        loss = nn.functional.mse_loss(self.layers(features), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_loader(size):
    torch.manual_seed(1)
    features = torch.randn(2 * STEP_ROWS, 3)
    rows = TensorDataset(features, features[:, :2] * features[:, 1:])
    return DataLoader(rows, batch_size=STEP_ROWS // size)


def train(strategy, folder, epochs=EPOCHS, ckpt_path=None):
    """Returns weights, the loss of the last epoch, and bytes of this rank's weights and moments."""
    hvd.init()
    trainer: Any = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=epochs, logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}")],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = DividedModel()
    trainer.fit(module, make_loader(hvd.size()), ckpt_path=ckpt_path)
    moments = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
    weights = dict(module.layers.named_parameters())
    own = sum(as_local(each).nbytes for each in (*weights.values(), *moments))
    whole = {name: as_whole(value) for name, value in weights.items()}
    return whole, float(trainer.callback_metrics["loss"]), own


def as_local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run(size, *args, **kwargs):
    return LocalBackend(size, verbose=0).run(train, args, kwargs)


def assert_close(expected, found):
    for name, value in expected[0].items():
        assert torch.allclose(value, found[0][name], atol=1e-6), name
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


def test_a_divided_fit_equals_that_of_whole_models_and_resumes_on_other_ranks(tmp_path):
    whole = run(2, "farandole", str(tmp_path / "whole"))
    divided = run(2, "farandole_fsdp", str(tmp_path / "divided"))
    for rank in range(2):
        assert_close(whole[rank], divided[rank])
        assert 2 * divided[rank][2] == whole[rank][2]
    folder = str(tmp_path / "begun")
    run(2, "farandole_fsdp", folder, epochs=2)
    begun = f"{folder}/epoch=1.ckpt"
    (resumed,) = run(1, "farandole_fsdp", str(tmp_path / "rest"), ckpt_path=begun)
    assert_close(whole[0], resumed)


def test_an_elastic_fit_of_a_divided_model_is_refused():
    trainer = lightning.Trainer(
        strategy=farandole.lightning.FarandoleShardingStrategy(), accelerator="cpu", logger=False,
        max_epochs=1, enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="FarandoleShardingStrategy divides it"):
        elastic.LightningState().fit(trainer, DividedModel(), make_loader(1))
