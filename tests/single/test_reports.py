# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Listeners get reports that have the form of their kind, and only those."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from farandole.runner import event_handler, report_validation, stall_events
from farandole.runner.show.training_run_reports import TrainingRun

STEP = {"kind": "step", "epoch": 0, "step": 3, "steps": 10, "loss": 0.5}
EPOCH = {"kind": "epoch", "entry": {"epoch": 3, "train": {"loss": 0.5, "all_metrics": []}}}


@pytest.fixture
def listeners(monkeypatch):
    """`send` hands over a report of rank 1; `rows` names the journal's rows, `progress` has what
    was passed on.
    """
    monkeypatch.setattr(report_validation, "_LAST_WARNING_TIMES", {})
    found = SimpleNamespace(rows=[], progress=[])
    put = lambda _run, key, _body, **_options: found.rows.append(key)  # noqa: E731
    training = TrainingRun(
        None, "mine", "run", others=[SimpleNamespace(put_row=put, set_gauge=lambda *_: None)]
    )
    found.rows.clear()

    def send(record, kind=event_handler.PROGRESS_KIND):
        data = record if isinstance(record, bytes) else json.dumps(record).encode()
        event_handler.dispatch_worker_record(
            (0, 1), kind, data, training, lambda rank, told: found.progress.append((rank, told))
        )

    found.send = send
    return found


def test_every_listener_gets_a_report_of_the_right_form(listeners):
    others = [{"kind": "mine", "epoch": "first"}, {}]
    for record in (STEP, EPOCH, *others):
        listeners.send(record)
    assert listeners.rows == ["step", "epoch/00000003"]
    assert listeners.progress == [(1, record) for record in (STEP, EPOCH, *others)]
    listeners.send(
        {
            "kind": "epoch",
            "entry": {"epoch": 4, "train": {"loss": float("nan"), "all_metrics": [{"a": 1}]}},
        }
    )
    assert listeners.rows[-1] == "epoch/00000004"
    missing = {"loss": None, "all_metrics": [{"accuracy": None}]}
    listeners.send(
        {"kind": "epoch", "entry": {"epoch": 5, "train": missing, "seconds": None}, "epochs": None}
    )
    assert listeners.rows[-1] == "epoch/00000005"


def test_a_stall_report_becomes_an_event(listeners):
    text = (
        "One or more tensors wait for remainder of ranks for more than 60 seconds.\nMissing "
        "ranks:\n"
        "1: [loss, gradient ...]\n12!: [loss]\nallreduce of loss has waited for 61.2s; submitted "
        "by ranks: 0\n"
        "Rank 1 on b waits in no operation. Its Python threads:\n3: [a line of its own]"
    )
    found = stall_events.parse_stall_report(text)
    assert found == {"what": "stall: others wait for ranks 1, 12", "reason": text}
    assert stall_events.parse_stall_report("allreduces of tensors on GPUs go by CUDA IPC") is None
    listeners.send(found, "event")
    assert listeners.rows == ["event/000001"]
    assert listeners.progress == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xff{", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        ([STEP], "it is no JSON object"),
        ({"kind": "step"}, "its epoch is no whole number"),
        (STEP | {"steps": True}, "its steps is no whole number"),
        (STEP | {"step": -1}, "its step is no whole number"),
        (STEP | {"loss": "0.5"}, "its loss is no number"),
        ({"kind": "epoch", "loss": 0.1}, "its entry is no JSON object"),
        ({"kind": "epoch", "entry": {}}, "its epoch is no whole number"),
        (
            {"kind": "epoch", "entry": {"epoch": 0, "train": {"all_metrics": []}}},
            "its part 'train' has no loss",
        ),
        (
            {"kind": "epoch", "entry": {"epoch": 0, "train": {"loss": [1], "all_metrics": []}}},
            "the loss of its part 'train' is no number",
        ),
        (
            {"kind": "epoch", "entry": {"epoch": 0, "validation": {"loss": 1.0}}},
            "all_metrics of its part 'validation' is no list of JSON objects",
        ),
        (
            {
                "kind": "epoch",
                "entry": {"epoch": 0, "train": {"loss": 1.0, "all_metrics": [{"note": "good"}]}},
            },
            "the metric 'note' of its part 'train' is no number",
        ),
        ({"kind": "epoch", "entry": {"epoch": 0, "seconds": "2"}}, "its seconds is no number"),
        (EPOCH | {"epochs": "3"}, "its epochs is no whole number"),
        (STEP | {"epochs": 0}, "its epochs is 0"),
        (EPOCH | {"steps": 0.5}, "its steps is no whole number"),
        (STEP | {"rows_per_second": "fast"}, "its rows_per_second is no number"),
    ],
)
def test_no_listener_gets_a_malformed_report_and_one_line_of_the_log_says_why(
    listeners, caplog, record, reason
):
    with caplog.at_level(logging.WARNING, logger="farandole"):
        listeners.send(record)
        listeners.send(record)
    assert listeners.rows == listeners.progress == []
    assert [one.getMessage() for one in caplog.records] == [
        f"a report of rank 1 is left out: {reason}"
    ]


def test_reports_of_a_rank_are_checked_too(listeners, caplog):
    with caplog.at_level(logging.WARNING, logger="farandole"):
        listeners.send(b"{", event_handler.RANK_KIND)
        listeners.send({"gpu": 1}, event_handler.RANK_KIND)
    assert len(caplog.records) == 1
    assert listeners.rows == ["ranks"]
