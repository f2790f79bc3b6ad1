# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Many fits in one process: success, failure, interrupt, warm workers, cold ones. What the
process holds stays flat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

STEADY = 8 << 20
"""Bytes that a measurement of memory may be off."""

ALONE = {
    "OMP_NUM_THREADS": "1",
    "FARANDOLE_WARM_IDLE_SECONDS": "60",
    "PYSPARK_PYTHON": sys.executable,
}

SLACK = {"mappings": 8, "threads": 2, "descriptors": 2}
"""Resources that come and go; a leak of one for each fit is more."""

OF_SPARK = SLACK | {"processes": 2, "temporary files": 4}
"""The same in a session of Spark, which starts workers of Python and deletes files of shuffles a
moment later.
"""


def soak(module, *arguments, limit):
    """Returns the resources of the process at intervals of some fits."""
    # Warm workers have a socket there, whose path may not be long.
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as temporary:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.trust.{module}", *map(str, arguments)],
            env={**os.environ, "TMPDIR": temporary, **ALONE},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def assert_flat(samples, growth):
    """Checks that only memory grows, and by at most so many bytes a fit."""
    first, last = samples[0], samples[-1]
    assert first["processes"] >= 1, "workers came warm"
    for name in set(first) - {"fits", "memory"}:
        assert max(sample[name] for sample in samples[1:]) <= first[name] + SLACK.get(name, 0), (
            name,
            samples,
        )
    assert last["memory"] - first["memory"] <= STEADY + growth * (last["fits"] - first["fits"]), (
        samples
    )


@pytest.mark.timeout(300)
def test_a_handful_of_fits_leaves_nothing(tmp_path):
    samples = soak("soak", tmp_path / "data", 24, 8, limit=250)
    assert [sample["fits"] for sample in samples] == [8, 16, 24]
    assert samples[0]["descriptors"] < 64
    assert_flat(samples, 64 << 10)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_thousand_fits_in_one_process_leave_nothing(tmp_path):
    samples = soak("soak", tmp_path / "data", 1000, 50, 100, limit=1400)
    assert len(samples) == 20
    assert_flat(samples[1:], 20 << 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_jobs_of_one_spark_session_leave_nothing():
    samples = soak("soak_spark", 60, 12, limit=500)
    assert [sample["fits"] for sample in samples] == [12, 24, 36, 48, 60]
    first = samples[0]
    for name in set(first) - {"fits", "memory", "descriptors of Java", "threads of Java"}:
        assert max(sample[name] for sample in samples) <= first[name] + OF_SPARK.get(name, 0), (
            name,
            samples,
        )
    assert samples[-1]["memory"] - first["memory"] <= STEADY + (20 << 10) * (
        samples[-1]["fits"] - 12
    ), samples
    # Java has more of them as it gets round to it; one for each job is a leak.
    for name in ("descriptors of Java", "threads of Java"):
        assert samples[-1][name] - first[name] < 24, samples
