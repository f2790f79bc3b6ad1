# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One timeline of all ranks of a job, by the command, by `farandole.run` and by a fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import farandole
from farandole.runner.errors import FarandoleJobError

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 4
LATE = 2
STEPS = 12
PAUSE = 0.03

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def steps(killed: int | None = None) -> int:
    """A rank of a job in which one rank is late to every step; one may be killed."""
    import os
    import signal
    import time

    import numpy as np

    import farandole.numpy as hvd
    from farandole.common.timeline import phase

    hvd.init()
    for step in range(STEPS):
        if hvd.rank() == killed and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with phase(f"step {step}"):
            if hvd.rank() == LATE:
                time.sleep(PAUSE)
            hvd.allreduce(np.ones(8), name="gradient")
    return hvd.rank()


SCRIPT = f"""
import time
import numpy as np
import farandole.numpy as hvd

hvd.init()
for step in range({STEPS}):
    if hvd.rank() == {LATE}:
        time.sleep({PAUSE})
    hvd.allreduce(np.ones(8), name="gradient")
"""


def events(path: Path) -> list[dict[str, Any]]:
    """Records of a trace; its form is that of Chrome's traces, which Perfetto reads."""
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    depths: Counter[tuple[int, int]] = Counter()
    for event in trace["traceEvents"]:
        assert event["ph"] in "MBEXi"
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        place = (event["pid"], event["tid"])
        depths[place] += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert depths[place] >= 0, "a span ends that has not begun"
    return trace["traceEvents"]


def times(found: list[dict[str, Any]], name: str) -> dict[int, list[int]]:
    """Returns the times at which spans of a name begin, by rank."""
    begun = defaultdict(list)
    for event in found:
        if event["ph"] == "B" and event["name"] == name:
            begun[event["pid"]].append(event["ts"])
    return begun


def check_late(found: list[dict[str, Any]]) -> None:
    """The late rank comes last to the steps, and the trace says that it is waited for."""
    asked = times(found, "NEGOTIATE_ALLREDUCE")
    assert sorted(asked) == list(range(RANKS))
    assert {len(one) for one in asked.values()} == {STEPS}
    late = [max(range(RANKS), key=lambda rank: asked[rank][step]) for step in range(STEPS)]
    assert Counter(late)[LATE] >= STEPS - 2, late
    ran = times(found, "ALLREDUCE")
    for step in range(STEPS):
        last = max(one[step] for one in asked.values())
        assert all(last <= one[step] + 1000 for one in ran.values()), (
            "none runs before all have asked"
        )
    waits = [event for event in found if event.get("cat") == "straggler"]
    most = Counter(event["name"] for event in waits).most_common(1)
    assert most[0][0] == f"rank {LATE}"
    assert (
        sum(event["dur"] for event in waits if event["name"] == f"rank {LATE}")
        >= STEPS * PAUSE * 1e6 / 2
    )


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    line = [sys.executable, "-m", "farandole", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, **options)


