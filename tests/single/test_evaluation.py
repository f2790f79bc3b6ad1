# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The area under the ROC curve: ties, and many scores."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from farandole.spark.common.model import evaluation
from farandole.spark.common.model.evaluation import BinaryScoreHistogram


def counted(score, label, parts=1):
    whole = BinaryScoreHistogram()
    for some, labels in zip(
        np.array_split(score, parts), np.array_split(label, parts), strict=True
    ):
        part = BinaryScoreHistogram()
        part.add(some, labels)
        whole.merge(part)
    return whole


def test_only_equal_scores_are_ties():
    label = np.array([0, 1, 0, 1])
    close = np.array([0.5, np.nextafter(0.5, 1), -1e-300, -2e-300])
    assert counted(close, label).area_under_roc() == roc_auc_score(label, close) == 0.5
    assert counted(np.array([0.5, 0.5, -0.0, 0.0]), label).area_under_roc() == 0.5
    random = np.random.default_rng(0)
    score, label = random.normal(size=3000).round(2), random.integers(0, 2, 3000)
    assert counted(score, label, 7).area_under_roc() == pytest.approx(
        roc_auc_score(label, score), abs=1e-12
    )
    assert np.isnan(counted(score, np.zeros(3000, np.int64)).area_under_roc())


def test_many_scores_are_counted_in_bounded_memory_whatever_the_order_of_tasks(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_DISTINCT_SCORES", 500)
    random = np.random.default_rng(1)
    label = random.integers(0, 2, 20_000)
    score = random.normal(size=20_000) + label
    order = random.permutation(20_000)
    one, other = counted(score, label, 3), counted(score[order], label[order], 11)
    assert len(one.keys) <= 500
    assert (one.shift, one.keys.tolist(), one.counts.tolist()) == (
        other.shift,
        other.keys.tolist(),
        other.counts.tolist(),
    )
    assert one.counts.sum() == 20_000
    assert one.area_under_roc() == pytest.approx(roc_auc_score(label, score), abs=2e-3)
