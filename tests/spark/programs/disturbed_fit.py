# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit of the digits on four executors, two of which are killed in the middle."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
from driver_session import session
from executor_kills import executors
from sklearn.datasets import load_digits

from farandole.spark.common import LocalStore, SparkBackend

note, EPOCHS = pathlib.Path(os.environ["NOTES"]), 12
disturbed = os.environ["DISTURBED"] == "1"


def watched(rank, size, epoch):
    """Tells the driver's thread how far it is; in the middle of the run it waits for the thread."""
    if rank == 0:
        (note / "step").write_text(f"{epoch} {size}")
    if (note / "hold").exists() and epoch >= EPOCHS // 2:
        time.sleep(0.5)


def until(size, epoch=0):
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        try:
            at, now = map(int, (note / "step").read_text().split())
        except (FileNotFoundError, ValueError):
            at, now = 0, 0
        if now == size and at >= epoch:
            return
        time.sleep(0.05)
    raise AssertionError(f"no world of {size} ranks in epoch {epoch} after 150 s")


def disturb():
    until(4, 2)
    for process in executors()[:2]:
        os.kill(process, signal.SIGKILL)
    until(2)
    until(4)
    (note / "hold").unlink()


spark = session("local-cluster[4,1,1024]", executor_cores="1")
images, digits = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
order = np.random.default_rng(0).permutation(len(images))
images, digits = images[order], digits[order]
rows = [(row.tolist(), int(label)) for row, label in zip(images[:1440], digits[:1440], strict=True)]
frame = spark.createDataFrame(rows, "x array<float>, y long")
known = {
    "feature_cols": ["x"],
    "label_cols": ["y"],
    "batch_size": 16,
    "epochs": EPOCHS,
    "random_seed": 1,
    "verbose": 1,
    "store": LocalStore(str(note / "store")),
    "backend": SparkBackend(4, min_num_proc=2, stderr=sys.stderr),
}


def fit_and_print(estimator, predicted):
    if disturbed:
        (note / "hold").touch()
        threading.Thread(target=disturb, daemon=True).start()
    fitted = estimator.fit(frame)
    accuracy = float((predicted(fitted.getModel(), images[1440:]) == digits[1440:]).mean())
    history = fitted.getHistory()
    # Keras has no number of rows, and a list for each of the others.
    if not isinstance(history, dict):
        assert [(entry["epoch"], entry["rows"]) for entry in history] == [
            (at, 1440) for at in range(EPOCHS)
        ], history
    print(
        json.dumps(
            [
                accuracy,
                len(history["loss"] if isinstance(history, dict) else history),
                (note / "hold").exists(),
            ]
        )
    )
