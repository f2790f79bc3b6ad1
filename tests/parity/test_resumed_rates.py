# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learning rates of runs that continue on another number of processes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from farandole.spark.common import RunDiffersError
from farandole.spark.torch import TorchEstimator


def fit(gang, folder, *, epochs, batch_size, rate, **options):
    torch.manual_seed(0)
    network = torch.nn.Linear(1, 1)
    path = folder / "rows.parquet"
    x = np.linspace(-1, 1, 24).astype("float32")
    pq.write_table(pa.table({"x": x, "y": 2 * x + 1}), path)
    return TorchEstimator(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=rate),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        run_id="r",
        backend=gang,
        store=str(folder / "store"),
        **options,
    ).fit_on_parquet(path=str(path))


def test_a_run_continues_with_as_many_rows_and_the_rate_of_its_steps(gangs, tmp_path):
    whole = fit(gangs(1), tmp_path / "", epochs=3, batch_size=12, rate=0.2)
    (tmp_path / "b").mkdir()
    fit(gangs(1), tmp_path / "b", epochs=1, batch_size=12, rate=0.2)
    fit(gangs(2), tmp_path / "b", epochs=2, batch_size=6, rate=0.1)
    last = fit(gangs(3), tmp_path / "b", epochs=3, batch_size=4, rate=0.2 / 3)
    for one, other in zip(whole.getModel().parameters(), last.getModel().parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


def test_another_rate_of_the_steps_is_refused_and_named(gangs, tmp_path):
    fit(gangs(1), tmp_path, epochs=1, batch_size=12, rate=0.2)
    with pytest.raises(
        RunDiffersError, match=r"optimizer was SGD\(lr=0.2\) and is .* on 2 processes"
    ):
        fit(gangs(2), tmp_path, epochs=2, batch_size=6, rate=0.2)
    with pytest.raises(RunDiffersError, match="batch_size was 12 and is 8 on 2 processes"):
        fit(gangs(2), tmp_path, epochs=2, batch_size=8, rate=0.2)
