# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator on Spark loses half of its executors in the middle of a fit and gets new ones; it
learns as well.
"""

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
from sklearn.datasets import load_digits
from farandole.spark.common import LocalStore, SparkBackend

note, EPOCHS = pathlib.Path(os.environ["NOTES"]), 12
disturbed = os.environ["DISTURBED"] == "1"

def watched(rank, size, epoch):
    \"\"\"Tells the driver's thread how far it is; in the middle of the run it waits for what that does.\"\"\"
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
rows = [(row.tolist(), int(label)) for row, label in zip(images[:1440], digits[:1440])]
frame = spark.createDataFrame(rows, "x array<float>, y long")
known = dict(
    feature_cols=["x"], label_cols=["y"], batch_size=16, epochs=EPOCHS, random_seed=1, verbose=1,
    store=LocalStore(str(note / "store")), backend=SparkBackend(4, min_num_proc=2, stderr=sys.stderr),
)
ESTIMATOR
if disturbed:
    (note / "hold").touch()
    threading.Thread(target=disturb, daemon=True).start()
fitted = estimator.fit(frame)
accuracy = float((predicted(fitted.getModel(), images[1440:]) == digits[1440:]).mean())
history = fitted.getHistory()
if not isinstance(history, dict):  # Keras has no number of rows, and a list for each of the others
    assert [(entry["epoch"], entry["rows"]) for entry in history] == [(at, 1440) for at in range(EPOCHS)], history
print(json.dumps([accuracy, len(history["loss"] if isinstance(history, dict) else history), (note / "hold").exists()]))
"""  # noqa: E501
)
TORCH = """
import torch
from farandole.spark.torch import TorchEstimator

def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 10),
    )

def predicted(model, images):
    with torch.no_grad():
        return model(torch.tensor(images)).argmax(1).numpy()

class Watch:
    def on_batch_end(self, state):
        watched(state.rank, state.size, state.epoch)

model = network()
estimator = TorchEstimator(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9),
    loss=torch.nn.CrossEntropyLoss(), callbacks=[Watch()], **known
)
"""
LIGHTNING = (
    TORCH[: TORCH.index("class Watch")]
    + """
import lightning
from farandole.spark.lightning import LightningEstimator

class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, images):
        return self.inner(images)

    def training_step(self, batch, _index):
        return torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

class Watch(lightning.Callback):
    def on_train_batch_end(self, trainer, _module, _outputs, _batch, _index):
        watched(trainer.global_rank, trainer.world_size, trainer.current_epoch)

estimator = LightningEstimator(model=Digits(), callbacks=[Watch()], **known)
"""
)
KERAS = """
import keras
from farandole.spark.keras import KerasEstimator

def predicted(model, images):
    return keras.ops.convert_to_numpy(model(images)).argmax(1)

class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        import farandole.keras as hvd
        watched(hvd.rank(), hvd.size(), self.epoch)

keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.layers.Input((64,)), keras.layers.Reshape((8, 8, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10),
])
estimator = KerasEstimator(
    model=model, optimizer=keras.optimizers.SGD(0.0125, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), callbacks=[Watch()], **known
)
"""


GOOD = 0.9
"""A share of right answers that each network exceeds without a disturbance."""


def fit(directory: Path, estimator: str, *, disturbed: bool) -> tuple[float, str]:
    """Accuracy of a fit, and what its driver said."""
    notes = directory / f"notes-{disturbed}"
    notes.mkdir()
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    code = FIT.replace("ESTIMATOR", estimator)
    done = drive(code, directory, 420, NOTES=str(notes), DISTURBED=str(int(disturbed)), **env)
    accuracy, epochs, held = json.loads(done.stdout.strip().splitlines()[-1])
    assert epochs == 12
    assert not held
    return accuracy, done.stderr


@pytest.mark.parametrize(
    "estimator", [TORCH, KERAS, LIGHTNING], ids=["torch", "keras", "lightning"]
)
def test_half_of_the_executors_are_killed_in_the_middle_of_a_fit(
    tmp_path: Path, estimator: str
) -> None:
    accuracy, told = fit(tmp_path, estimator, disturbed=True)
    sizes = [line.split()[-2] for line in told.splitlines() if "farandole: world" in line]
    assert sizes[0] == sizes[-1] == "4", told
    assert "2" in sizes, told
    assert "starting again" not in told
    assert accuracy > GOOD - 0.03
    if estimator is TORCH:  # the others would take as long again
        undisturbed, _ = fit(tmp_path, estimator, disturbed=False)
        assert undisturbed > GOOD
        assert accuracy > undisturbed - 0.03
