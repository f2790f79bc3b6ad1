# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers that die or raise while they train: one error that names the rank and the reason, and
nothing left behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from pyspark.ml.linalg import Vectors

from farandole.spark import FarandoleJobError
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator

pytestmark = pytest.mark.timeout(300)


def model_that(act):
    """A linear model that calls a function with its rank in every training step."""

    class Acting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x):
            if self.training:
                act(int(os.environ["RANK"]))
            return self.inner(x)

    return Acting()


@pytest.fixture(scope="module")
def frame(spark):
    return spark.createDataFrame(
        [(Vectors.dense([1.0, float(index)]), index % 2) for index in range(512)], ["x", "y"]
    )


def estimator(store, model, **params):
    known = {
        "num_proc": 2,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.001),
        "loss": torch.nn.CrossEntropyLoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "verbose": 0,
        "store": LocalStore(str(store)),
    }
    return TorchEstimator(**known | params)


def test_a_killed_worker_fails_the_fit_at_once_and_the_next_fit_works(frame, tmp_path, pids):
    note = pids.note

    def linger(rank):
        import sys
        import time

        note()
        if rank == 1:
            print("rank 1 was here", file=sys.stderr, flush=True)
        time.sleep(0.01)

    killed = []

    def kill():
        pids.wait(2, limit=200)
        killed.append(time.monotonic())
        os.kill(pids.of_rank(1), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(FarandoleJobError) as raised:
        # a minute, should nobody be killed
        estimator(tmp_path, model_that(linger), epochs=1_000).fit(frame)
    assert killed, f"failed before it was to: {raised.value}"
    thread.join()
    assert time.monotonic() - killed[0] < 30
    assert (raised.value.rank, raised.value.signal_name) == (1, "SIGKILL")
    assert "rank 1 was here" in str(raised.value)
    assert pids.gone(2)
    again = estimator(tmp_path, torch.nn.Linear(2, 2)).fit(frame)
    assert len(again.getHistory()) == 1


def test_an_exception_on_one_rank_comes_back_with_its_traceback(frame, tmp_path):
    def refuse(rank):
        if rank == 1:
            raise LookupError("no such digit")

    with pytest.raises(FarandoleJobError, match="no such digit") as raised:
        estimator(tmp_path, model_that(refuse)).fit(frame)
    assert raised.value.rank == 1
    assert "in refuse" in raised.value.remote_traceback
    assert isinstance(raised.value.__cause__, LookupError)
