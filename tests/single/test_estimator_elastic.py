# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits whose workers are lost and replaced in the middle: nothing starts again, each row of an
epoch counts once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import lightning
import numpy as np
import pytest
import torch
from tests.single.training import write

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend, LocalStore, SparkBackend
from farandole.spark.common import estimator as estimators
from farandole.spark.common.runs.elastic_run import COMMIT_INTERVAL_STEPS
from farandole.spark.common.show.progress import ProgressDisplay
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.callbacks import Callback

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

ROWS, BATCH, EPOCHS, RATE, DECAY = 400, 4, 6, 0.001, 0.5


@pytest.fixture
def rows(tmp_path):
    """Numbers between one and two."""
    x = np.random.default_rng(3).uniform(1.0, 2.0, (ROWS, 1)).astype(np.float32)
    write(tmp_path / "intermediate_train_data", x=x, y=x[:, 0].copy())
    write(tmp_path / "intermediate_val_data", x=x[:40], y=x[:40, 0].copy())
    return x


def summed(output, _label):
    """Adds each row to the weight, by an amount that does not depend on the number of processes."""
    return -output.mean()


class Disturbance(Callback):
    """Kills processes once in the middle of an epoch, and slows training down while there is only
    one.

    Args:
        folder: for notes.
        ranks: of those to kill.
    """

    def __init__(self, folder, ranks):
        self.folder, self.ranks = str(folder), ranks

    def note(self, **what):
        with (Path(self.folder) / f"note-{os.getpid()}").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def on_train_begin(self, state):
        self.note(begins=state.rank, size=state.size)

    def on_epoch_begin(self, state):
        self.note(epoch=state.epoch, rank=state.rank)

    def on_batch_end(self, state):
        self.note(size=state.size)
        marker = Path(self.folder) / f"killed-{state.rank}"
        if (
            (state.epoch, state.step) == (1, 14)
            and state.rank in self.ranks
            and not marker.exists()
        ):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.size == 1:
            time.sleep(0.05)  # at most a minute for the one that joins


