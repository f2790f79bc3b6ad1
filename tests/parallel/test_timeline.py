# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The timeline's records as tools for Horovod's expect them."""

import json

import torch

import farandole.torch as hvd
from farandole.common.timeline import start_timeline, stop_timeline


def steps(path, mark_cycles=False):
    start_timeline(path, mark_cycles=mark_cycles)
    # No rank connects before rank 0 listens.
    hvd.barrier()
    hvd.allreduce(torch.ones(2, 3), name="gradient")
    hvd.allgather(torch.ones(2 + hvd.rank(), 4), name="rows")
    hvd.broadcast(torch.ones(5), root_rank=0, name="weights")
    hvd.barrier()
    stop_timeline()
    return hvd.rank()


def read(path):
    return json.loads(path.read_text())


def names(records):
    """Tensor by "process" number."""
    return {
        record["pid"]: record["args"]["name"]
        for record in records
        if record["name"] == "process_name"
    }


def spans_of(records, tensor):
    """Records of one tensor without metadata."""
    named = [record for record in records if "name" in record]
    pid = next(pid for pid, name in names(named).items() if name.split(".")[-1] == tensor)
    return [record for record in records if record["pid"] == pid and record["ph"] != "M"]


def test_a_tensor_is_negotiated_rank_by_rank_then_executed_in_nested_spans(pair, tmp_path):
    path = tmp_path / "timeline.json"
    pair.run(steps, str(path))
    records = read(path)
    assert records[0]["args"]["start_time_since_epoch_in_micros"] > 0
    assert [record["name"] for record in records[:2]] == ["process_name", "process_sort_index"]
    spans = spans_of(records, "gradient")
    assert spans[0]["name"] == "NEGOTIATE_ALLREDUCE"
    assert sorted(span["name"] for span in spans if span["ph"] == "X") == ["0", "1"]
    begun = [span["name"] for span in spans if span["ph"] == "B"]
    assert begun == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "FARANDOLE_ALLREDUCE"]
    assert spans[-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    depth, last = 0, 0
    for span in spans:
        depth += {"B": 1, "E": -1}.get(span["ph"], 0)
        assert depth >= 0
        assert span["ts"] >= last
        last = span["ts"]
    assert depth == 0
    assert spans_of(records, "rows")[-1]["args"]["shape"] == "[5, 4]"
    assert "BROADCAST" in [span.get("name") for span in spans_of(records, "weights")]
    assert not [record for record in records if record.get("name") == "CYCLE_START"]


def test_rounds_are_marked_on_demand(pair, tmp_path):
    path = tmp_path / "timeline.json"
    pair.run(steps, str(path), True)
    marks = [record for record in read(path) if record.get("name") == "CYCLE_START"]
    assert len(marks) >= 4
    assert all(mark["ph"] == "i" and mark["s"] == "g" for mark in marks)


def test_a_place_for_the_rank_gives_every_rank_a_file(trio, tmp_path):
    trio.run(steps, str(tmp_path / "{rank}.json"))
    for rank in range(3):
        spans = spans_of(read(tmp_path / f"{rank}.json"), "gradient")
        arrived = {span["name"] for span in spans if span["ph"] == "X"}
        assert str(rank) in arrived
        assert spans[-1]["args"]["dtype"] == "float32"


def refused(path):
    try:
        start_timeline(path)
    except ValueError as error:
        return str(error)
    return None


def test_a_file_that_cannot_be_made_is_refused_where_it_would_be_written(pair):
    first, second = pair.run(refused, "/nonexistent/timeline.json")
    assert "/nonexistent/timeline.json" in first
    assert second is None


def one_step():
    return hvd.allreduce(torch.ones(4), name="gradient").tolist()


def test_the_variable_starts_it_with_the_session_and_leaving_completes_it(fresh_world, tmp_path):
    path = tmp_path / "timeline.json"
    world = fresh_world(
        2, env={"HOROVOD_TIMELINE": str(path), "FARANDOLE_TIMELINE_MARK_CYCLES": "1"}
    )
    world.run(one_step)
    world.close()
    records = read(path)
    assert spans_of(records, "gradient")
    assert any(record.get("name") == "CYCLE_START" for record in records)
