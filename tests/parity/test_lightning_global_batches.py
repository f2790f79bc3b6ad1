# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lightning's fits with `global_batch_size` train the same on any number of processes."""

from __future__ import annotations

import sys

import cloudpickle
import lightning
import pytest
from tests.parity import global_batches
from tests.parity.global_batches import ROWS, LostRanks, assert_close, fit, train_plainly, write

from farandole.spark.common import LocalBackend
from farandole.spark.lightning import LightningEstimator

for module in (global_batches, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # processes cannot import tests

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|self.trainer).*"
)


@pytest.mark.parametrize(
    ("size", "passes"),
    [(2, 1), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 1), (2, 3), (4, 1)))],
)
def test_steps_are_the_same_on_any_number_of_processes(size, passes, gangs, tmp_path):
    path, x, y = write(tmp_path)
    options = {"backward_passes_per_step": passes}
    fitted = fit(LightningEstimator, gangs(size), tmp_path, path, **options)
    assert_close(fitted, train_plainly(x, y))


class LossCallback(lightning.Callback):
    def __init__(self, ranks):
        self.ranks = ranks

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, index):
        self.ranks.end_batch(trainer.current_epoch, index + 1)


@pytest.mark.slow
def test_the_loss_of_half_of_the_ranks_changes_nothing(tmp_path):
    path, x, y = write(tmp_path, 5 * ROWS)
    ranks = LostRanks(tmp_path, 4)
    options = {"callbacks": [LossCallback(ranks)]}
    fitted = fit(LightningEstimator, LocalBackend(4, min_num_proc=1), tmp_path, path, **options)
    ranks.check_losses()
    assert_close(fitted, train_plainly(x, y))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2}, "batch_size=2"),
        ({"trainer_args": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches"),
    ],
)
def test_options_that_divide_rows_otherwise_are_refused(options, words, gangs, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(LightningEstimator, gangs(2), tmp_path, write(tmp_path)[0], **options)


def test_a_schedule_of_other_passes_is_refused(gangs, tmp_path):
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({1: 2})
    path = write(tmp_path)[0]
    with pytest.raises(ValueError, match=r"other numbers by epoch: \{.*1: 2"):
        fit(LightningEstimator, gangs(2), tmp_path, path, callbacks=[scheduler])


class OtherPasses(lightning.Callback):
    def on_train_epoch_start(self, trainer, _module):
        trainer.accumulate_grad_batches = 2


def test_a_callback_that_sets_other_passes_ends_the_fit(gangs, tmp_path):
    with pytest.raises(Exception, match="has set accumulate_grad_batches: 2"):
        fit(
            LightningEstimator,
            gangs(2),
            tmp_path,
            write(tmp_path)[0],
            callbacks=[OtherPasses()],
        )
