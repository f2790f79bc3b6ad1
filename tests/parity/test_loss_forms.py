# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Losses as sums and counts, and the trial of losses whose form is unknown."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.parity.gang import StandingGang
from torch import nn
from torch.nn import functional

import farandole.torch as hvd
from farandole.data import prepare_data
from farandole.ray import RayBackend
from farandole.spark.common import LocalBackend, SparkBackend
from farandole.spark.common.data.training_data import PROBE_PART_ROWS
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.loss_probe import PartLoss, check_whole_against_parts

ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    label = np.where(np.arange(ROWS) % 3 == 1, -1.0, np.abs(rows[:, 0]))
    pq.write_table(pa.table({"x": list(rows), "y": label.astype("float32")}), path)
    return str(path)


def estimator(loss, processes, folder, **options):
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    known = {"backend": StandingGang(processes)}
    return TorchEstimator(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss=loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        verbose=0,
        store=str(folder),
        **known | options,
    )


def root_of_mean_squares(output, label):
    return (output - label).square().mean().sqrt()


def masked_mean(output, label):
    kept = label >= 0
    return ((output - label).square() * kept).sum() / kept.sum()


def contrastive(output, label):
    del label
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def dice(output, label):
    found = torch.sigmoid(output)
    return 1 - 2 * (found * label).sum() / (found + label).sum()


def fixed_batch(output, label):
    return ((output - label).reshape(4, -1) ** 2).mean()


@pytest.mark.parametrize("loss", [root_of_mean_squares, masked_mean, contrastive, dice])
@pytest.mark.parametrize("spread", [(2, 1), (1, 2)])
def test_a_loss_that_is_no_mean_is_refused_with_several_processes_or_passes(
    loss, spread, data, tmp_path
):
    processes, passes = spread
    fit = estimator(loss, processes, tmp_path, backward_passes_per_step=passes).fit_on_parquet
    with pytest.raises(ValueError, match=rf"loss {loss.__name__} of column 'y' is no mean") as told:
        fit(path=data)
    assert all(one in str(told.value) for one in ("loss_reduction", "per_batch", "label_count"))


@pytest.mark.parametrize("loss", [root_of_mean_squares, dice])
def test_parts_show_that_a_loss_is_no_mean_whatever_the_rows_are(loss):
    def part_loss(output, label):
        return PartLoss(float(loss(output, label)) * len(output), len(output))

    for seed in range(500):
        draw = torch.Generator().manual_seed(seed)
        values = torch.randn(2, sum(PROBE_PART_ROWS), generator=draw)
        output, label = values[0], values[1].abs()
        parts = zip(output.split(PROBE_PART_ROWS), label.split(PROBE_PART_ROWS), strict=True)
        with pytest.raises(ValueError, match="is no mean"):
            check_whole_against_parts(
                part_loss(output, label), [part_loss(*one) for one in parts], "loss"
            )


def test_labels_that_only_the_last_rows_have_are_tried(tmp_path):
    rows = 20_000
    x = np.random.default_rng(0).normal(size=(rows, 2)).astype("float32")
    label = np.where(np.arange(rows) > 0.95 * rows, -1.0, np.abs(x[:, 0])).astype("float32")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": list(x), "y": label}), path, row_group_size=1000)
    with pytest.raises(ValueError, match="loss masked_mean of column 'y' is no mean"):
        estimator(masked_mean, 2, tmp_path / "store").fit_on_parquet(path=str(path))


@pytest.mark.parametrize("kind", [LocalBackend, SparkBackend, RayBackend])
def test_a_job_of_one_process_that_may_grow_is_tried_as_several(kind, data, tmp_path):
    backend = kind(1, max_num_proc=2)
    assert (backend.num_processes(), backend.max_processes()) == (1, 2)
    grows = estimator(contrastive, 1, tmp_path)
    grows.setBackend(LocalBackend(1, max_num_proc=2))
    with pytest.raises(ValueError, match="loss contrastive of column 'y' is no mean"):
        grows.fit_on_parquet(path=data)


def test_a_sum_of_ones_own_is_refused_with_the_option_that_is_right(data, tmp_path):
    def total(output, label):
        return (output - label).square().sum()

    with pytest.raises(ValueError, match=r'is a sum over rows.*loss_reduction="sum"'):
        estimator(total, 2, tmp_path).fit_on_parquet(path=data)


