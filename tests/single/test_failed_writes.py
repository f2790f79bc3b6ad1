# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes of checkpoints that fail at every step, many times: a run always continues."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.programs import program_path
from tests.single.test_checkpoint_safety import archive, text_of
from tests.single.test_store_faults import may_mount, on_a_full_disk

from farandole._native import store as native
from farandole.spark.common import LocalStore, Store
from farandole.stores import checkpoint_signatures, durable_writes, remote_store

pytestmark = pytest.mark.timeout(300)
ATTEMPTS = range(1, 11)
MODES = ("before", "after", "half", "from then on")
NAMES = ("checkpoint", "checkpoint.best", "checkpoint.epoch-3")


class Trouble:
    """Fails at one step of a write, or at all steps from that one."""

    def __init__(self):
        self.at, self.mode, self.steps, self.fired = None, None, 0, False

    def start(self, at, mode):
        self.at, self.mode, self.steps, self.fired = at, mode, 0, False

    def stop(self):
        self.at = None

    def step(self, action, half=None):
        number, self.steps = self.steps, self.steps + 1
        hit = self.at is not None and (
            number >= self.at if self.mode == "from then on" else number == self.at
        )
        if not hit:
            return action()
        self.fired = True
        if self.mode == "half" and half is not None:
            half()
        if self.mode == "after":
            action()
        raise OSError(errno.ENOSPC, "no space left on device")


