# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What is left of timelines where no job ran, no rank sent one, or several jobs ran; and reports that are malformed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from farandole.runner import timelines
from farandole.runner.show.training import Training


def test_a_job_that_never_began_leaves_no_file_and_says_nothing(tmp_path, capsys):
    path = tmp_path / "trace.json"
    with timelines.gathered(path):
        assert path.exists()
    assert not path.exists()
    assert capsys.readouterr().err == ""
    path.write_text("of a run before")
    with timelines.gathered(path):
        assert timelines.variables() == {"FARANDOLE_TIMELINE": "GATHER"}
    assert path.read_text() == "of a run before"
    assert "no rank has sent a timeline" in capsys.readouterr().err


def test_each_job_begins_its_own_timeline(tmp_path):
    with timelines.gathered(tmp_path / "trace.json") as gathering:
        timelines.variables()
        first = gathering._pieces
        timelines.take(0, b'{"offset":0,"size":2}\n[]')
        assert gathering._came
        timelines.variables()
        assert gathering._pieces is not first
        assert not gathering._came
    assert timelines.variables() == {}


@pytest.mark.parametrize(
    "record",
    [{"kind": "epoch", "loss": 0.1}, {"kind": "epoch", "entry": {}}, {"kind": "epoch", "entry": [1]}, {"kind": "step"}],
)
def test_a_malformed_report_fails_no_job(record):
    told = []
    journal = SimpleNamespace(put=lambda _run, key, _body, **_options: told.append(key), gauge=lambda *_: None)
    training = Training(None, "mine", "run", journal=journal)
    training.record(record)
    training.said(0, record)
    assert not any(key.startswith("epoch/") for key in told)
    training.record({"kind": "epoch", "entry": {"epoch": 3, "train": {"loss": 0.5, "all_metrics": []}}})
    assert "epoch/00000003" in told
