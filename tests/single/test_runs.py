# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Marks in a store: one driver or job a run, leavings of killed drivers, marks of long jobs."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from tests.single.test_checkpoint_safety import archive, text_of
from tests.single.training import estimator, line, linear, write

from farandole.common import elastic
from farandole.common.commits import StoredCommits
from farandole.runner.show.journal import OUTPUT_DIRECTORY
from farandole.runner.timelines import TRACE_FILE
from farandole.spark.common import LocalStore
from farandole.spark.common.runs.run_fingerprint_check import RunInUseError, hold_run_lease
from farandole.spark.job.spill import JobSpillDirectory
from farandole.stores import durable_writes, lease_files, run_lease

KILLED = """
import os, sys
from farandole.spark.job.spill import JobSpillDirectory
spill = JobSpillDirectory.create_in_store(sys.argv[1])
spill.write_hashed_bytes(b"left")
os.kill(os.getpid(), 9)
"""


def lease_of(store):
    """The one lease of the run `r`."""
    (file,) = (store / "runs/r").glob("_lease-*.json")
    return file


def test_a_second_fit_of_a_run_is_refused_while_the_first_trains(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    refused = pytest.raises(RunInUseError, match="run 'r' is being trained by another fit")
    with hold_run_lease(url, "r"), refused, hold_run_lease(url, "r"):
        pytest.fail("both hold it")
    with hold_run_lease(url, "r"):
        assert list((tmp_path / "runs/r").iterdir()) == [lease_of(tmp_path)]
    assert not list((tmp_path / "runs/r").iterdir())


def test_an_estimator_holds_its_run(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    made = estimator(tmp_path, linear(), run_id="r", epochs=1)
    with (
        hold_run_lease(made.getStore().to_remote("r").run_path, "r"),
        pytest.raises(RunInUseError, match="choose another run_id"),
    ):
        made.fit_on_parquet()
    made.fit_on_parquet()
    assert not list((tmp_path / "runs/r").glob("_lease*"))


def test_files_of_a_killed_driver_are_deleted_when_the_next_one_starts(tmp_path):
    runs = tmp_path / "runs"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode == -9
    left = list(runs.glob("_spill/*"))
    assert len(left) == 1
    mine = JobSpillDirectory.create_in_store(str(tmp_path))
    stored = mine.write_hashed_bytes(b"mine")
    assert [path.name for path in runs.glob("_spill/*")] == [mine.url.rpartition("/")[2]]
    other = JobSpillDirectory.create_in_store(str(tmp_path))
    assert mine.read_hashed_bytes(stored) == b"mine", "a driver that lives keeps its own"
    for spill in (mine, other):
        spill.delete_directory()
    assert not list(runs.glob("_spill/*"))


def test_leavings_without_a_mark_go_after_a_week(tmp_path):
    for name, age in (("_spill/old", 8 * 86400), ("_spill/new", 3600)):
        file = tmp_path / "runs" / name / "x"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
        os.utime(file, (time.time() - age,) * 2)
    spill = JobSpillDirectory.create_in_store(str(tmp_path))
    assert not (tmp_path / "runs/_spill/old").exists()
    assert (tmp_path / "runs/_spill/new").exists()
    spill.delete_directory()


@pytest.mark.parametrize("name", ["spill-of-our-lab", "spill-old", "spill", "spill-/deep"])
def test_a_run_of_any_allowed_name_is_not_taken_for_leavings_of_a_job(tmp_path, name):
    run = LocalStore(str(tmp_path)).to_remote(name)
    run.write("checkpoint", b"of years")
    for file in (tmp_path / "runs").rglob("*"):
        os.utime(file, (time.time() - 400 * 86400,) * 2)
    spill = JobSpillDirectory.create_in_store(str(tmp_path))
    assert run.read("checkpoint") == b"of years"
    spill.delete_directory()


OWN_NAMES = ["logs", OUTPUT_DIRECTORY, TRACE_FILE]
"""Names of files and directories in the directory of a run that are not reserved by `_`."""


@pytest.mark.parametrize(
    "name",
    ["_spill", "_spill/x", "_use", "a/_run.json", "a//b"]
    + [f"a/{own}{more}" for own in OWN_NAMES for more in ("", "/b")],
)
def test_reserved_names_are_refused_as_runs(tmp_path, name):
    store = LocalStore(str(tmp_path))
    with pytest.raises(ValueError, match=f"run_id must .*{name!r}"):
        store.to_remote(name)
    with pytest.raises(ValueError, match=f"run_id must .*{name!r}"):
        estimator(tmp_path, linear(), run_id=name)
    with pytest.raises(ValueError, match=f"run_id must .*{name!r}"):
        StoredCommits(store, name, 1)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "_run.json", "logs", "..", "x#1"])
def test_a_checkpoint_is_a_file_of_its_run(tmp_path, name):
    with pytest.raises(ValueError, match="checkpoint_filename must be the name of a file"):
        LocalStore(str(tmp_path), checkpoint_filename=name)


