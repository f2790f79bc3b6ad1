# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One timeline of all ranks of a fit on Ray."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch

from farandole.ray import RayBackend
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("bounds", [{}, {"min_num_proc": 2}], ids=["fixed", "elastic"])
def test_a_fit_on_ray_has_one(resources, tmp_path, capfd, bounds):
    network = torch.nn.Linear(1, 1)
    path = tmp_path / "trace.json"
    TorchEstimator(
        backend=RayBackend(2, verbose=0, **bounds), model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01), loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"], batch_size=8, epochs=2, store=LocalStore(str(tmp_path / "store")),
        verbose=0,
    ).fit(pa.table({"x": [float(number % 7) for number in range(64)], "y": [1.0] * 64}),
        timeline=path)  # fmt: skip
    trace = json.loads(path.read_text())["traceEvents"]
    for name in ("step", "data", "forward", "backward", "ALLREDUCE"):
        assert {
            event["pid"] for event in trace if event["ph"] == "B" and event["name"] == name
        } == {0, 1}, name
    assert f"the timeline of all ranks is in {path}" in capfd.readouterr().err