class TroubledFiles(durable_writes.DurableFileOperations):
    def __init__(self, trouble):
        self.trouble = trouble

    def write_new_file(self, path, data):
        self.trouble.step(
            lambda: super(TroubledFiles, self).write_new_file(path, data),
            lambda: super(TroubledFiles, self).write_new_file(path, data[: len(data) // 2]),
        )


def troubled(name):
    def operation(self, *arguments):
        return self.trouble.step(lambda: getattr(super(TroubledFiles, self), name)(*arguments))

    return operation


for name in ("make_directory", "fsync_path", "link_file", "rename_file", "remove_file"):
    setattr(TroubledFiles, name, troubled(name))


class TroubledStore:
    """A native store, each operation of which is a step."""

    def __init__(self, store, trouble):
        self._store, self._trouble = store, trouble

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._trouble.step(lambda: found(*args, **kwargs))


@pytest.fixture(params=[None, "the owner's secret"], ids=["plain", "keyed"])
def secret(request, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    if request.param is not None:
        monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, request.param)


@pytest.fixture(params=["local", "memory"])
def run_place(request, monkeypatch, tmp_path):
    """Returns the trouble, and a function that opens a new run."""
    trouble, numbers = Trouble(), itertools.count()
    if request.param == "local":
        disk = TroubledFiles(trouble)
        monkeypatch.setattr(
            durable_writes.write_durably, "__kwdefaults__", {"keeps": False, "disk": disk}
        )
        return trouble, lambda: LocalStore(str(tmp_path)).to_remote(f"r{next(numbers)}")

    def open_store(url):
        return TroubledStore(native.Store(url), trouble)

    monkeypatch.setattr(remote_store, "native", SimpleNamespace(Store=open_store))
    prefix = f"memory://failed-writes-{tmp_path.name}-{request.node.nodeid.replace('/', '-')}"
    store = Store.create(prefix.replace("[", "-").replace("]", "").replace("::", "-"))
    return trouble, lambda: store.to_remote(f"r{next(numbers)}")


def contents_there(run):
    """Returns the intact contents of the run's directory, by name."""
    store = native.Store(run.run_path)
    found = {}
    for name, _ in store.list():
        if name.startswith("checkpoint") and "#" not in name:
            data = store.read(name)
            if durable_writes.find_damage(data) is None:
                found[name] = data
    return found


def assert_all_are_known(run):
    there = contents_there(run)
    store = native.Store(run.run_path)
    for name, data in there.items():
        mismatch = checkpoint_signatures.foreign_checkpoint_reason(store, name, data, run.run_key)
        assert mismatch is None, (name, text_of(data), mismatch)
    return there


def read_back(run, name):
    return run.read_checkpoint_to_resume() if name == "checkpoint" else run.read_checkpoint(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_writes_that_fail_at_any_step_leave_a_checkpoint_that_is_used(
    run_place, secret, mode, name
):
    trouble, new_run = run_place
    for step in itertools.count():
        run = new_run()
        for epoch in (1, 2):
            run.write_checkpoint(name, archive(f"good {epoch}"))
        written, fired = "good 2", False
        allowed = {written}
        for attempt in ATTEMPTS:
            trouble.start(step, mode)
            try:
                run.write_checkpoint(name, archive(f"attempt {attempt}"))
            except OSError:
                allowed.add(f"attempt {attempt}")
            else:
                allowed = {f"attempt {attempt}"}
            fired |= trouble.fired
            trouble.stop()
            assert_all_are_known(run)
            assert text_of(read_back(run, name)) in allowed, (step, attempt)
        run.write_checkpoint(name, archive("last"))
        assert text_of(read_back(run, name)) == "last"
        if name == "checkpoint":
            native.Store(run.run_path).write(name, archive("last")[:-9])
            assert text_of(run.read_checkpoint_to_resume()) in allowed, step
        if not fired:
            break
    assert step >= 4, "the steps were injected"


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_failures_and_damage_leaves_what_lies_there_usable(run_place, secret, seed):
    trouble, new_run = run_place
    run, chance = new_run(), random.Random(seed)
    for number in range(40):
        kind = chance.choice(("write", "fail", "fail", "fail", "damage"))
        name = chance.choice(NAMES)
        store = native.Store(run.run_path)
        if kind == "damage":
            there = contents_there(run)
            if "checkpoint" in there and "checkpoint.previous" in there:
                store.write("checkpoint", there["checkpoint"][:-7])
        else:
            if kind == "fail":
                trouble.start(chance.randrange(16), chance.choice(MODES))
            try:
                run.write_checkpoint(name, archive(f"{number}"))
            except OSError:
                assert kind == "fail"
            trouble.stop()
        there = assert_all_are_known(run)
        if any(one in there for one in ("checkpoint", "checkpoint.previous")):
            assert run.read_checkpoint_to_resume() is not None
            assert_all_are_known(run)


def test_a_marker_does_not_grow_with_the_number_of_failures(run_place, secret):
    trouble, new_run = run_place
    run = new_run()
    run.write_checkpoint("checkpoint", archive("good"))
    store = native.Store(run.run_path)
    sizes = []
    for attempt in range(300):
        trouble.start(3, "from then on")
        with pytest.raises(OSError, match="no space left"):
            run.write_checkpoint("checkpoint", archive(f"{attempt}"))
        trouble.stop()
        sizes.append(len(store.read(checkpoint_signatures.MARKER_FILENAME)))
    assert max(sizes) < 40_000
    assert text_of(run.read_checkpoint_to_resume()) == "good"
    for epoch in range(4):
        run.write_checkpoint("checkpoint", archive(f"epoch {epoch}"))
    assert len(store.read(checkpoint_signatures.MARKER_FILENAME)) < 1_500


def test_a_previous_checkpoint_that_was_restored_again_and_again_stays_known(run_place, secret):
    trouble, new_run = run_place
    del trouble
    run = new_run()
    for text in ("first", "second"):
        run.write_checkpoint("checkpoint", archive(text))
    store = native.Store(run.run_path)
    for attempt in range(6):
        store.write("checkpoint", b"cut")
        assert text_of(run.read_checkpoint_to_resume()) == "first"
        run.write_checkpoint("checkpoint", archive(f"{attempt}"))
        assert_all_are_known(run)
    assert set(contents_there(run)) == {"checkpoint", "checkpoint.previous"}


def test_without_a_marker_both_contents_become_known(tmp_path, monkeypatch):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    run = LocalStore(str(tmp_path)).to_remote("r")
    for text in ("first", "second"):
        run.write_checkpoint("checkpoint", archive(text))
    store = native.Store(run.run_path)
    store.write(checkpoint_signatures.MARKER_FILENAME, b"damaged")
    trouble = Trouble()
    trouble.start(4, "before")
    disk = TroubledFiles(trouble)
    monkeypatch.setattr(
        durable_writes.write_durably, "__kwdefaults__", {"keeps": False, "disk": disk}
    )
    with pytest.raises(OSError, match="no space left"):
        run.write_checkpoint("checkpoint", archive("third"))
    trouble.stop()
    assert {text_of(data) for data in assert_all_are_known(run).values()} == {"first", "second"}


def test_no_message_advises_to_delete_what_may_be_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, "mine")
    LocalStore(str(tmp_path)).to_remote("r").write_checkpoint("checkpoint", archive("whole"))
    for secret in ("another's", None):
        if secret is None:
            monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE)
            (tmp_path / "runs" / "r" / "checkpoint").write_bytes(archive("mine, too"))
        else:
            monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, secret)
        with pytest.raises(ValueError, match="no usable checkpoint") as error:
            LocalStore(str(tmp_path)).to_remote("r").read_checkpoint_to_resume()
        assert "delete" not in f"{error.value} {caplog.text}"


FULL_DISK = program_path(__file__, "checkpoint_on_full_disk")


@pytest.mark.skipif(not may_mount(), reason="only root mounts a small disk")
@pytest.mark.parametrize("secret", [None, "mine"])
def test_a_run_continues_after_any_number_of_writes_to_a_full_disk(tmp_path, monkeypatch, secret):
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, secret)
    # The program imports a test.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    done = on_a_full_disk(tmp_path, FULL_DISK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["epoch 3"] * 10 + ["10 epoch 9 again"]
