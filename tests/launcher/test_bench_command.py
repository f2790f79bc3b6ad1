# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole bench`: tables, JSON, and as many ranks as a large host has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 100.0


def bench(
    *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    command = [sys.executable, "-m", "farandole", "bench", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env
    )


@pytest.mark.parametrize(
    "operation", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
)
def test_every_operation_is_timed_at_every_size(operation: str) -> None:
    done = bench(operation, "-np", 2, "--sizes", "4,100K", "--iterations", 3, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # Parts of ranks are whole elements.
    least = 4 if operation in ("allreduce", "broadcast") else 8
    assert [row["bytes"] for row in rows] == [least, 100 << 10]
    for row in rows:
        assert (row["operation"], row["ranks"], row["iterations"]) == (operation, 2, 3)
        assert 0 < row["p50_us"] <= row["p90_us"]
        factor = 0.5 if least == 8 else 1.0
        assert row["bus_gbps"] == pytest.approx(row["alg_gbps"] * factor, abs=1e-3)


def test_a_table_has_a_line_for_each_size() -> None:
    done = bench("allreduce", "-np", 2, "--sizes", "1K", "--dtype", "bfloat16", "--iterations", 5)
    assert done.returncode == 0, done.stderr
    title, head, row = done.stdout.splitlines()
    assert title == "allreduce of bfloat16 on 2 processes"
    assert head.split()[:2] == ["bytes", "calls"]
    assert row.split()[:2] == ["1024", "5"]


def test_invalid_arguments_are_refused() -> None:
    for wrong in (["sum", "-np", 2], ["allreduce"], ["allreduce", "-np", 2, "--sizes", "4X"]):
        done = bench(*wrong)
        assert done.returncode == 2
        assert done.stdout == ""


def test_measured_rules_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("2x2=hierarchy\n")
    sizes = ("--sizes", "4,1K,2M", "--iterations", 3)
    done = bench("allreduce", "-np", 2, *sizes, "--json", "--write", path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["bytes"] for line in done.stdout.splitlines()] == [4, 1 << 10, 2 << 20]
    kept, found = path.read_text().splitlines()
    assert kept == "2x2=hierarchy"
    assert found.startswith("1x2=")
    assert found.endswith("pipeline"), "for 2 MiB nothing else is timed"
    told = [line for line in done.stderr.splitlines() if " bytes: " in line]
    assert [line.count(" us") for line in told] == [3, 3, 1]
    read = {**os.environ, "FARANDOLE_ALLREDUCE_ALGORITHM": f"@{path}"}
    assert bench("allreduce", "-np", 2, *sizes, env=read).returncode == 0
    path.write_text("1x2=ring\n")
    refused = bench("allreduce", "-np", 2, *sizes, env=read)
    assert refused.returncode != 0
    assert "no rule of algorithms: ring" in refused.stderr
    assert bench("broadcast", "-np", 2, "--write", path).returncode != 0


def test_64_ranks_of_one_host_share_memory_with_all_others() -> None:
    done = bench("allreduce", "-np", 64, "--sizes", "4,1K", "--iterations", 3, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "TCP" not in done.stderr