def test_a_loss_that_takes_no_other_number_of_rows_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=r"takes no batch of 3 rows|does not take output"):
        estimator(fixed_batch, 2, tmp_path).fit_on_parquet(path=data)


def test_one_process_takes_any_loss_and_so_do_several_with_an_explicit_option(
    data, gangs, tmp_path
):
    for processes, options in ((1, {}), (2, {"loss_reduction": "per_batch"})):
        options |= {"backend": gangs(processes)}
        estimator(contrastive, processes, tmp_path, **options).fit_on_parquet(path=data)


def test_an_option_that_contradicts_a_loss_of_torch_is_refused(data, tmp_path):
    loss = nn.MSELoss(reduction="sum")
    with pytest.raises(ValueError, match="loss_reduction='mean' contradicts the loss MSELoss"):
        estimator(loss, 1, tmp_path, loss_reduction="mean").fit_on_parquet(path=data)
    with pytest.raises(ValueError, match="loss_reduction must be one of"):
        estimator(loss, 1, tmp_path, loss_reduction="median")


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 0.1]), label_smoothing=0.1),
        functools.partial(functional.nll_loss, weight=torch.tensor([1.0, 10.0, 0.1])),
    ],
)
def test_a_sum_divided_by_its_count_is_the_mean(loss):
    output = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([0, 1, 2, -100, 1, 0])
    if isinstance(loss, nn.MSELoss):
        label = torch.zeros(6, 3)
    total, count = hvd.loss_sum_and_count(loss, output, label)
    mean = nn.MSELoss() if isinstance(loss, nn.MSELoss) else loss
    assert float(total / count) == pytest.approx(float(mean(output, label)), rel=1e-6)


def test_a_batch_of_ignored_labels_has_a_sum_and_a_count_of_zero_and_no_gradient():
    output = torch.randn(2, 3, requires_grad=True)
    label = torch.tensor([-100, -100])
    total, count = hvd.loss_sum_and_count(nn.CrossEntropyLoss(), output, label)
    total.backward()
    assert (float(total), float(count)) == (0.0, 0.0)
    assert not output.grad.any()


@pytest.mark.parametrize(
    ("loss", "name"),
    [(contrastive, "contrastive"), (nn.CTCLoss(), "CTCLoss"), (lambda *rows: rows, "<lambda>")],
)
def test_a_loss_whose_divisor_is_unknown_is_refused_by_name(loss, name):
    with pytest.raises(TypeError, match=f"what divides the mean of {name} is unknown"):
        hvd.loss_sum_and_count(loss, torch.ones(2, 2), torch.ones(2))


def test_an_ignored_label_above_all_classes_is_no_class_of_prepared_data(gangs, tmp_path):
    rows = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
    label = np.where(np.arange(ROWS) % 3 == 1, 255, np.arange(ROWS) % 2).astype("uint8")
    table = pa.table({"x": list(rows), "y": label})
    prepared = prepare_data(table, tmp_path / "data", feature_cols=["x"], label_cols=["y"])
    network = nn.Linear(2, 2)
    known = {"feature_cols": ["x"], "label_cols": ["y"], "verbose": 0, "store": str(tmp_path)}
    for ignored, loss in (
        (255, nn.CrossEntropyLoss(ignore_index=255)),
        (255, functools.partial(functional.cross_entropy, ignore_index=255)),
        (-100, nn.CrossEntropyLoss()),
    ):
        fit = TorchEstimator(
            model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.01), loss=loss,
            batch_size=4, backend=gangs(1), **known,
        ).fit_on_parquet  # fmt: skip
        if ignored == 255:
            assert fit(path=prepared.train_url).getHistory()[0]["train"]["loss"] > 0
        else:
            with pytest.raises(ValueError, match="'y' holds class 255"):
                fit(path=prepared.train_url)


def test_a_count_of_more_than_one_number_is_refused(data, tmp_path):
    class Masked(nn.Module):
        def forward(self, output, label):
            return masked_mean(output, label)

        def label_count(self, label):
            return label >= 0

    with pytest.raises(ValueError, match=r"label_count of the loss Masked must return one number"):
        estimator(Masked(), 2, tmp_path).fit_on_parquet(path=data)
