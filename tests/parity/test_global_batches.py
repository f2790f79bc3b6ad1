# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `global_batch_size` train the same on any number of processes, also if that number does
not divide the batch.
"""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from tests.parity import global_batches
from tests.parity.global_batches import (
    EPOCHS,
    GLOBAL_BATCH_SIZE,
    ROWS,
    LostRanks,
    assert_close,
    fit,
    train_plainly,
    write,
)

from farandole.spark.common import LocalBackend
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.callbacks import Callback

for module in (global_batches, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # processes cannot import tests

OPTIONS = {
    "plain": {},
    "limited rows": {"batch_size": 2},
    "three passes": {"backward_passes_per_step": 3},
    "sharded": {"shard_optimizer": True, "batch_size": 3},
    "in memory": {"inmemory_cache_all": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_step_is_the_same_on_any_number_of_processes(size, options, gangs, tmp_path):
    path, x, y = write(tmp_path)
    fitted = fit(TorchEstimator, gangs(size), tmp_path, path, **options)
    assert_close(fitted, train_plainly(x, y))
    steps = -(-ROWS // GLOBAL_BATCH_SIZE)
    assert [(one["rows"], one["steps"]) for one in fitted.getHistory()] == [(ROWS, steps)] * EPOCHS


def test_shuffled_rows_and_a_resumed_run_do_not_depend_on_the_number_either(gangs, tmp_path):
    path, _, _ = write(tmp_path)
    options = {"shuffle": True, "random_seed": 3}
    whole = fit(TorchEstimator, gangs(1), tmp_path / "whole", path, **options)
    options |= {"run_id": "parts", "store": str(tmp_path / "parts")}
    fit(TorchEstimator, gangs(2), tmp_path, path, **options, epochs=1)
    rest = fit(TorchEstimator, gangs(1), tmp_path, path, **options)
    assert len(rest.getHistory()) == EPOCHS
    assert_close(rest, whole.getModel().state_dict())


class LossCallback(Callback):
    def __init__(self, ranks):
        self.ranks = ranks

    def on_batch_end(self, state):
        self.ranks.end_batch(state.epoch, state.step)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loss_of_half_of_the_ranks_changes_nothing(size, tmp_path):
    path, x, y = write(tmp_path, 5 * ROWS)
    ranks = LostRanks(tmp_path, size)
    options = {"callbacks": [LossCallback(ranks)], "batch_size": 3}
    backend = LocalBackend(size, min_num_proc=1)
    fitted = fit(TorchEstimator, backend, tmp_path, path, **options)
    ranks.check_losses()
    assert_close(fitted, train_plainly(x, y))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 1}, "fewer rows than there are processes: 2 processes"),
        ({"backward_passes_per_step": 2}, "a multiple of backward_passes_per_step=2"),
        ({"sync_every": 2}, "cannot be combined with sync_every=2"),
        ({"batch_size": 2, "backward_passes_per_step": 3}, "backward_passes_per_step=3"),
        ({"batch_size": 2, "train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
        ({"data_module": dict}, "data_module"),
        ({"loss_reduction": "per_batch"}, 'loss_reduction="per_batch"'),
        ({"inmemory_cache_all": True, "shuffle": True}, "inmemory_cache_all=True"),
    ],
)
def test_options_that_divide_rows_otherwise_are_refused(options, words, gangs, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(TorchEstimator, gangs(2), tmp_path, write(tmp_path)[0], **options)


def test_a_batch_norm_beside_a_limit_of_rows_is_refused(gangs, tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        global_batch_size=GLOBAL_BATCH_SIZE,
        batch_size=2,
        store=str(tmp_path / "store"),
        backend=gangs(2),
    )
    with pytest.raises(ValueError, match="the batch norm layer '0' would have the mean"):
        estimator.fit_on_parquet(path=write(tmp_path)[0])


def step_by_own_loss(model, optimizer, transform_outputs, loss_fn, inputs, labels):
    del transform_outputs, loss_fn
    optimizer.zero_grad()
    outputs = model(*inputs)
    loss = torch.nn.functional.cross_entropy(outputs, labels[0].long().reshape(-1))
    loss.backward()
    optimizer.step()
    return outputs, loss


def step_by_given_loss(model, optimizer, transform_outputs, loss_fn, inputs, labels):
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels)
    loss.backward()
    optimizer.step()
    return outputs, loss


def test_a_minibatch_function_needs_the_given_loss(gangs, tmp_path):
    path, x, y = write(tmp_path)
    options = {"train_minibatch_fn": step_by_given_loss}
    assert_close(fit(TorchEstimator, gangs(2), tmp_path, path, **options), train_plainly(x, y))
    options = {"train_minibatch_fn": step_by_own_loss}
    with pytest.raises(Exception, match="must compute its loss by its argument loss_fn"):
        fit(TorchEstimator, gangs(2), tmp_path, path, **options)
