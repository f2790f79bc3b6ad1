# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator on Ray whose worker is killed in the middle of a fit: another one joins, each row
counts once.
"""

import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

from farandole.ray import RayBackend
from farandole.spark.common.store import LocalStore
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.callbacks import Callback

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, BATCH, EPOCHS, RATE = 400, 4, 3, 0.001


def summed(output, _label):
    """Adds each row to the weight, by an amount that does not depend on the number of processes."""
    return -output.mean()


class Disturbance(Callback):
    """Kills rank 1 once in the middle of an epoch, and slows training down while there is only
    one rank.
    """

    def __init__(self, folder):
        self.folder = str(folder)

    def on_batch_end(self, state):
        (Path(self.folder) / f"{os.getpid()}.{state.size}").touch()
        marker = Path(self.folder) / "killed"
        if (state.epoch, state.step, state.rank) == (1, 14, 1) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.size == 1:
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_is_replaced_and_each_row_of_each_epoch_counts_once(
    resources, tmp_path, capfd
):
    x = np.random.default_rng(3).uniform(1.0, 2.0, ROWS).astype("float32")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    fitted = TorchEstimator(
        backend=RayBackend(2, min_num_proc=1, elastic_timeout=120),
        store=LocalStore(str(tmp_path / "store")),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        loss=summed,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[Disturbance(tmp_path)],
        verbose=1,
    ).fit(pd.DataFrame({"x": x, "y": x}))
    assert (tmp_path / "killed").exists()
    weight = float(fitted.getModel().weight.detach())
    assert weight == pytest.approx(EPOCHS * RATE / BATCH * float(x.sum()), rel=1e-4)
    assert [(entry["epoch"], entry["rows"]) for entry in fitted.getHistory()] == [
        (n, ROWS) for n in range(EPOCHS)
    ]
    seen = [one.name.split(".") for one in tmp_path.glob("*.[12]")]
    assert len({process for process, _ in seen}) == 3, "two, and the one that joined"
    (survivor,) = {process for process, size in seen if size == "1"}
    assert [survivor, "2"] in seen
    err = capfd.readouterr().err
    assert "world 3 has 2 ranks" in err
    assert "starting again" not in err


def test_numbers_that_contradict_each_other_are_refused(resources):
    with pytest.raises(ValueError, match="3 <= 2 <= 2 does not"):
        RayBackend(2, min_num_proc=3)
    with pytest.raises(ValueError, match="max_num_proc must be at least 1: 0"):
        RayBackend(2, max_num_proc=0)
    with pytest.raises(ValueError, match=r"these are for elastic jobs.*reset_limit"):
        RayBackend(2, reset_limit=3)
    assert RayBackend(2, max_num_proc=3).num_processes() == 2
