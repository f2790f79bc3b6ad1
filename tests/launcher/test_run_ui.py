# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Jobs of scripts, and elastic jobs, in the run viewer: what they write into the store."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from tests.programs import program_text
from tests.train_job_operator import Operator, check_operators_rules

import farandole

if TYPE_CHECKING:
    from pathlib import Path

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = program_text(__file__, "report_epochs")


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script on two ranks with `--ui` in a folder."""
    (folder / "train.py").write_text(SCRIPT)
    line = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        "2",
        *arguments,
        sys.executable,
        "train.py",
    ]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=100, check=False, cwd=folder
    )


def record(store: Path) -> tuple[Path, dict[str, Any]]:
    """The one run of a store."""
    (run,) = (store / "runs").iterdir()
    return run, json.loads((run / "_record.json").read_text())


def test_a_script_has_a_run_with_ranks_curves_and_output(tmp_path):
    done = ran(tmp_path, "--ui")
    assert done.returncode == 0, done.stderr
    link = re.search(r"the run is at (http://127\.0\.0\.1:\d+/\S+#/run/0%2Ftrain-\S+)", done.stderr)
    assert link is not None, done.stderr
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(link[1], timeout=5)
    assert "farandole ui farandole-runs" in done.stderr
    run, told = record(tmp_path / "farandole-runs")
    assert (told["state"], told["size"], told["done"]) == ("ended", 2, 3)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in told["ranks"]}) == 2
    entries = [
        json.loads(line) for line in (run / "logs" / "history.jsonl").read_text().splitlines()
    ]
    assert [entry["train"]["loss"] for entry in entries] == [1, 1 / 2, 1 / 3]
    for rank in (0, 1):
        assert (run / "output" / f"rank.{rank}" / "stdout").read_text() == f"rank {rank} is here\n"


@pytest.mark.slow
def test_a_script_that_fails_says_why_in_its_run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [
        sys.executable,
        "-m",
        "farandole",
        "run",
        "-np",
        "2",
        "--ui-store",
        str(tmp_path / "store"),
    ]
    done = subprocess.run(
        [*line, sys.executable, "train.py", "fail"],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    _, told = record(tmp_path / "store")
    assert told["state"] == "failed"
    assert "rank 1" in told["reason"]
    assert "3" in told["reason"]


@pytest.mark.slow
def test_an_elastic_script_has_one(tmp_path):
    done = ran(tmp_path, "--ui", "--min-num-proc", "2")
    assert done.returncode == 0, done.stderr
    _, told = record(tmp_path / "farandole-runs")
    assert (told["state"], told["size"], told["done"]) == ("ended", 2, 3)
    assert all(rank["pid"] and rank["host"] for rank in told["ranks"])


def size() -> int:
    """A rank of an elastic job."""
    import farandole.numpy as hvd

    hvd.init()
    hvd.barrier()
    return hvd.size()


@pytest.mark.slow
def test_an_elastic_function_has_one(tmp_path):
    assert farandole.run(size, num_proc=2, min_num_proc=2, ui=tmp_path / "store") == [2, 2]
    _, told = record(tmp_path / "store")
    assert (told["state"], told["size"], told["restarts"]) == ("ended", 2, 0)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert all(rank["pid"] for rank in told["ranks"])


def test_a_launcher_in_a_pod_reports_the_status_of_its_job(tmp_path, monkeypatch):
    operator = Operator(tmp_path)
    with contextlib.closing(operator):
        for name, value in operator.variables().items():
            monkeypatch.setenv(name, value)
        done = ran(tmp_path)
    assert done.returncode == 0, done.stderr
    for status in operator.statuses:
        check_operators_rules(status)
    assert operator.statuses[-1]["progressPercentage"] == 100
    metrics = {metric["name"]: metric["value"] for metric in operator.statuses[-1]["metrics"]}
    assert (metrics["ranks"], metrics["loss"]) == ("2", "0.333333")
    assert not (tmp_path / "farandole-runs").exists()
