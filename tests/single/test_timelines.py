# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Timelines if no job ran, if no rank sent one, or if several jobs ran."""

from __future__ import annotations

import json
import logging

import pytest

from farandole.runner import timelines


def test_a_job_that_never_began_leaves_no_file_and_says_nothing(tmp_path, capsys):
    path = tmp_path / "trace.json"
    with timelines.collect_timelines(path):
        assert path.exists()
    assert not path.exists()
    assert capsys.readouterr().err == ""
    path.write_text("of a run before")
    with timelines.collect_timelines(path):
        assert timelines.begin_timeline_collection() == {"FARANDOLE_TIMELINE": "GATHER"}
    assert path.read_text() == "of a run before"
    assert "no rank has sent a timeline" in capsys.readouterr().err


def test_each_job_begins_its_own_timeline(tmp_path):
    with timelines.collect_timelines(tmp_path / "trace.json") as gathering:
        timelines.begin_timeline_collection()
        first = gathering._pieces
        timelines.collect_timeline_piece(0, b'{"offset":0,"size":2}\n[]')
        assert gathering._has_pieces
        timelines.begin_timeline_collection()
        assert gathering._pieces is not first
        assert not gathering._has_pieces
    assert timelines.begin_timeline_collection() == {}


def timeline(rank, start, world=1, size=2):
    """The only piece of a rank's timeline of one operation."""
    args = {
        "name": f"rank {rank}",
        "start_time_since_epoch_in_micros": start,
        "rank": rank,
        "host": "a",
        "size": size,
    }
    title = {"name": "process_name", "ph": "M", "pid": 0, "args": args | {"generation": world}}
    track = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"started at {start}"}}
    span = [{"name": "ALLREDUCE", "ph": "B", "ts": 5, "pid": 1}, {"ph": "E", "ts": 9, "pid": 1}]
    text = (
        "[\n"
        + ",\n".join(json.dumps(one, separators=(",", ":")) for one in (title, track, *span))
        + "\n]\n"
    )
    return json.dumps({"offset": 0, "size": len(text)}).encode() + b"\n" + text.encode()


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0)], ids=["the later one last", "the later one first"]
)
def test_of_two_timelines_of_a_rank_in_a_world_the_one_that_started_later_is_taken(
    tmp_path, caplog, order
):
    """As after Spark started a stage again, when rank 1 moved from task 1 to task 2."""
    sent = [(0, timeline(0, 7_000)), (1, timeline(1, 1_000)), (2, timeline(1, 6_000))]
    path = tmp_path / "trace.json"
    with (
        caplog.at_level(logging.WARNING, logger="farandole"),
        timelines.collect_timelines(path) as gathering,
    ):
        timelines.begin_timeline_collection()
        for index in order:
            timelines.collect_timeline_piece(*sent[index])
    assert [row["rank"] for row in gathering.summary["ranks"]] == [0, 1]
    assert gathering.summary.get("incomplete", []) == []
    assert "started at 6000" in path.read_text()
    assert "started at 1000" not in path.read_text()
    assert "of rank 1 in world 1: that of task 1 began earlier" in caplog.text


def test_a_task_may_send_the_timeline_of_another_rank_and_worlds_are_not_compared(tmp_path, caplog):
    path = tmp_path / "trace.json"
    pieces = [
        (0, timeline(0, 1_000)),
        (0, timeline(1, 5_000)),  # another rank now
        (1, timeline(0, 5_500)),
        (2, timeline(1, 9_000, world=0)),
    ]
    with (
        caplog.at_level(logging.WARNING, logger="farandole"),
        timelines.collect_timelines(path) as gathering,
    ):
        timelines.begin_timeline_collection()
        for task, piece in pieces:
            timelines.collect_timeline_piece(task, piece)
    assert [row["rank"] for row in gathering.summary["ranks"]] == [0, 1]
    assert "started at 1000" not in path.read_text()
    assert caplog.text == ""


def test_two_files_of_one_rank_are_both_named(tmp_path):
    from farandole._native import ui

    for name in ("one", "other"):
        (tmp_path / f"{name}.json").write_bytes(timeline(1, 1_000).split(b"\n", 1)[1])
    with pytest.raises(OSError, match=r"other\.json.* it is of rank 1, as is .*one\.json"):
        ui.merge_timelines([tmp_path], tmp_path / "trace")


def test_a_thousand_ranks_are_in_one_file(tmp_path):
    path = tmp_path / "trace.json"
    with timelines.collect_timelines(path) as gathering:
        timelines.begin_timeline_collection()
        for rank in range(1000):
            timelines.collect_timeline_piece(rank, timeline(rank, 1_000 + rank, size=1000))
    assert [row["rank"] for row in gathering.summary["ranks"]] == list(range(1000))
    assert gathering.summary.get("incomplete", []) == []
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= set(range(1000))
