# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One timeline of all ranks of a job on Spark."""

from __future__ import annotations

import json
import sys
from collections import Counter

import cloudpickle
import pytest
import torch

import farandole.spark
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

STEPS = 5


def steps():
    """A rank of a job of a few sums."""
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    for _ in range(STEPS):
        hvd.allreduce(np.ones(8), name="gradient")
    return hvd.rank()


def begun(path, name):
    """Counts the spans of a name, by rank."""
    trace = json.loads(path.read_text())["traceEvents"]
    return Counter(event["pid"] for event in trace if event["ph"] == "B" and event["name"] == name)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_function_on_spark_has_one(spark, tmp_path, capfd, elastic):
    path = tmp_path / "trace.json"
    run, more = (
        (farandole.spark.run_elastic, {"min_num_proc": 2}) if elastic else (farandole.spark.run, {})
    )
    assert sorted(run(steps, num_proc=2, timeline=path, **more)) == [0, 1]
    assert begun(path, "ALLREDUCE") == {0: STEPS, 1: STEPS}
    assert f"the timeline of all ranks is in {path}" in capfd.readouterr().err


def test_a_fit_of_a_dataframe_keeps_one_in_its_run(spark, tmp_path):
    network = torch.nn.Linear(1, 1)
    rows = [(float(number % 7), 1.0) for number in range(64)]
    TorchEstimator(
        num_proc=2, model=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=2,
        run_id="r",
        store=LocalStore(str(tmp_path)), verbose=0,
    ).fit(spark.createDataFrame(rows, "x float, y float"), timeline=True)  # fmt: skip
    path = tmp_path / "runs/r/timeline.json"
    for name in ("step", "data", "forward", "backward"):
        assert sorted(begun(path, name)) == [0, 1], name
