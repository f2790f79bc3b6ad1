# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One timeline of ranks on several hosts, whose clocks differ."""

from __future__ import annotations

import json
import re
import sys

import pytest

pytestmark = pytest.mark.slow

STEPS = 50
AHEAD = 3_000_000
"""Microseconds by which the clocks of the second host are ahead."""
SCRIPT = f"""
import time
import numpy as np
import farandole.numpy as hvd
hvd.init()
for step in range({STEPS}):
    time.sleep(0.01 if hvd.rank() == 3 else 0.002)
    hvd.allreduce(np.ones(1000), name="gradient")
hvd.shutdown()
"""


@pytest.mark.timing
def test_ranks_of_all_hosts_are_in_one_file(hosts, tmp_path):
    cluster = hosts("h1", "h2")
    cluster["head"].write("train.py", SCRIPT)
    trace = tmp_path / "trace.json"
    command = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-H",
        "h1:2,h2:2",
        "--timeline",
        str(trace),
    ]
    for name in ("h1", "h2"):
        cluster[name].write("train.py", SCRIPT)
    done = cluster["head"].run(*command, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    told = r"^farandole: +(\d) +(\d+) .*ms +([+-]\d+) us, error at most (\d+) us$"
    rows = re.findall(told, done.stderr, re.MULTILINE)
    assert [(int(rank), int(count)) for rank, count, _, _ in rows] == [
        (rank, STEPS) for rank in range(4)
    ], done.stderr
    assert all(abs(int(shift)) <= int(error) for _, _, shift, error in rows), (
        "the hosts have one clock"
    )
    assert all(int(error) < 20_000 for *_, error in rows)
    assert "rank 3 is a straggler" in done.stderr
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("name") == "process_name"
    }
    assert {re.sub(r"-\w+$", "", name) for name in names} >= {"rank 0 on h1", "rank 3 on h2"}, names
    cluster.until_quiet(15.0)


@pytest.mark.timing
def test_clocks_of_hosts_are_aligned_within_the_stated_error(hosts, tmp_path):
    cluster = hosts("h1", "h2")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for name in ("head", "h1", "h2"):
        cluster[name].write("train.py", SCRIPT)
    command = [sys.executable, "-m", "farandole"]
    pattern = str(ranks / "{rank}.json")
    done = cluster["head"].run(
        *command,
        "run",
        "-H",
        "h1:2,h2:2",
        "--timeline-filename",
        pattern,
        sys.executable,
        "train.py",
    )
    assert done.returncode == 0, done.stderr
    # Hosts of this machine have one clock: the files of the second one are changed as if it had
    # another.
    for rank in (2, 3):
        path = ranks / f"{rank}.json"
        lines = path.read_text().splitlines()
        began = re.search(r'"start_time_since_epoch_in_micros":(\d+)', lines[1])
        assert began is not None
        lines[1] = lines[1].replace(began[1], str(int(began[1]) + AHEAD))
        path.write_text("\n".join(lines) + "\n")
    merged = cluster["head"].run(
        *command, "timeline", str(ranks), "-o", str(tmp_path / "trace.json"), "--json"
    )
    assert merged.returncode == 0, merged.stderr
    rows = json.loads(merged.stdout)["ranks"]
    assert [row["clock_shift_us"] for row in rows[:2]] == [0, 0]
    for row in rows[2:]:
        assert abs(row["clock_shift_us"] + AHEAD) <= row["clock_error_us"] < 20_000, row
    cluster.until_quiet(15.0)
