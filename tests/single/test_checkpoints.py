# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A run's checkpoints outlast a loss of power at any write, are sealed, and run no code."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field

import pytest
import torch

from farandole.common.trust import CodeNotTrustedError
from farandole.spark.common import LocalStore, checkpoints
from farandole.spark.common.checkpoints import SECRET

RAN = "FARANDOLE_TEST_POISON"


class Poisoned:
    """A pickle that leaves a mark in the environment of the process that loads it."""

    def __reduce__(self):
        return exec, (f"import os; os.environ[{RAN!r}] = 'ran'",)


def poisoned(**besides) -> bytes:
    file = io.BytesIO()
    torch.save({"hyper_parameters": Poisoned(), "state_dict": {}, **besides}, file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def unharmed(monkeypatch):
    monkeypatch.delenv(RAN, raising=False)
    yield
    assert RAN not in os.environ


class PowerLossError(Exception):
    pass


@dataclass
class Disk:
    """A run's files; power is lost before one of the writes, each of which the store makes whole and lasting."""

    files: dict[str, bytes] = field(default_factory=dict)
    writes: int = 10**9
    checkpoint_filename: str = "checkpoint"
    run_path: str = "/runs/r"
    seal_key: bytes | None = None

    def read(self, name):
        return self.files.get(name)

    def write(self, name, data):
        if self.writes == 0:
            raise PowerLossError
        self.writes -= 1
        self.files[name] = data


@pytest.mark.parametrize("seal_key", [None, b"k"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_power_lost_at_any_write_leaves_the_last_or_the_one_before(seal_key, before):
    for writes in range(4):
        disk = Disk(seal_key=seal_key)
        for number in range(before):
            checkpoints.write(disk, b"%d" % number)
        disk.writes = writes
        try:
            checkpoints.write(disk, b"new")
        except PowerLossError:
            pass
        else:
            assert checkpoints.read(disk) == b"new"
            continue
        disk.writes = 10**9
        assert checkpoints.read(disk) == (b"%d" % (before - 1) if before else None)
        checkpoints.write(disk, b"again")
        assert checkpoints.read(disk) == b"again"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _: b"", lambda data: data[:-1] + b"?"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(damage, caplog):
    disk = Disk()
    for text in (b"first", b"second", b"third"):
        checkpoints.write(disk, text)
    disk.files["checkpoint"] = damage(b"third")
    assert checkpoints.read(disk) == b"second"
    assert "/runs/r/checkpoint is damaged" in caplog.text
    assert "/runs/r/checkpoint.previous" in caplog.text
    checkpoints.write(disk, b"fourth")
    assert disk.files["checkpoint.previous"] == b"second", "a damaged one does not take the place of a good one"
    disk.files["checkpoint"] = b"?"
    assert checkpoints.read(disk) == b"second"
    disk.files["checkpoint.previous"] = b"?"
    with pytest.raises(
        ValueError, match=r"/runs/r/checkpoint is damaged.*checkpoint.previous is damaged.*delete /runs/r"
    ):
        checkpoints.read(disk)


def test_a_checkpoint_of_before_there_were_records_is_read():
    disk = Disk({"checkpoint": b"old"})
    assert checkpoints.read(disk) == b"old"

    def refuse(data):
        raise ValueError("no checkpoint")

    with pytest.raises(ValueError, match="is damaged: no checkpoint"):
        checkpoints.read(disk, refuse)


def test_with_a_secret_a_checkpoint_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "mine")
    store = LocalStore(str(tmp_path))
    run = store.to_remote("r")
    checkpoints.write(run, b"mine")
    assert checkpoints.read(store.to_remote("r")) == b"mine"
    assert b"mine" not in repr(run).encode()
    other = store.to_remote("other")
    for name in ("checkpoint", "checkpoint.json"):
        other.write(name, run.read(name))
    with pytest.raises(ValueError, match=f"was not written by a run with this {SECRET}"):
        checkpoints.read(other)
    monkeypatch.delenv(SECRET)
    checkpoints.write(store.to_remote("r"), b"theirs")
    monkeypatch.setenv(SECRET, "mine")
    assert checkpoints.read(store.to_remote("r")) == b"mine", "the sealed one before"


def test_a_poisoned_checkpoint_of_lightning_does_not_run(tmp_path, monkeypatch):
    watch = pytest.importorskip("farandole.spark.lightning.watch")
    with pytest.raises(CodeNotTrustedError, match=r"/runs/r/checkpoint holds objects .* FARANDOLE_TRUST_CODE=1"):
        watch.weights(poisoned(), "/runs/r/checkpoint")
    assert RAN not in os.environ
    monkeypatch.setenv("FARANDOLE_TRUST_CODE", "1")
    watch.weights(poisoned(), "/runs/r/checkpoint")
    assert os.environ.pop(RAN) == "ran", "what consent does"
    monkeypatch.setenv("FARANDOLE_TRUST_CODE", "perhaps")
    with pytest.raises(ValueError, match="must be one of"):
        watch.weights(poisoned(), "/runs/r/checkpoint")
