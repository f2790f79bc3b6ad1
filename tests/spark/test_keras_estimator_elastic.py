# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit of Keras's whose worker is killed and replaced in the middle: each row of each epoch
counts once.
"""

# ruff: noqa: ARG002 - Keras's signatures

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import keras
import numpy as np
import pandas as pd
import pytest

from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.keras import KerasEstimator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.backends]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

ROWS, BATCH, EPOCHS, RATE = 400, 4, 6, 0.001


class Disturbance(keras.callbacks.Callback):
    """Kills rank 1 once in the middle of an epoch, and slows training down while there is only
    one process.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def note(self, **what):
        with (Path(self.folder) / f"note-{os.getpid()}").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def on_train_begin(self, logs=None):
        self.note(begins=True)

    def on_train_end(self, logs=None):
        self.note(ends=True)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.note(epoch=epoch)

    def on_train_batch_end(self, batch, logs=None):
        import farandole.keras as hvd

        self.note(size=hvd.size(), batch=batch)
        marker = Path(self.folder) / "killed"
        if (self.epoch, batch, hvd.rank()) == (1, 13, 1) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.size() == 1:
            time.sleep(0.1)  # at most a minute for the one that joins


class Seen(keras.metrics.Metric):
    """Counts rows."""

    def __init__(self, name="seen", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.ones_like(y_true[..., :1], dtype="float32")))

    def result(self):
        return self.total.value


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_killed_worker_is_replaced_and_each_row_of_each_epoch_counts_once(tmp_path):
    x = np.random.default_rng(3).uniform(1.0, 2.0, ROWS).astype(np.float32)
    # So far above what the model gives that each row adds itself to the weight.
    rows = pd.DataFrame({"x": x, "y": np.full(ROWS, 1000.0, np.float32)})
    for name, part in (("train", rows), ("val", rows[:41])):
        (tmp_path / name).mkdir()
        part.to_parquet(tmp_path / name / "part.parquet")
    store = LocalStore(
        str(tmp_path), train_path=str(tmp_path / "train"), val_path=str(tmp_path / "val")
    )
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Zeros()),
        ]
    )
    fitted = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.SGD(RATE),
        loss="mean_absolute_error",
        metrics=[Seen()],
        custom_objects={"Seen": Seen},
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=1,
        store=store,
        callbacks=[Disturbance(tmp_path)],
        backend=LocalBackend(2, min_num_proc=1),
    ).fit_on_parquet()
    assert (tmp_path / "killed").exists()
    learned = float(
        np.asarray(keras.ops.convert_to_numpy(fitted.getModel().weights[0])).reshape(-1)[0]
    )
    assert learned == pytest.approx(EPOCHS * RATE / BATCH * float(x.sum()), rel=1e-4)
    history = fitted.getHistory()
    assert history["seen"] == [ROWS] * EPOCHS
    assert history["val_seen"] == [41] * EPOCHS
    told = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("note-*")
    ]
    assert len(told) == 3
    (survivor,) = (
        said for said in told if said[0] == {"begins": True} and min(map(size_of, said)) == 1
    )
    assert [one["epoch"] for one in survivor if "epoch" in one] == list(range(EPOCHS))
    assert sum("begins" in one for one in survivor) == sum("ends" in one for one in survivor) == 1
    assert max(one.get("batch", 0) for one in survivor) < ROWS // BATCH
    (new,) = (said for said in told if said[1]["epoch"] > 0)
    assert [one["epoch"] for one in new if "epoch" in one] == list(range(new[1]["epoch"], EPOCHS))
    assert size_of([one for one in new if "size" in one][-1]) == 2


def size_of(note):
    return note.get("size", 2)