ADDED_SUFFIXES = [durable_writes.PREVIOUS_SUFFIX, ".best", ".epoch-0001", ".epoch-12345"]


@pytest.mark.parametrize(
    "name",
    [*OWN_NAMES, *(stem + more for stem in ("m", "m.pt", "") for more in ADDED_SUFFIXES)],
)
def test_a_name_that_the_run_gives_to_another_file_is_refused_for_checkpoints(tmp_path, name):
    with pytest.raises(ValueError, match=f"checkpoint_filename must .*{re.escape(repr(name))}"):
        LocalStore(str(tmp_path), checkpoint_filename=name)


@pytest.mark.parametrize(
    "name", ["best", "previous", "m.epoch", "m.best.pt", "output.pt", "x.logs"]
)
def test_an_allowed_name_of_checkpoints_is_written_and_resumed(tmp_path, name):
    run = LocalStore(str(tmp_path), checkpoint_filename=name).to_remote("r")
    for text in ("one", "two"):
        for more in ("", ".best", ".epoch-0001"):
            run.write_checkpoint(name + more, archive(text + more))
    assert text_of(run.read_checkpoint_to_resume()) == "two"
    (tmp_path / "runs/r" / name).write_bytes(b"damaged")
    assert text_of(run.read_checkpoint_to_resume()) == "one"
    assert text_of(run.read_checkpoint(f"{name}.best")) == "two.best"


def elsewhere(file, **changes):
    """Makes a mark one of a host that cannot be seen from here."""
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another", **changes}))
    if "time" in changes:
        # The age of a mark is counted by the times of the store.
        os.utime(file, (changes["time"],) * 2)


def test_the_run_of_a_lost_host_is_free_when_its_driver_has_said_nothing_for_ten_minutes(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with hold_run_lease(url, "r"):
        file = lease_of(tmp_path)
        elsewhere(file, time=time.time() - 540)
        with pytest.raises(RunInUseError, match="free 10 minutes later"), hold_run_lease(url, "r"):
            pytest.fail("both hold it")
        elsewhere(file, time=time.time() - 660)
        with hold_run_lease(url, "r"):
            assert not file.exists()


def test_a_driver_that_was_stopped_until_another_took_its_run_gets_an_error(tmp_path, caplog):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with hold_run_lease(url, "r"):
        file = lease_of(tmp_path)
        elsewhere(file)
        theirs = file.read_text()
        lease_files.renew_lease_files(due=False)
        assert file.read_text() == theirs
        gone = f"{file.name}, by which this process holds the directory, is gone"
        assert gone in caplog.text
    assert file.read_text() == theirs, "what is no longer ours stays"


def test_marks_are_renewed_and_only_those_that_are_held(tmp_path):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path
    with hold_run_lease(url, "r"):
        file = lease_of(tmp_path)
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "time": 1.0}))
        lease_files.renew_lease_files(due=False)
        assert json.loads(file.read_text()) == {**told, "time": pytest.approx(time.time(), abs=60)}
    lease_files.renew_lease_files(due=False)
    assert not file.exists()


def job(folder, monkeypatch, number, rank=0):
    """An elastic job of this process, and its state, whose commits go to the run."""
    ticket = (
        base64.urlsafe_b64encode(bytes(32) + bytes([number]) * 32 + b"rest").decode().rstrip("=")
    )
    monkeypatch.setenv("FARANDOLE_JOB", f"frn1.{ticket}")
    state = elastic.ObjectState(lambda value: value, lambda: rank, step=0)
    state.save_to(str(folder), "r")
    return state


def trained(state, during=lambda _: None):
    """Trains for a step, and commits."""

    def loop(state):
        state.step += 1
        during(state)
        state.commit()
        return state.step

    return elastic.run_fn(loop, lambda: None)(state)


def test_a_run_that_an_elastic_job_commits_to_is_refused_to_other_jobs_and_to_fits(
    tmp_path, monkeypatch
):
    url = LocalStore(str(tmp_path)).to_remote("r").run_path

    def others(_):
        with (
            pytest.raises(RunInUseError, match="run 'r' is being trained by another fit"),
            hold_run_lease(url, "r"),
        ):
            pytest.fail("a fit holds it, too")
        with pytest.raises(RunInUseError, match="run 'r' is trained elsewhere"):
            trained(job(tmp_path, monkeypatch, 2))

    assert trained(job(tmp_path, monkeypatch, 1), others) == 1
    assert not list((tmp_path / "runs/r").glob("_lease*"))
    with (
        hold_run_lease(url, "r"),
        pytest.raises(RunInUseError, match="choose another run_id, or end the other one"),
    ):
        trained(job(tmp_path, monkeypatch, 1))
    assert trained(job(tmp_path, monkeypatch, 2)) == 2, (
        "and goes on from the other's commit afterwards"
    )


