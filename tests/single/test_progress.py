# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Progress of a fit in a terminal, and its history as rows."""

import io
import types

import pytest

from farandole.runner.show import history
from farandole.spark.common.show import progress

ENTRY = {
    "epoch": 1,
    "train": {"loss": 0.5, "all_metrics": [{"accuracy": 0.75}]},
    "validation": {"loss": 0.25, "all_metrics": [{"accuracy": 0.875}]},
    "seconds": 2.0,
    "rows": 100,
}
EPOCH = {"kind": "epoch", "entry": ENTRY, "epochs": 3, "steps": 4, "rows_per_second": 1234.5}
STEP = {
    "kind": "step",
    "epoch": 0,
    "epochs": 3,
    "step": 2,
    "steps": 4,
    "rows_per_second": 99.0,
    "loss": 0.6,
}


def test_an_epoch_is_one_line_without_a_terminal():
    stream = io.StringIO()
    with progress.ProgressLines(stream) as shown:
        shown.show_report(STEP)
        shown.show_report(EPOCH)
    expected = (
        "epoch 2/3  loss 0.5000  accuracy 0.7500  val_loss 0.2500  val_accuracy 0.8750  1,234 "
        "rows/s\n"
    )
    assert stream.getvalue() == expected


def test_a_long_epoch_is_heard_of_in_between(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_LINE_INTERVAL_SECONDS", 0.0)
    with progress.ProgressLines(stream) as shown:
        shown.show_report(STEP)
    assert stream.getvalue() == "epoch 1/3  batch 2/4  loss 0.6000  99 rows/s\n"


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which a test may change."""
    found = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: found.now)
    return found


def test_lines_of_a_run_that_continues_tell_the_time_that_is_left(clock):
    stream = io.StringIO()
    with progress.ProgressLines(stream) as shown:
        shown.show_report(EPOCH | {"epochs": 4})  # half of it was done before
        clock.now = 100.0
        shown.show_report(STEP | {"epoch": 2, "epochs": 4})
        clock.now = 200.0
        shown.show_report(EPOCH | {"entry": ENTRY | {"epoch": 3}, "epochs": 4})
    first, step, last = stream.getvalue().splitlines()
    assert first.endswith("1,234 rows/s")
    assert step.endswith("99 rows/s  about 5 min left")  # an eighth in 100 s, three eighths to go
    assert last.endswith("1,234 rows/s")


def test_a_bar_of_a_run_that_continues_tells_the_time_that_is_left(clock, capfd, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with progress.ProgressBar() as shown:
        shown.show_report(EPOCH | {"epochs": 4})
        clock.now = 100.0
        shown.show_report(STEP | {"epoch": 2, "epochs": 4})
        shown._rich.refresh()  # its thread looks at the clock, too
    assert "about 5 min left" in capfd.readouterr().err


def test_verbose_0_is_silent(capfd):
    with progress.create_progress_display(0) as shown:
        shown.show_message("nothing")
        shown.show_report(STEP)
        shown.show_report(EPOCH)
    assert capfd.readouterr() == ("", "")


def test_a_bar_shows_epoch_batch_speed_loss_and_validation(capfd, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with progress.ProgressBar() as shown:
        shown.show_message("data [is] ready")
        shown.show_report(EPOCH)
        shown.show_report(STEP | {"epoch": 2})
    told = capfd.readouterr().err
    for part in (
        "data [is] ready",
        "3/3",
        "10/12",
        "99 rows/s",
        "loss 0.6000",
        "val_accuracy 0.8750",
    ):
        assert part in told


def test_an_unknown_report_is_passed_over():
    with progress.ProgressLines(io.StringIO()) as shown:
        shown.show_report({"kind": "something newer"})


@pytest.mark.parametrize("name", ["epochs", "steps", "rows_per_second"])
def test_a_report_of_a_user_that_lacks_what_estimators_add_is_passed_over(name):
    stream = io.StringIO()
    with progress.ProgressLines(stream) as shown:
        for report in (EPOCH, STEP):
            shown.show_report({key: value for key, value in report.items() if key != name})
            shown.show_report(report | {name: None})
    assert stream.getvalue() == ""


def test_a_number_that_is_missing_is_not_shown(capfd):
    pytest.importorskip("rich")
    entry = {
        "epoch": 0,
        "train": {"loss": None, "all_metrics": [{"accuracy": 0.5, "recall": None}]},
        "seconds": None,
    }
    stream = io.StringIO()
    for shown in (progress.ProgressLines(stream), progress.ProgressBar()):
        with shown:
            shown.show_report(EPOCH | {"entry": entry})
    assert stream.getvalue() == "epoch 1/3  accuracy 0.5000  1,234 rows/s\n"
    assert history.flatten_history_entry(entry) == {"epoch": 0, "accuracy": 0.5}
    assert "Traceback" not in capfd.readouterr().err


def test_the_history_becomes_one_row_per_epoch():
    frame = history.history_frame([ENTRY, ENTRY | {"epoch": 2}])
    assert list(frame.columns) == [
        "epoch",
        "loss",
        "accuracy",
        "val_loss",
        "val_accuracy",
        "seconds",
        "rows",
    ]
    assert frame["epoch"].tolist() == [1, 2]
