# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit that deletes old prepared data of its store."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from tests.single.training import estimator, linear

from farandole.data import prepare_data
from farandole.spark.common.data.tidying import tidy
from farandole.spark.torch import TorchEstimator

DAY = 24 * 3600


def rows(seed):
    values = np.random.default_rng(seed).random((64, 3), dtype=np.float32)
    return pd.DataFrame(values, columns=["a", "b", "y"])


def aged(directory, days):
    then = time.time() - days * DAY
    for folder, _, names in os.walk(directory):
        for name in names:
            os.utime(os.path.join(folder, name), (then, then))


def test_a_fit_deletes_prepared_data_that_is_older_and_not_in_use(tmp_path, capsys):
    made = [prepare_data(rows(seed), tmp_path, label_cols=["y"]) for seed in range(3)]
    folders = [tmp_path / f"intermediate_train_data.{data.index}" for data in made]
    made[0].release()
    made[1].release()  # the third one is in use
    mine = tmp_path / "mine.txt"
    mine.touch()
    for folder, days in zip(folders, (40, 20, 40), strict=True):
        aged(folder, days)
    aged(mine.parent / "mine.txt", 40)
    columns = {"feature_cols": [["a", "b"]], "epochs": 1, "run_id": "r", "verbose": 1}
    estimator(tmp_path, linear(), **columns).fit(rows(3))
    assert all(folder.exists() for folder in folders), "nothing is deleted unless it is asked for"
    estimator(tmp_path, linear(), **columns, gc_older_than="30d").fit(rows(3))
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert f"deleted prepared data that was old and not in use: {folders[0].name}" in capsys.readouterr().err
    assert mine.exists()
    assert (tmp_path / "runs" / "r" / "checkpoint").exists()
    made[2].release()


def test_ages_are_seconds():
    made = TorchEstimator()
    for given, seconds in (("90s", 90), ("2m", 120), ("1h", 3600), ("7d", 7 * DAY), ("1w", 7 * DAY), (5, 5)):
        assert made.setGcOlderThan(given).getGcOlderThan() == seconds
    assert made.setGcOlderThan(timedelta(days=2)).getGcOlderThan() == 2 * DAY
    assert made.setGcOlderThan(None).getGcOlderThan() is None


def test_a_store_that_cannot_be_tidied_does_not_end_the_fit():
    class Store:
        def gc(self, older_than):
            raise PermissionError(f"no: {older_than}")

    told = []
    tidy(Store(), 3.0, told.append)
    assert told == ["old prepared data cannot be deleted: no: 3.0"]
    tidy(Store(), None, pytest.fail)