def test_the_next_rank_0_of_a_job_takes_its_run_at_once_and_the_last_one_writes_no_more(
    tmp_path, monkeypatch
):
    def replaced(_):
        file = lease_of(tmp_path)
        elsewhere(file)  # as if this process were one of another host
        lease = json.loads(file.read_text())
        assert lease["job"] == bytes([1] * 32).hex()
        assert trained(job(tmp_path, monkeypatch, 1)) == 1
        assert not file.exists()

    with pytest.raises(RunInUseError, match="another process has taken it from this one"):
        trained(job(tmp_path, monkeypatch, 1), replaced)
    assert trained(job(tmp_path, monkeypatch, 1)) == 2


def test_a_rank_that_is_no_longer_rank_0_leaves_the_run_to_the_one_that_is(
    tmp_path, monkeypatch, caplog
):
    rank = [0]
    state = job(tmp_path, monkeypatch, 1)
    state._rank = lambda: rank[0]
    rounds = []

    def loop(state):
        rounds.append(lease_of(tmp_path))
        if len(rounds) == 1:
            rank[0] = 1
            raise elastic.HostsUpdatedInterrupt(skip_sync=False)
        lease_files.renew_lease_files(due=False)

    elastic.run_fn(loop, lambda: None)(state)
    assert rounds[0] == rounds[1], "the file stays for the next rank 0"
    assert "is gone" not in caplog.text
    assert lease_of(tmp_path) == rounds[0]


def test_a_lease_that_an_earlier_training_of_this_process_could_not_delete_is_taken(tmp_path):
    url = (tmp_path / "runs/r").as_uri()
    first = run_lease.RunLease(url, "r")
    first.acquire_lease()
    with pytest.raises(RunInUseError, match="another training of this process has it"):
        run_lease.RunLease(url, "r").acquire_lease()
    first.hand_over_lease()
    second = run_lease.RunLease(url, "r")
    second.acquire_lease()
    second.renew_or_raise()
    second.release_lease()
    assert list((tmp_path / "runs/r").glob("_lease-*")) == []


def test_a_lease_that_another_thread_takes_just_now_is_not_deleted(tmp_path, monkeypatch):
    url = (tmp_path / "runs/r").as_uri()
    refusals: list[str] = []

    def acquire_lease_elsewhere() -> None:
        with pytest.raises(RunInUseError) as refused:
            run_lease.RunLease(url, "r").acquire_lease()
        refusals.append(str(refused.value))

    other = threading.Thread(target=acquire_lease_elsewhere)

    def register(*arguments: Any) -> lease_files.LeaseFile:
        if not other.ident:  # the file is there, and this process does not yet know it as its own
            other.start()
            other.join(1.0)
        return lease_files.LeaseFile(*arguments)

    monkeypatch.setattr(run_lease, "LeaseFile", register)
    first = run_lease.RunLease(url, "r")
    first.acquire_lease()
    other.join(30.0)
    assert not other.is_alive()
    assert ["another training of this process has it" in one for one in refusals] == [True]
    first.renew_or_raise()
    first.release_lease()


def test_a_holder_on_this_host_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    url = (tmp_path / "runs/r").as_uri()
    code = (
        f"from farandole.stores.run_lease import RunLease; RunLease({url!r}, 'r').acquire_lease(); "
        f"print('held', "
        "flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(run_lease, "_MIN_LINGER_SECONDS", 0.5)
        with pytest.raises(RunInUseError, match="another job, or a fit, has it"):
            run_lease.RunLease(url, "r").acquire_lease()
        monkeypatch.setattr(run_lease, "_MIN_LINGER_SECONDS", 60.0)
        monkeypatch.setattr(run_lease.time, "sleep", lambda _: (holder.kill(), holder.wait()))
        run_lease.RunLease(url, "r").acquire_lease()


def test_the_run_of_a_job_that_was_lost_with_its_hosts_is_waited_for(tmp_path, monkeypatch, caplog):
    run = tmp_path / "runs/r"
    run.mkdir(parents=True)
    file = run / "_lease-4.json"
    told = {
        "host": "x",
        "boot": "another",
        "pid": 1,
        "job": "an earlier one",
        "lasts": run_lease.LEASE_DURATION,
    }
    file.write_text(json.dumps({**told, "time": time.time()}))
    looks = []

    def expire(_):
        """Passes the time: at the third look, nobody has renewed the lease for long enough."""
        looks.append(file.exists())
        if len(looks) == 3:
            os.utime(file, (time.time() - run_lease.LEASE_DURATION - 1,) * 2)

    monkeypatch.setattr(run_lease.time, "sleep", expire)
    assert trained(job(tmp_path, monkeypatch, 1)) == 1
    assert looks == [True] * 3, "it was taken neither before nor long after"
    assert "may be lost or about to end: waiting for at most" in caplog.text
    # One that says that it lives is not waited for.
    file.write_text(json.dumps({**told, "time": time.time()}))
    monkeypatch.setattr(
        run_lease.time,
        "sleep",
        lambda _: file.write_text(json.dumps({**told, "time": time.time() + 1})),
    )
    with pytest.raises(RunInUseError, match="another job, or a fit, has it"):
        trained(job(tmp_path, monkeypatch, 1))