def notes(folder):
    """Returns the notes of each process."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("note-*")
    ]


def fit(folder, **params):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=RATE),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
        "loss": summed,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "validation": 0.1,
        "verbose": 1,
        "store": LocalStore(str(folder)),
        "backend": LocalBackend(2, min_num_proc=1),
    }
    return TorchEstimator(**known | params).fit_on_parquet()


def check(fitted, rows):
    """Sees that each row of each epoch has moved the weight once, at the rate of its epoch."""
    rates = sum(RATE * DECAY**epoch for epoch in range(EPOCHS))
    assert float(fitted.getModel().weight.detach()) == pytest.approx(
        rates / BATCH * float(rows.sum()), rel=1e-4
    )
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == list(range(EPOCHS))
    assert {entry["rows"] for entry in history} == {ROWS}


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_killed_worker_is_replaced_and_each_row_of_each_epoch_counts_once(
    rows, tmp_path, capfd, in_memory
):
    callbacks = [Disturbance(tmp_path, (1,))]
    check(fit(tmp_path, callbacks=callbacks, inmemory_cache_all=in_memory), rows)
    assert (tmp_path / "killed-1").exists()
    told = notes(tmp_path)
    assert len(told) == 3, told
    (survivor,) = (said for said in told if said[0] == {"begins": 0, "size": 2})
    epochs = [one["epoch"] for one in survivor if "epoch" in one]
    assert epochs == list(range(EPOCHS)), "a survivor begins each epoch once"
    sizes = [one["size"] for one in survivor if set(one) == {"size"}]
    assert (sizes[0], min(sizes), sizes[-1]) == (2, 1, 2)
    (new,) = (said for said in told if said[0]["begins"] == 1 and said[1]["epoch"] > 0)
    assert [one["epoch"] for one in new if "epoch" in one] == list(range(new[1]["epoch"], EPOCHS))
    err = capfd.readouterr().err
    assert "starting again" not in err
    assert "was ended by SIGKILL" in err


def test_a_fit_that_loses_all_its_workers_continues_from_its_checkpoint(rows, tmp_path):
    check(fit(tmp_path, callbacks=[Disturbance(tmp_path, (0, 1))], run_id="run"), rows)
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-0", "killed-1"}
    begun = [one["epoch"] for said in notes(tmp_path) for one in said[:2] if "epoch" in one]
    assert sorted(begun) == [0, 0, 1, 1], "new processes begin with the epoch that was under way"


class NotedRates(Disturbance):
    """Also notes the learning rate of one process after each step."""

    def on_batch_end(self, state):
        rate = state.optimizer.param_groups[0]["lr"] / state.size
        self.note(epoch_of_rate=state.epoch, of_size=state.size, rate=rate)
        super().on_batch_end(state)


def test_a_schedule_by_name_follows_the_rows_when_a_worker_is_lost(rows, tmp_path):
    fitted = fit(tmp_path, callbacks=[NotedRates(tmp_path, (1,))], lr_scheduler="linear")
    assert {entry["rows"] for entry in fitted.getHistory()} == {ROWS}
    (survivor,) = (said for said in notes(tmp_path) if said[0] == {"begins": 0, "size": 2})
    noted = [one for one in survivor if "rate" in one]
    assert noted[-1]["rate"] == pytest.approx(0.0, abs=1e-12)
    alone = [one["rate"] for one in noted if (one["epoch_of_rate"], one["of_size"]) == (1, 1)]
    # The step that was under way is repeated from the last commit, after so many rows of both.
    reached = ROWS + COMMIT_INTERVAL_STEPS * 2 * BATCH
    wanted = [
        RATE * (1 - (reached + step * BATCH) / (ROWS * EPOCHS)) for step in range(1, len(alone) + 1)
    ]
    assert alone == pytest.approx(wanted, rel=1e-6)


class Fails(Callback):
    """Raises on one rank alone."""

    def on_batch_end(self, state):
        if (state.rank, state.step) == (1, 3):
            raise LookupError("there is no such label")


def test_an_error_of_one_worker_ends_the_fit(rows, tmp_path):
    with pytest.raises(FarandoleJobError, match="LookupError: there is no such label") as caught:
        fit(tmp_path, callbacks=[Fails()])
    assert isinstance(caught.value.__cause__, LookupError)


class Sum(lightning.LightningModule):
    """Adds each row of all processes to the weight, for any number of them."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.inner.weight)

    def training_step(self, batch, _index):
        return -self.inner(batch["x"]).sum() * self.trainer.world_size

    def validation_step(self, batch, _index):
        self.log("val_mean", self.inner(batch["x"]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
        }


class Offering(ProgressDisplay):
    """Shows nothing, and offers to stop the fit."""

    def offer_stop(self, stop):
        return contextlib.nullcontext(stop)


def looking():
    return sum(one.name == "farandole-stop" for one in threading.enumerate())


class Disturbs(lightning.Callback):
    """Like `Disturbance`; also notes the threads that look whether the user has stopped the fit."""

    def __init__(self, folder):
        self.folder = str(folder)

    def on_train_epoch_start(self, trainer, _module):
        with (Path(self.folder) / f"note-{os.getpid()}").open("a") as file:
            file.write(json.dumps([trainer.current_epoch, trainer.world_size, looking()]) + "\n")

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, index):
        marker = Path(self.folder) / "killed"
        if (trainer.current_epoch, index, trainer.global_rank) == (
            1,
            13,
            1,
        ) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.world_size == 1:
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
def test_a_killed_worker_of_lightning_is_replaced_and_each_row_of_each_epoch_counts_once(
    rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(estimators, "create_progress_display", lambda _verbose: Offering())
    fitted = LightningEstimator(
        model=Sum(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=EPOCHS,
        validation=0.1,
        verbose=1,
        store=LocalStore(str(tmp_path)),
        callbacks=[Disturbs(tmp_path)],
        backend=LocalBackend(2, min_num_proc=1),
    ).fit_on_parquet()
    assert (tmp_path / "killed").exists()
    rates = sum(RATE * DECAY**epoch for epoch in range(EPOCHS))
    assert float(fitted.getModel().inner.weight.detach()) == pytest.approx(
        rates * float(rows.sum()), rel=1e-4
    )
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == list(range(EPOCHS))
    assert {entry["rows"] for entry in history} == {ROWS}
    told = notes(tmp_path)
    assert len(told) == 3
    (survivor,) = (said for said in told if said[0][:2] == [0, 2] and said[-1][0] == EPOCHS - 1)
    epochs, sizes, threads = zip(*survivor, strict=True)
    assert list(epochs) == sorted(epochs)
    assert set(sizes) == {1, 2}
    assert max(threads) == 1, "one thread for all worlds"


def test_numbers_of_processes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="3 <= 2 <= 2 does not"):
        LocalBackend(2, min_num_proc=3)
    with pytest.raises(ValueError, match="max_num_proc must be at least 1: 0"):
        SparkBackend(2, max_num_proc=0)
    with pytest.raises(ValueError, match=r"these are for elastic jobs.*reset_limit"):
        LocalBackend(2, reset_limit=3)
    with pytest.raises(TypeError, match="run_elastic takes, but not warm"):
        SparkBackend(2, min_num_proc=1, warm=True)
    assert LocalBackend(max_num_proc=3).num_processes() == 3
    assert LocalBackend(2, min_num_proc=1).plain()["min_num_proc"] == 1
    assert SparkBackend(2, max_num_proc=4, elastic_timeout=9.0).plain() == {
        "num_proc": 2,
        "max_num_proc": 4,
        "elastic_timeout": 9.0,
    }
