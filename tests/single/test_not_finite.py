# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loss that is NaN or infinite ends training on all ranks, and says where."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.single.training import Here, estimator, fit, line, linear, weights, write

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend
from farandole.spark.common.runs.finite_loss import NotFiniteError
from farandole.spark.torch.training.finite_loss import FiniteLossCheck

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def exploding(rate=1e30):
    model = linear()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=rate)}


def test_a_loss_that_runs_away_ends_the_run_in_its_step(data):
    with pytest.raises(
        NotFiniteError, match=r"the loss is infinite in epoch 1, step 2, on rank 0\. Training ends"
    ):
        estimator(data, **exploding(), run_id="r").fit_on_parquet()
    assert not (data / "runs/r/checkpoint").exists()


def test_terminate_on_nan_false_trains_on(data):
    fitted = estimator(data, **exploding(), epochs=2, terminate_on_nan=False).fit_on_parquet()
    assert not bool(weights(fitted).isfinite().any())
    assert len(fitted.getHistory()) == 2


def test_a_later_epoch_is_named_and_the_checkpoint_of_the_one_before_stays(data):
    def worsen(state):
        if state.epoch == 1:
            with torch.no_grad():
                state.model.weight.fill_(float("nan"))

    with pytest.raises(NotFiniteError, match=r"NaN\) in epoch 3, step 1, on rank 0"):
        estimator(data, linear(), epochs=5, callbacks=[worsen], run_id="r").fit_on_parquet()
    lines = (data / "runs/r/logs/history.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_a_minibatch_function_of_the_users_is_watched_too(data):
    def trains(model, _optimizer, _transform, _loss_fn, inputs):
        return [model(*inputs)], torch.tensor(float("nan"))

    with pytest.raises(NotFiniteError, match="in epoch 1, step 1, on rank 0"):
        fit(data, linear(), train_minibatch_fn=trains)


def test_all_ranks_end_together_and_the_one_that_met_it_is_named(data):
    def on_rank_1(output, label):
        import os

        return ((output - label) ** 2).mean() * (
            float("nan") if os.environ.get("RANK") == "1" else 1.0
        )

    began = time.monotonic()
    backend = LocalBackend(2, verbose=0)
    with pytest.raises(FarandoleJobError, match="on rank 1") as failed:
        estimator(
            data, linear(), backend=backend, loss=on_rank_1, on_failure="restart"
        ).fit_on_parquet()
    assert failed.value.rank == 1
    assert isinstance(failed.value.__cause__, NotFiniteError)
    assert "the loss is not a number (NaN) in epoch 1, step 1, on rank 1" in str(
        failed.value.__cause__
    )
    assert time.monotonic() - began < 90, (
        "a run that would fail again is not started again, and no rank waits"
    )


def test_rows_of_nothing_but_padding_do_not_count(tmp_path):
    x, y = line(rows=9)
    write(tmp_path / "intermediate_train_data", x=x, y=y)

    def root(output, label):
        return (output.reshape(-1) - label).pow(2).sum() / max(len(label), 0)

    assert len(fit(tmp_path, linear(), epochs=2, loss=root).getHistory()) == 2


def test_losses_on_a_gpu_are_kept_there_and_the_first_bad_one_is_named():
    watch = FiniteLossCheck(wanted=True, rank=3, waits=True)
    watch.begin_epoch(4)
    watch._last_check_time = time.monotonic() + 1000
    for step, loss in enumerate([1.0, 2.0, float("nan"), float("inf"), 3.0]):
        watch.check_step_loss(torch.tensor(loss), step)
    with pytest.raises(NotFiniteError, match=r"NaN\) in epoch 5, step 3, on rank 3"):
        watch.check_pending_losses()
    watch.begin_epoch(5)
    watch.check_step_loss(torch.tensor(1.0), 0)
    watch.check_pending_losses()
    watch._last_check_time = 0.0
    with pytest.raises(NotFiniteError, match="infinite in epoch 6, step 2, on rank 3"):
        watch.check_step_loss(torch.tensor(-np.inf), 1)
    quiet = FiniteLossCheck(wanted=False, rank=0)
    quiet.check_step_loss(torch.tensor(np.nan), 0)
    quiet.check_pending_losses()


def test_lightning_names_the_rank_that_met_it(data):
    from farandole.spark.common import LocalStore
    from farandole.spark.lightning import LightningEstimator

    known = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "verbose": 0,
        "random_seed": 1,
        "epochs": 2,
    }
    made = LightningEstimator(
        **exploding(), loss=torch.nn.MSELoss(), store=LocalStore(str(data)), backend=Here(), **known
    )
    with pytest.raises(NotFiniteError, match="the loss is infinite in epoch 1, step 2, on rank 0"):
        made.fit_on_parquet()
    made = made.setTerminateOnNan(False)
    assert len(made.fit_on_parquet().getHistory()) == 2