@pytest.mark.timing
def test_the_command_writes_the_timeline_of_all_ranks_and_names_the_late_one(tmp_path):
    path = tmp_path / "trace.json"
    done = command("run", "-np", RANKS, "--timeline", path, sys.executable, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    check_late(events(path))
    assert f"rank {LATE} is a straggler: for " in done.stderr
    assert f"the timeline of all ranks is in {path}" in done.stderr
    assert (
        len(re.findall(r"^farandole: +\d .*error at most \d+ us$", done.stderr, re.MULTILINE))
        == RANKS
    )


@pytest.mark.timing
def test_a_function_has_one_with_phases_of_its_own(tmp_path, capfd):
    path = tmp_path / "trace.json"
    assert farandole.run(steps, num_proc=RANKS, timeline=path) == list(range(RANKS))
    found = events(path)
    check_late(found)
    for rank in range(RANKS):
        assert len(times(found, f"step {STEPS - 1}")[rank]) == 1
    names = {event["args"]["name"] for event in found if event.get("name") == "process_name"}
    assert {name.split(" on ")[0] for name in names} == {
        f"rank {rank}" for rank in range(RANKS)
    } | {"all ranks wait for"}
    assert f"rank {LATE} is a straggler" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timing
def test_elastic_jobs_have_one(tmp_path, capfd):
    path = tmp_path / "trace.json"
    assert farandole.run(steps, num_proc=RANKS, min_num_proc=RANKS, timeline=path) == list(
        range(RANKS)
    )
    check_late(events(path))
    assert f"rank {LATE} is a straggler" in capfd.readouterr().err


@pytest.mark.slow
def test_a_limit_keeps_the_last_steps_of_all_ranks(tmp_path):
    path, limit = tmp_path / "trace.json", 2 * (64 << 10)
    script = SCRIPT.replace(f"range({STEPS})", "range(2000)").replace(
        f"hvd.rank() == {LATE}", "False"
    )
    line = [sys.executable, "-c", script]
    done = command("run", "-np", 2, "--timeline", path, "--timeline-limit", limit, *line)
    assert done.returncode == 0, done.stderr
    found = events(path)
    lists = [
        event["args"]["list"]
        for event in found
        if event.get("name") == "ALLREDUCE" and event["pid"] == 0
    ]
    assert lists == list(range(lists[0], lists[-1] + 1)), "no step is missing among the last"
    assert 40 < len(lists) < 1500
    assert sorted(times(found, "NEGOTIATE_ALLREDUCE")) == [0, 1]
    assert path.stat().st_size < 3 * limit, "merged records have more fields"


@pytest.mark.slow
def test_a_job_that_fails_has_one_up_to_the_failure(tmp_path, capfd):
    path = tmp_path / "trace.json"
    with pytest.raises(FarandoleJobError):
        farandole.run(steps, kwargs={"killed": 3}, num_proc=RANKS, timeline=path)
    asked = times(events(path), "NEGOTIATE_ALLREDUCE")
    assert len(asked[3]) == STEPS // 2, "the killed rank's, up to its last step"
    assert "the timeline of all ranks is in" in capfd.readouterr().err


@pytest.mark.slow
def test_files_of_ranks_are_merged_by_a_command_of_its_own(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    done = command(
        "run", "-np", 2, "--timeline-filename", folder / "{rank}.json", sys.executable, "-c", SCRIPT
    )
    assert done.returncode == 0, done.stderr
    merged = command("timeline", folder, "-o", tmp_path / "trace.json", "--json")
    assert merged.returncode == 0, merged.stderr
    summary = json.loads(merged.stdout)
    assert [row["rank"] for row in summary["ranks"]] == [0, 1]
    assert {row["operations"] for row in summary["ranks"]} == {STEPS}
    assert {row["clock_error_us"] for row in summary["ranks"]} == {0}, "one host has one clock"
    assert {event["pid"] for event in events(tmp_path / "trace.json")} == {0, 1, 2}
    failed = command("timeline", tmp_path / "nothing.json", "-o", tmp_path / "x")
    assert failed.returncode == 1
    assert "nothing.json: " in failed.stderr


def test_invalid_arguments_are_refused_before_the_run(tmp_path):
    where = tmp_path / "none" / "trace.json"
    done = command("run", "-np", 1, "--timeline", where, "touch", tmp_path / "ran")
    assert done.returncode == 1
    assert f"cannot write the timeline to {where}" in done.stderr
    both = command(
        "run", "-np", 1, "--timeline", "a", "--timeline-filename", "b", "touch", tmp_path / "ran"
    )
    assert "exclude each other" in both.stderr
    with pytest.raises(FileNotFoundError):
        farandole.run(steps, num_proc=1, timeline=where)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_fit_shows_data_forward_backward_and_reduction(tmp_path):
    import pyarrow as pa
    import torch

    from farandole.spark.common import LocalBackend, LocalStore
    from farandole.spark.torch import TorchEstimator

    network = torch.nn.Linear(1, 1)
    rows = pa.table({"x": [float(number % 7) for number in range(64)], "y": [1.0] * 64})
    path = tmp_path / "trace.json"
    TorchEstimator(
        backend=LocalBackend(2),
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=2,
        store=LocalStore(str(tmp_path / "store")),
        verbose=0,
    ).fit(rows, timeline=path)
    found = events(path)
    for name in ("data", "compute", "forward", "backward", "reduce"):
        begun = times(found, name)
        assert sorted(begun) == [0, 1], name
        assert all(len(one) >= 8 for one in begun.values()), name
    threads = {
        event["args"]["name"]: event["tid"] for event in found if event.get("name") == "thread_name"
    }
    assert threads["steps"] == min(threads.values()), "steps come before tensors"
