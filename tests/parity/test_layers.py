# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Layers whose state or gradient depends on the batch: batch norms and embeddings."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator

BATCH_ROWS = 6


def write(folder, rows, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(2.0, 3.0, (rows, 3)).astype("float32")
    path = folder / f"{rows}-{seed}.parquet"
    y = draw.normal(size=rows).astype("float32")
    pq.write_table(pa.table({"x": list(x), "y": y, "i": np.arange(rows) % 4}), path)
    return str(path)


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))


def fit(model, gang, folder, train, features="x", **options):
    known = {"batch_size": BATCH_ROWS // gang.num_processes(), "epochs": 2, "shuffle": False}
    val = options.pop("val_path", None)
    rate = 0.05 / gang.num_processes()
    return TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        loss=nn.MSELoss(),
        feature_cols=[features],
        label_cols=["y"],
        verbose=0,
        backend=gang,
        store=str(folder / f"store-{gang.num_processes()}"),
        **known | options,
    ).fit_on_parquet(path=train, val_path=val)


@pytest.mark.parametrize("rows", [12, 13, 14, 16])
@pytest.mark.parametrize("size", [2, 3])
def test_synchronized_batch_norms_count_the_rows_of_all_ranks_and_no_padding(
    rows, size, gangs, tmp_path
):
    if rows % BATCH_ROWS == 1:
        rows += 1  # a batch norm needs two rows of all ranks
    train = write(tmp_path, rows)
    one = fit(network(nn.BatchNorm1d(4)), gangs(1), tmp_path, train).getModel()
    many = fit(network(hvd.SyncBatchNorm(4)), gangs(size), tmp_path, train).getModel()
    for name, value in one.state_dict().items():
        found = many.state_dict()[name].double()
        assert torch.allclose(found, value.double(), rtol=1e-5, atol=1e-6), name


class Transposed(nn.Module):
    """A network whose norm sees the halves of all rows one after another."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm, self.after = nn.Linear(3, 4), norm, nn.Linear(4, 1)

    def forward(self, rows):
        halves = self.before(rows).reshape(-1, 2, 2).transpose(0, 1)
        values = self.norm(halves.reshape(-1, 2)).reshape(halves.shape).transpose(0, 1)
        return self.after(torch.tanh(values.reshape(len(rows), 4)))


@pytest.mark.parametrize("rows", [14, 15, 16])
def test_synchronized_batch_norms_find_the_rows_that_count_in_any_order(rows, gangs, tmp_path):
    train = write(tmp_path, rows)
    one = fit(Transposed(nn.BatchNorm1d(2)), gangs(1), tmp_path, train).getModel()
    many = fit(Transposed(hvd.SyncBatchNorm(2)), gangs(3), tmp_path, train).getModel()
    for name, value in one.state_dict().items():
        found = many.state_dict()[name].double()
        assert torch.allclose(found, value.double(), rtol=1e-5, atol=1e-6), name


def test_the_validated_model_is_the_one_that_is_returned(gangs, tmp_path):
    train, held = write(tmp_path, 24), write(tmp_path, 15, seed=1)
    model = fit(network(nn.BatchNorm1d(4)), gangs(2), tmp_path, train, val_path=held)
    rows = pq.read_table(held)
    net = model.getModel().eval()
    with torch.no_grad():
        output = net(torch.tensor(rows["x"].to_pylist()))[:, 0]
    wanted = float(nn.functional.mse_loss(output, torch.tensor(rows["y"].to_pylist())))
    assert model.getHistory()[-1]["validation"]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_norms_of_torch_that_would_not_be_synchronized_are_refused(gangs, tmp_path):
    train = write(tmp_path, 12)
    with pytest.raises(ValueError, match=r"layer '1' is torch's SyncBatchNorm.*farandole\.torch\."):
        fit(network(nn.SyncBatchNorm(4)), gangs(2), tmp_path, train)
    fit(network(nn.SyncBatchNorm(4)), gangs(1), tmp_path, train)


def test_batches_of_one_row_are_refused_where_a_norm_needs_more(gangs, tmp_path):
    train = write(tmp_path, 13)
    with pytest.raises(ValueError, match=r"layer '1' needs two rows.*batch_size is 1"):
        fit(network(nn.BatchNorm1d(4)), gangs(1), tmp_path, train, batch_size=1)
    with pytest.raises(ValueError, match=r"layer '1' needs two rows.*last step.*13 rows"):
        fit(network(hvd.SyncBatchNorm(4)), gangs(2), tmp_path, train)
    images = nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(3, 1)
    )
    fit(images, gangs(1), tmp_path, train, batch_size=1)  # of one row, there are three values


def fit_with_lightning(model, gang, folder, train):
    return LightningEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH_ROWS // gang.num_processes(),
        epochs=2,
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder / f"store-{gang.num_processes()}"),
    ).fit_on_parquet(path=train)


def test_synchronized_batch_norms_train_with_lightning_on_cpus(gangs, tmp_path):
    train = write(tmp_path, 15)
    one = fit_with_lightning(network(nn.BatchNorm1d(4)), gangs(1), tmp_path, train).getModel()
    many = fit_with_lightning(network(hvd.SyncBatchNorm(4)), gangs(3), tmp_path, train).getModel()
    for name, value in one.state_dict().items():
        found = many.state_dict()[name].double()
        assert torch.allclose(found, value.double(), rtol=1e-5, atol=1e-6), name
    with pytest.raises(RuntimeError, match=r"torch's SyncBatchNorm, which works on GPUs only"):
        fit_with_lightning(network(nn.SyncBatchNorm(4)), gangs(2), tmp_path, train)


class Table(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(4, 1, **options)

    def forward(self, index):
        return self.table(index.long())[:, 0]


def test_an_embedding_that_changes_in_forward_is_refused_with_several_processes(gangs, tmp_path):
    train = write(tmp_path, 12)
    with pytest.raises(ValueError, match=r"embedding 'table' has max_norm=1.*one process"):
        fit(Table(max_norm=1.0), gangs(2), tmp_path, train, features="i")
    fit(Table(max_norm=1.0), gangs(1), tmp_path, train, features="i")


def test_an_embedding_that_counts_indices_warns_with_several_processes(gangs, tmp_path):
    with pytest.warns(UserWarning, match="embedding 'table' has scale_grad_by_freq=True"):
        fit(Table(scale_grad_by_freq=True), gangs(2), tmp_path, write(tmp_path, 12), features="i")
