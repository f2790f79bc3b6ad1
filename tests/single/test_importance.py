# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Permutation importance, as tasks count it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from farandole.spark.common.model import importance
from farandole.spark.common.model.evaluation import empty_sums
from farandole.spark.common.model.importance import (
    column_importances,
    sum_permuted_evaluations,
)

ROWS = 3000


def rows(parts):
    random = np.random.default_rng(0)
    a, b = random.normal(size=ROWS), random.normal(size=ROWS)
    whole = pa.record_batch([a, b, 3 * a + b], ["0", "1", "2"])
    return whole, [whole.slice(start, ROWS // parts) for start in range(0, ROWS, ROWS // parts)]


def counted(batches, seeds=(1,), metric=None):
    sizes = []

    def outputs(batch):
        sizes.append(batch.num_rows)
        return [3.0 * batch.column(0).to_numpy()[:, None] + batch.column(1).to_numpy()[:, None]]

    sums = sum_permuted_evaluations(
        iter(batches),
        SimpleNamespace(predict_outputs=outputs),
        lambda batch: batch.column(2).to_numpy(),
        empty_sums("values", None),
        [0, 1],
        seeds,
    )
    return column_importances(sums, {1: "b", 0: "a"}, metric), sizes


def test_a_column_counts_as_much_as_its_rows_change_the_prediction(monkeypatch):
    whole, batches = rows(6)
    found, sizes = counted(batches, seeds=[1, 2, 3])
    assert list(found) == ["a", "b"]
    # Exchanging values makes an error of 2 w**2 var(x) on the average, and there is none without.
    assert found["a"] == pytest.approx(2 * 9 * np.var(whole.column(0).to_numpy()), rel=0.05)
    assert found["b"] == pytest.approx(2 * np.var(whole.column(1).to_numpy()), rel=0.05)
    assert sizes == [500] * 6 * 7  # the batches as they are, and two columns in three orders
    assert counted(batches, metric="r2")[0]["a"] == pytest.approx(1.8, rel=0.1)
    monkeypatch.setattr(importance, "MAX_BLOCK_ROWS", 1000)
    assert counted(batches, seeds=[1, 2, 3])[0]["a"] == pytest.approx(found["a"], rel=0.05)


def test_values_are_exchanged_between_batches_of_a_task():
    # Within a batch all rows are equal: only an exchange between batches changes something.
    equal = [
        pa.record_batch([[number] * 10, [0.0] * 10, [3.0 * number] * 10], ["0", "1", "2"])
        for number in (0.0, 1.0)
    ]
    assert counted(equal)[0]["a"] > 1
    with pytest.raises(ValueError, match="metric must be one of mse, rmse, mae, r2: accuracy"):
        counted(equal, metric="accuracy")
    assert counted([])[0] == {"a": 0.0, "b": 0.0}


def test_rows_that_wait_for_an_exchange_are_bounded_in_bytes(monkeypatch):
    whole, batches = rows(6)
    blocks = list(importance._group_batches_into_blocks(iter(batches)))
    assert [block.num_rows for block, _ in blocks] == [ROWS]
    monkeypatch.setattr(importance, "MAX_BLOCK_BYTES", whole.nbytes // 3)
    blocks = list(importance._group_batches_into_blocks(iter(batches)))
    assert [block.num_rows for block, _ in blocks] == [1000, 1000, 1000]


def test_scores_are_counted_only_for_the_area_under_the_curve():
    output, label = np.array([[2.0, -1.0], [-1.0, 2.0], [0.0, 1.0]]), np.array([0, 1, 1])
    sizes = {}
    for by_score in (True, False):
        counts = empty_sums("logits", None, by_score=by_score)
        counts.add(output, label)
        counts.merge(pickle.loads(pickle.dumps(counts)))
        sizes[by_score] = counts.to_evaluation(None)
        assert (counts.by_score is None) != by_score
    assert sizes[True]["area_under_roc"] == 1.0
    assert np.isnan(sizes[False]["area_under_roc"])
    assert sizes[True]["log_loss"] == sizes[False]["log_loss"]
