# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The notebook output of a fit: a curve of steps, the remaining time, and at most a few
kilobytes.
"""

from __future__ import annotations

import re
import sys
import types

import pytest

from farandole.runner.show.training_run_reports import TrainingRun
from farandole.spark.common.show import notebook
from farandole.spark.common.show.chart import thin_rows
from farandole.spark.common.show.rank_table import render_rank_table


def step(epoch, number, loss=0.5, epochs=4, steps=100):
    return {
        "kind": "step", "epoch": epoch, "step": number, "steps": steps, "epochs": epochs,
        "loss": loss,
        "rows_per_second": 10.0,
    }  # fmt: skip


def epoch(number, loss=0.5, epochs=4):
    entry = {
        "epoch": number,
        "train": {"loss": loss, "all_metrics": []},
        "seconds": 1.0,
        "rows": 10,
    }
    return {
        "kind": "epoch",
        "entry": entry,
        "epochs": epochs,
        "steps": 100,
        "rows_per_second": 10.0,
    }


@pytest.fixture
def cell(monkeypatch):
    """An output of a cell: `pages` has what it showed, `clock` the time in seconds."""
    found = types.SimpleNamespace(pages=[], clock=0.0)
    handle = types.SimpleNamespace(update=found.pages.append)
    display = types.ModuleType("IPython.display")
    display.HTML = lambda text: text
    display.display = lambda *_, **options: handle if options["display_id"] else None
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook.time, "monotonic", lambda: found.clock)
    return found


def test_the_curve_grows_within_the_first_epoch(cell):
    shown = notebook.NotebookDisplay()
    for number in (1, 2, 3):
        cell.clock += 1
        shown.show_report(step(0, number, loss=1 / number))
    lines = re.findall(r'<polyline points="([^"]+)"', cell.pages[-1])
    assert [len(line.split()) for line in lines] == [3]
    cell.clock += 1
    shown.show_report(epoch(0))
    assert len(re.findall("<polyline|<circle", cell.pages[-1])) == 2, "the steps and the epoch"


def test_the_time_that_is_left_is_shown_for_a_run_that_continues_from_a_checkpoint(cell):
    shown = notebook.NotebookDisplay()
    shown.show_report(epoch(1))  # half of it was done before
    assert "left" not in cell.pages[-1]
    cell.clock = 100.0
    shown.show_report(step(2, 50))
    assert "about 5 min left" in cell.pages[-1]  # an eighth in 100 s, three eighths to go
    shown.show_report(epoch(3))
    assert "left" not in cell.pages[-1]


def test_steps_of_an_epoch_that_comes_again_replace_those_before(cell):
    shown = notebook.NotebookDisplay()
    for place in ((0, 50), (0, 100), (1, 50), (0, 60)):
        cell.clock += 1
        shown.show_report(step(*place))
    (line,) = re.findall(r'<polyline points="([^"]+)"', cell.pages[-1])
    assert len(line.split()) == 2


def test_the_output_stays_small_however_long_the_run_is(cell):
    shown = notebook.NotebookDisplay()
    for number in range(800):
        cell.clock += 1
        shown.show_report(step(number, 50, epochs=800))
        shown.show_report(epoch(number, epochs=800))
    for number in range(100):
        shown.show_message(f"message {number}")
    assert len(cell.pages[-1]) < 40_000
    assert "message 99" in cell.pages[-1]
    assert "message 0<" not in cell.pages[-1]


def test_an_error_ends_it_without_a_time(cell):
    shown = notebook.NotebookDisplay()
    shown.show_report(step(0, 1))
    cell.clock += 10
    shown.show_report(step(0, 50))
    shown.__exit__(RuntimeError, RuntimeError(), None)
    assert "ended by RuntimeError" in cell.pages[-1]
    assert "left" not in cell.pages[-1]


def rank(number, **more):
    return {
        "rank": number,
        "host": "host-a",
        "task": number,
        "executor": None,
        "pid": 100 + number,
    } | more


def busy(number, compute=0.1):
    return rank(number, step_seconds=compute + 0.1, data_seconds=0.05, reduce_seconds=0.1)


def cells(page):
    """The table's lines, as text."""
    return [
        re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", line)
        for line in re.findall(r"<tr>(.*?)</tr>", page)
    ]


def test_the_ranks_and_their_state_are_shown(cell):
    shown = notebook.NotebookDisplay()
    run = TrainingRun(None, "mine", "run", others=[shown.rank_reporter()])
    run.set_placements(
        [{"rank": number, "task": number, "host": "<b>host</b>"} for number in range(3)]
    )
    cell.clock += 1
    run.update_rank_facts(
        0, {"pid": 7, "step_seconds": 0.2, "data_seconds": 0.05, "reduce_seconds": 0.1}
    )
    cell.clock += 1
    run.update_rank_facts(
        1, {"pid": 8, "gpu": 1, "step_seconds": 0.2, "data_seconds": 0.0, "reduce_seconds": 0.01}
    )
    assert cells(cell.pages[-1].replace("&lt;b&gt;host&lt;/b&gt;", "host")) == [
        ["rank", "state", "host", "process", "GPU", "step", "waits for data", "reduces"],
        ["0", "training", "host", "7", "", "200.0 ms", "25%", "50%"],
        ["1", "slow", "host", "8", "1", "200.0 ms", "0%", "5%"],
        ["2", "starting", "host", "", "", "", "", ""],
    ]
    cell.clock += 1
    run.mark_worker_gone(2, "lost")
    assert cells(cell.pages[-1])[3][:2] == ["2", "lost"]
    assert "<b>" not in cell.pages[-1]


def test_of_many_ranks_those_that_need_attention_are_listed(cell):
    told = [busy(number) for number in range(1000)]
    told[700] = busy(700, compute=0.5)
    told[900] = rank(900, state="lost")
    found = render_rank_table(told)
    listed = [line[:2] for line in cells(found)[1:]]
    assert listed == [[str(number), "training"] for number in range(6)] + [
        ["700", "slow"],
        ["900", "lost"],
    ]
    assert "992 more ranks: 992 training" in found
    assert (
        len(render_rank_table([busy(number) | {"host": "h" * 10_000} for number in range(1000)]))
        < 8_000
    )
    assert render_rank_table([]) == ""


def test_thinned_rows_have_the_last_one():
    assert thin_rows([], 3) == []
    assert thin_rows([1, 2, 3], 3) == [1, 2, 3]
    assert thin_rows(range(10), 3) == [1, 5, 9]
    assert thin_rows(range(10), 1) == [9]
