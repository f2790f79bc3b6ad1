# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints of a rank on their way to Tune, when another process becomes rank 0."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
from pyarrow import fs

from farandole.ray.trial_ranks import RankTuneSession
from farandole.spark import task
from ray import tune


@pytest.fixture
def sent(monkeypatch):
    """Records that ranks have sent and the process of the trial has not passed on yet."""
    records = []
    monkeypatch.setattr(task, "report", records.append)
    return records


@pytest.fixture
def told(monkeypatch):
    """Metrics, and names and contents of the files of the checkpoint, of each report to Tune."""
    reports = []

    def report(metrics, checkpoint=None):
        with checkpoint.as_directory() as folder:
            content = {path.name: path.read_text() for path in Path(folder).iterdir()}
        reports.append((metrics["step"], content))

    monkeypatch.setattr(tune, "report", report)
    return reports


@pytest.mark.parametrize("seed", range(8))
def test_reports_of_successive_ranks_0_keep_their_own_checkpoints(tmp_path, sent, told, seed):
    def begin():
        return pickle.loads(session)  # each process gets the session of the trial

    session = pickle.dumps(
        RankTuneSession(
            "e", "t", "i", "d", None, None, fs.LocalFileSystem(), f"{tmp_path}/reported"
        )
    )
    driver, rank, draw, expected = begin(), begin(), random.Random(seed), []
    for step in range(20):
        rank.rank = 0
        made = tmp_path / f"made-{step}"
        made.mkdir()
        for name in draw.sample("abcd", draw.randint(1, 4)):
            (made / name).write_text(f"{step}")
        expected.append((step, {path.name: path.read_text() for path in made.iterdir()}))
        rank.report({"step": step}, tune.Checkpoint.from_directory(made))
        if draw.random() < 0.4:
            rank = begin()  # rank 0 was lost, and another process starts
            if draw.random() < 0.5:  # which was lost while it copied a checkpoint
                rank._copy_checkpoint(tune.Checkpoint.from_directory(made))
                rank = begin()
        while sent and draw.random() < 0.5:
            driver.forward_report(sent.pop(0))
    while sent:
        driver.forward_report(sent.pop(0))
    assert told == expected
    driver.remove_checkpoint_copies()
    assert not (tmp_path / "reported").exists()
