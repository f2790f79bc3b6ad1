# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of any number of processes train what a plain loop on one process trains, for every loss."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.parity import plain_loop, torch_cells
from tests.parity.cover import cover_pairs, spread_cells
from tests.parity.plain_loop import EPOCHS, Network, cases_of, make_data, make_optimizer
from tests.parity.torch_cells import GLOBAL_BATCH_ROWS, OPTIONS, is_valid_cell

from farandole.spark.torch import TorchEstimator

for module in (plain_loop, torch_cells, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # processes cannot import tests

CELLS = cover_pairs(OPTIONS, is_valid_cell, at_least=420)
SHORT_CELLS = 42
RELATIVE_TOLERANCE = 1e-5


def _name(cell: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in cell.values())


def _column(values: Any) -> Any:
    return pa.array(list(values)) if values.ndim > 1 else values


def write_rows(data: dict[str, Any], path: Any, kept: Any = slice(None)) -> None:
    """Writes the columns of a cell, but for the one that says which rows are held out."""
    columns = {name: values[kept] for name, values in data.items() if name != "held"}
    pq.write_table(pa.table({name: _column(values) for name, values in columns.items()}), path)


def own_minibatch(model: Any, optimizer: Any, shape: Any, loss_fn: Any, inputs: Any, labels: Any,
                  weights: Any, passes: int, index: int) -> Any:  # fmt: skip
    """Steps after the last batch of a step; the estimator takes the step of a short last one."""
    outputs, labels = shape(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    loss.backward()
    if (index + 1) % passes == 0:
        optimizer.step()
        optimizer.zero_grad()
    return outputs, loss


def fit_cell(cell: dict[str, Any], gangs: Any, folder: Any) -> dict[str, Any]:
    """Returns the parameters after a fit of a cell, and the losses of its last epoch."""
    cases, data = cases_of(cell), make_data(cell)
    train, val = folder / "train.parquet", folder / "val.parquet"
    held = data["held"] if cell["validation"] else data["held"] & False
    write_rows(data, train, ~held)
    if cell["validation"]:
        write_rows(data, val, held)

    def fit(epochs: int, spread: tuple[int, int]) -> Any:
        processes, passes = spread
        torch.manual_seed(0)
        network = Network(cases)
        optional = {
            "sample_weight_col": "w" if "w" in data else None,
            "gradient_clip_norm": cell["clip"],
            "lr_scheduler": plain_loop.make_scheduler if cell["scheduler"] else None,
            "lr_scheduler_interval": cell["scheduler"],
            "loss_reduction": cases[0].reduction,
            "train_minibatch_fn": own_minibatch
            if cell["shape"] == "minibatch" and not cell["clip"]
            else None,
        }
        return TorchEstimator(
            model=network,
            optimizer=make_optimizer(cell["optimizer"], network.parameters(), 1 / processes),
            loss=[one.make() for one in cases],
            feature_cols=["x"],
            label_cols=[f"y{index}" for index in range(len(cases))],
            batch_size=GLOBAL_BATCH_ROWS // (processes * passes),
            backward_passes_per_step=passes,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            run_id="cell",
            backend=gangs(processes),
            store=str(folder / "store"),
            **{name: value for name, value in optional.items() if value is not None},
        ).fit_on_parquet(path=str(train), val_path=str(val) if cell["validation"] else None)

    if cell["before"] is not None:
        fit(1, cell["before"])  # the rest of the run continues from its checkpoint
    fitted = fit(EPOCHS, cell["spread"])
    last = fitted.getHistory()[-1]
    found = {"loss": last["train"]["loss"], "steps": last["steps"]}
    if cell["validation"]:
        found["val_loss"] = last["validation"]["loss"]
    parameters = torch.cat([one.detach().ravel() for one in fitted.getModel().parameters()])
    return {"parameters": parameters, **found}


def check_cell(cell: dict[str, Any], gangs: Any, folder: Any) -> None:
    wanted = plain_loop.train_plainly(cell, make_data(cell))
    found = fit_cell(cell, gangs, folder)
    limit = RELATIVE_TOLERANCE * float(wanted["parameters"].abs().max())
    differences = {
        "parameters": float((found.pop("parameters") - wanted.pop("parameters")).abs().max())
        / limit
    }
    for name, value in wanted.items():
        differences[name] = abs(found[name] - value) / (RELATIVE_TOLERANCE * max(abs(value), 1e-3))
    worst = {name: value * RELATIVE_TOLERANCE for name, value in differences.items() if value > 1}
    assert not worst, f"relative differences from one process: {worst}"


@pytest.mark.parametrize("cell", spread_cells(CELLS, SHORT_CELLS), ids=_name)
def test_a_fit_trains_what_one_process_trains(cell, gangs, tmp_path):
    check_cell(cell, gangs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=_name)
def test_every_pair_of_options_trains_what_one_process_trains(cell, gangs, tmp_path):
    check_cell(cell, gangs, tmp_path)
