# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator on Spark loses half of its executors in the middle of a fit and gets new ones; it learns as well."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.spark.deployments import KILLS, PATIENCE, drive

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 * PATIENCE)]

FIT = (
    KILLS
    + """
import json
import numpy as np
import torch
from sklearn.datasets import load_digits
from farandole.spark.common import LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator

note, EPOCHS = pathlib.Path(os.environ["NOTES"]), 12
disturbed = os.environ["DISTURBED"] == "1"

def watched(state):
    \"\"\"Tells the driver's thread how far it is; in the middle of the run it waits for what that does.\"\"\"
    if state.rank == 0:
        (note / "step").write_text(f"{state.epoch} {state.size}")
    if (note / "hold").exists() and state.epoch >= EPOCHS // 2:
        time.sleep(0.5)

class Watch:
    def on_batch_end(self, state):
        watched(state)

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
rows = [(row.tolist(), int(label)) for row, label in zip(images[:1440], digits[:1440])]
frame = spark.createDataFrame(rows, "x array<float>, y long")
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 16, 10),
)
estimator = TorchEstimator(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9),
    loss=torch.nn.CrossEntropyLoss(), feature_cols=["x"], label_cols=["y"], batch_size=16, epochs=EPOCHS,
    random_seed=1, verbose=1, store=LocalStore(str(note / "store")), callbacks=[Watch()],
    backend=SparkBackend(4, min_num_proc=2, stderr=sys.stderr),
)
if disturbed:
    (note / "hold").touch()
    threading.Thread(target=disturb, daemon=True).start()
fitted = estimator.fit(frame)
with torch.no_grad():
    found = fitted.getModel()(torch.tensor(images[1440:])).argmax(1)
accuracy = float((found == torch.tensor(digits[1440:])).float().mean())
history = [(entry["epoch"], entry["rows"]) for entry in fitted.getHistory()]
print(json.dumps([accuracy, history, (note / "hold").exists()]))
"""
)


def fit(directory: Path, *, disturbed: bool) -> tuple[float, str]:
    """Accuracy of a fit, and what its driver said."""
    notes = directory / f"notes-{disturbed}"
    notes.mkdir()
    done = drive(FIT, directory, 420, NOTES=str(notes), DISTURBED=str(int(disturbed)), OMP_NUM_THREADS="1")
    accuracy, history, held = json.loads(done.stdout.strip().splitlines()[-1])
    assert history == [[epoch, 1440] for epoch in range(12)]
    assert not held
    return accuracy, done.stderr


def test_half_of_the_executors_are_killed_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    accuracy, told = fit(tmp_path, disturbed=True)
    sizes = [line.split()[-2] for line in told.splitlines() if "farandole: world" in line]
    assert sizes[0] == sizes[-1] == "4", told
    assert "2" in sizes, told
    assert "starting again" not in told
    undisturbed, _ = fit(tmp_path, disturbed=False)
    assert undisturbed > 0.9
    assert accuracy > undisturbed - 0.03
