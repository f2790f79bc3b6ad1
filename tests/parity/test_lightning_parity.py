# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with Lightning train what a plain loop on one process trains: plain modules with every loss,
and modules that compute means over the rows of a batch.
"""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.parity import plain_loop, torch_cells
from tests.parity.cover import cover_pairs, spread_cells
from tests.parity.plain_loop import EPOCHS, Network, cases_of, make_data, make_optimizer
from tests.parity.torch_cells import CLASS_WEIGHTS, GLOBAL_BATCH_ROWS, LOSSES, OPTIONS, SPREADS
from torch.nn import functional

import farandole.torch as hvd
from farandole.spark.lightning import LightningEstimator

for module in (plain_loop, torch_cells, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # processes cannot import tests

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|self.trainer).*"
)
LIGHTNING_OPTIONS = (
    {name: OPTIONS[name] for name in ("loss", "second", "spread", "rows", "weights", "validation")}
    | {"optimizer": ("sgd", "adam"), "clip": (None, 0.5), "scheduler": (None,)}
    | {"before": OPTIONS["before"]}
)
CELLS = cover_pairs(LIGHTNING_OPTIONS, torch_cells.is_valid_cell)
SHORT_CELLS = 8


def _name(cell: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in cell.values())


def _write(folder, data, held):
    columns = {
        name: pa.array(list(values)) if values.ndim > 1 else values
        for name, values in data.items()
        if name != "held"
    }
    table = pa.table(columns)
    pq.write_table(table.filter(pa.array(~held)), folder / "train.parquet")
    if not held.any():
        return {"path": str(folder / "train.parquet")}
    pq.write_table(table.filter(pa.array(held)), folder / "val.parquet")
    return {"path": str(folder / "train.parquet"), "val_path": str(folder / "val.parquet")}


def _fit(model, gang, folder, spread, paths, **options):
    processes, passes = spread
    known = {"verbose": 0, "shuffle": False, "epochs": EPOCHS, "feature_cols": ["x"]}
    return LightningEstimator(
        model=model,
        batch_size=GLOBAL_BATCH_ROWS // (processes * passes),
        backward_passes_per_step=passes,
        backend=gang,
        store=str(folder / options.pop("store", f"store-{processes}-{passes}")),
        **known | options,
    ).fit_on_parquet(**paths)


def check_cell(cell, gangs, folder):
    cases, data = cases_of(cell), make_data(cell)
    wanted = plain_loop.train_plainly(cell, data)
    held = data["held"] if cell["validation"] else data["held"] & False
    optional = {
        "sample_weight_col": "w" if "w" in data else None,
        "gradient_clip_norm": cell["clip"],
        "loss_reduction": cases[0].reduction,
    }
    paths = _write(folder, data, held)

    def fit(spread, epochs):
        torch.manual_seed(0)
        network = Network(cases)
        return _fit(
            network,
            gangs(spread[0]),
            folder,
            spread,
            paths,
            optimizer=make_optimizer(cell["optimizer"], network.parameters()),
            loss=[one.make() for one in cases],
            label_cols=[f"y{index}" for index in range(len(cases))],
            epochs=epochs,
            run_id="cell",
            store="store",
            **{name: value for name, value in optional.items() if value is not None},
        )

    if cell["before"] is not None:
        fit(cell["before"], 1)  # the rest of the run continues from its checkpoint
    fitted = fit(cell["spread"], EPOCHS)
    found = torch.cat([one.detach().ravel() for one in fitted.getModel().parameters()])
    last = fitted.getHistory()[-1]
    assert torch.allclose(found, wanted["parameters"], rtol=1e-5, atol=1e-5)
    assert last["train"]["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    if cell["validation"]:
        assert last["validation"]["loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)


@pytest.mark.parametrize("cell", spread_cells(CELLS, SHORT_CELLS), ids=_name)
def test_a_plain_module_trains_what_one_process_trains(cell, gangs, tmp_path):
    check_cell(cell, gangs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_every_pair_of_options_trains_what_one_process_trains(cell, gangs, tmp_path):
    check_cell(cell, gangs, tmp_path)


class Module(lightning.LightningModule):
    """A module with a loss of its own."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 3)
        self.kind = kind

    def training_step(self, batch, _index):
        output, label = self.inner(batch["x"]), batch["y0"].long()
        if self.kind == "mean":
            loss = functional.cross_entropy(output, label)
        elif self.kind == "sum":
            loss = functional.cross_entropy(output, label, reduction="sum")
        else:
            loss = functional.cross_entropy(output, label, weight=torch.tensor(CLASS_WEIGHTS))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _index):
        output, label = self.inner(batch["x"]), batch["y0"].long()
        self.log("val_loss", functional.cross_entropy(output, label), on_epoch=True)
        self.log("val_synced", functional.cross_entropy(output, label), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class CountedModule(Module):
    """A module that divides a weighted loss by what all ranks count."""

    def training_step(self, batch, _index):
        weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor(CLASS_WEIGHTS))
        total, count = hvd.loss_sum_and_count(weighted, self.inner(batch["x"]), batch["y0"].long())
        return total / hvd.allreduce(count, op=hvd.Sum, name="count")


