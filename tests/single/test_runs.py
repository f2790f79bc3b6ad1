# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Marks in a store: one driver a run, leavings of killed drivers, marks of long jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from tests.single.training import estimator, line, linear, write

from farandole.data import marks
from farandole.spark.common import LocalStore
from farandole.spark.common.runs.driver import RunInUseError, alone
from farandole.spark.job.spill import Spill

KILLED = """
import os, sys
from farandole.spark.job.spill import Spill
spill = Spill.below(sys.argv[1])
spill.put(b"left")
os.kill(os.getpid(), 9)
"""


def test_a_second_fit_of_a_run_is_refused_while_the_first_trains(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    refused = pytest.raises(RunInUseError, match="run 'r' is being trained by another fit")
    with alone(url, "r"), refused, alone(url, "r"):
        pytest.fail("both hold it")
    with alone(url, "r"):
        assert [one.name for one in (tmp_path / "runs/r").iterdir()] == ["_lease-1.json"]
    assert not list((tmp_path / "runs/r").iterdir())


def test_an_estimator_holds_its_run(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    made = estimator(tmp_path, linear(), run_id="r", epochs=1)
    with (
        alone(made.getStore().to_remote("r").run_path, "r"),
        pytest.raises(RunInUseError, match="choose another run_id"),
    ):
        made.fit_on_parquet()
    made.fit_on_parquet()
    assert not list((tmp_path / "runs/r").glob("_lease*"))


def test_files_of_a_killed_driver_are_deleted_when_the_next_one_starts(tmp_path):
    runs = tmp_path / "runs"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode == -9
    left = list(runs.glob("spill-*"))
    assert len(left) == 1
    mine = Spill.below(str(tmp_path))
    stored = mine.put(b"mine")
    assert [path.name for path in runs.glob("spill-*")] == [mine.url.rpartition("/")[2]]
    other = Spill.below(str(tmp_path))
    assert mine.take(stored) == b"mine", "a driver that lives keeps its own"
    for spill in (mine, other):
        spill.clear()
    assert not list(runs.glob("spill-*"))


def test_leavings_without_a_mark_go_after_a_week(tmp_path):
    for name, age in (("spill-old", 8 * 86400), ("spill-new", 3600)):
        file = tmp_path / "runs" / name / "x"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
        os.utime(file, (time.time() - age,) * 2)
    spill = Spill.below(str(tmp_path))
    assert not (tmp_path / "runs/spill-old").exists()
    assert (tmp_path / "runs/spill-new").exists()
    spill.clear()


def elsewhere(file, **changes):
    """Makes a mark one of a host that cannot be seen from here."""
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another", **changes}))


def test_the_run_of_a_lost_host_is_free_when_its_driver_has_said_nothing_for_ten_minutes(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with alone(url, "r"):
        file = tmp_path / "runs/r/_lease-1.json"
        elsewhere(file, time=time.time() - 540)
        with pytest.raises(RunInUseError, match="free 10 minutes later"), alone(url, "r"):
            pytest.fail("both hold it")
        elsewhere(file, time=time.time() - 660)
        with alone(url, "r"):
            assert not file.exists()


def test_a_driver_that_was_stopped_until_another_took_its_run_gets_an_error(tmp_path, caplog):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with alone(url, "r"):
        file = tmp_path / "runs/r/_lease-1.json"
        elsewhere(file)
        theirs = file.read_text()
        marks.renew_all(due=False)
        assert file.read_text() == theirs
        assert "_lease-1.json, by which this process holds the directory, is gone" in caplog.text
    assert file.read_text() == theirs, "what is no longer ours stays"


def test_marks_are_renewed_and_only_those_that_are_held(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with alone(url, "r"):
        file = tmp_path / "runs/r/_lease-1.json"
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "time": 1.0}))
        marks.renew_all(due=False)
        assert json.loads(file.read_text()) == {**told, "time": pytest.approx(time.time(), abs=60)}
    marks.renew_all(due=False)
    assert not file.exists()