def _fit_module(module, gangs, folder, spread, rows=25, **options):
    cell = {"loss": "ce", "second": None, "rows": rows, "weights": None}
    data = make_data(cell)
    held = np.arange(rows) % 5 == 3
    fitted = _fit(
        module, gangs(spread[0]), folder, spread, _write(folder, data, held),
        label_cols=["y0"], **options,
    )  # fmt: skip
    parameters = torch.cat([one.detach().ravel() for one in fitted.getModel().parameters()])
    return parameters, fitted.getHistory()[-1]


@pytest.mark.parametrize(
    ("spread", "rows"),
    [
        pytest.param(spread, rows, marks=[] if spread in ((3, 1), (2, 2)) else pytest.mark.slow)
        for spread in SPREADS[1:]
        for rows in (25, 31)
    ],
)
@pytest.mark.parametrize(("kind", "options"), [("mean", {}), ("sum", {"loss_reduction": "sum"})])
def test_a_module_with_a_loss_of_its_own_trains_what_one_process_trains(
    kind, options, rows, spread, gangs, tmp_path
):
    one, first = _fit_module(Module(kind), gangs, tmp_path, (1, 1), rows, **options)
    many, last = _fit_module(Module(kind), gangs, tmp_path, spread, rows, **options)
    assert torch.allclose(many, one, rtol=1e-5, atol=1e-6)
    for entry in (first, last):
        synced = entry["validation"]["all_metrics"][0]["synced"]
        assert synced == pytest.approx(entry["validation"]["loss"], rel=1e-5)
    assert last["validation"]["loss"] == pytest.approx(first["validation"]["loss"], rel=1e-5)


def test_a_module_whose_loss_is_no_mean_is_refused_with_several_processes(gangs, tmp_path):
    with pytest.raises(ValueError, match=r"training_step of Module is no mean over rows"):
        _fit_module(Module("weighted"), gangs, tmp_path, (2, 1))
    with pytest.raises(ValueError, match=r'training_step.*sum over rows.*loss_reduction="sum"'):
        _fit_module(Module("sum"), gangs, tmp_path, (1, 2))


@pytest.mark.parametrize("rows", [25, 17])  # of 17, a rank has no row in the last step
def test_a_module_that_divides_by_the_count_of_all_ranks_trains_what_one_process_trains(
    rows, gangs, tmp_path
):
    found = [
        _fit_module(CountedModule(""), gangs, tmp_path, spread, rows, loss_reduction="sum")[0]
        for spread in ((1, 1), (3, 1))
    ]
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


class TrainerModule(Module):
    """A module whose step asks the trainer."""

    def training_step(self, batch, index):
        assert self.trainer.max_epochs
        return super().training_step(batch, index)


def test_a_module_that_cannot_be_tried_is_taken_for_a_mean_with_a_warning(gangs, tmp_path):
    with pytest.warns(UserWarning, match="training_step of TrainerModule cannot be tried"):
        _fit_module(TrainerModule("mean"), gangs, tmp_path, (2, 1))


def test_losses_of_cells_exist():
    assert {cell["loss"] for cell in CELLS} == set(LOSSES)
