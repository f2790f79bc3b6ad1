# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints that are cut off, damaged or missing, and a loss of power at any moment: a run
continues.
"""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import zipfile
from pathlib import Path

import lightning
import pytest
import torch
from tests.single.training import Here, fit, line, linear, weights, write

from farandole._native import store as native
from farandole.spark.common import LocalStore
from farandole.spark.lightning import LightningEstimator
from farandole.stores import durable_writes

pytestmark = pytest.mark.timeout(300)


def archive(text):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("weights", text)
    return file.getvalue()


def text_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return file.read("weights").decode()


# A disk that loses power. An operation on names is `(removed, added, file)`.


class Recorder(durable_writes.DurableFileOperations):
    """A file system that also records what it is asked."""

    def __init__(self, root, links=True):
        self.root, self.links = root, links
        self.files, self.names, self.operations = {}, {}, []

    def make_directory(self, path):
        super().make_directory(path)

    def write_new_file(self, path, data):
        super().write_new_file(path, data)
        self.files[len(self.files)] = data
        self._note("name", None, path, len(self.files) - 1)

    def fsync_path(self, path):
        super().fsync_path(path)
        kind = "sync names" if path.is_dir() else "sync file"
        self.operations.append((kind, None if path.is_dir() else self.names[path.name]))

    def link_file(self, path, name):
        if not self.links:
            raise OSError(errno.EPERM, "this file system has no links", str(path))
        super().link_file(path, name)
        self._note("name", None, name, self.names[path.name])

    def rename_file(self, path, name):
        super().rename_file(path, name)
        self._note("name", path, name, self.names[path.name])

    def _note(self, kind, gone, name, file):
        if gone is not None:
            del self.names[gone.name]
        self.names[name.name] = file
        self.operations.append((kind, (gone and gone.name, name.name, file)))

    def done(self, count):
        self.operations.append(("written", count))

    def losses(self):
        """Every directory that a loss of power can leave: (how many writes had returned, content
        by name).
        """
        for length in range(len(self.operations) + 1):
            sure, open_, synced, done = [], [], set(), 0
            for kind, what in self.operations[:length]:
                if kind == "name":
                    open_.append(what)
                elif kind == "sync names":
                    sure, open_ = sure + open_, []
                elif kind == "sync file":
                    synced.add(what)
                else:
                    done = what
            for kept in itertools.product((False, True), repeat=len(open_)):
                names = {}
                for gone, name, file in sure + [
                    one for one, keep in zip(open_, kept, strict=True) if keep
                ]:
                    names.pop(gone, None)
                    names[name] = file
                yield (
                    done,
                    {
                        name: self.files[file]
                        if file in synced
                        else self.files[file][: len(self.files[file]) // 2]
                        for name, file in names.items()
                    },
                )


def contents(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def flip_bit(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_flipped_bit_of_an_archive_is_another_error_or_another_content():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("weights", b"0123456789" * 3)
        out.writestr("more", b"")
        out.comment = b"note"
    data = file.getvalue()
    assert durable_writes.find_damage(data) is None
    found = [bit for bit in range(8 * len(data)) if durable_writes.find_damage(flip_bit(data, bit))]
    assert len(found) > 4 * len(data)
    for bit in set(range(8 * len(data))) - set(found):
        assert contents(flip_bit(data, bit)) == contents(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_with_a_compressed_member_is_refused(method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("stored", bytes(99))
        out.writestr("weights", os.urandom(99), compress_type=method)
    assert "weights" in (durable_writes.find_damage(file.getvalue()) or "")


def test_a_run_whose_checkpoint_has_a_flipped_bit_continues_from_the_one_before(tmp_path):
    """Each bit that once led to an exception instead: flags, method of compression, sizes."""
    run = LocalStore(str(tmp_path)).to_remote("r")
    for text in ("before", "last"):
        run.write_checkpoint("checkpoint", archive(text))
    last, store = archive("last"), native.Store(run.run_path)
    directory = last.rindex(b"PK\x01\x02")
    for bit in range(8 * directory, 8 * directory + 8 * 30):
        store.write("checkpoint", flip_bit(last, bit))
        found = durable_writes.recover_last_checkpoint(store, "checkpoint")
        assert text_of(found) in ("before", "last")
        store.write("checkpoint.previous", archive("before"))


@pytest.mark.parametrize("links", [True, False])
def test_a_loss_of_power_at_any_moment_costs_at_most_the_checkpoint_that_is_written(
    tmp_path, links
):
    disk = Recorder(tmp_path / "run", links)
    store = native.Store(str(disk.root))
    for epoch in range(1, 4):
        durable_writes.write_durably(
            store, "checkpoint", archive(str(epoch)), keeps=True, disk=disk
        )
        disk.done(epoch)
    seen = set()
    for index, (done, files) in enumerate(disk.losses()):
        after = tmp_path / str(index)
        after.mkdir()
        for name, data in files.items():
            (after / name).write_bytes(data)
        found = durable_writes.recover_last_checkpoint(native.Store(str(after)), "checkpoint")
        epoch = 0 if found is None else int(text_of(found))
        assert epoch in (done, done + 1), (done, epoch, sorted(files))
        seen.add((done, epoch))
    assert {(0, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= seen


def test_the_recorder_sees_what_a_write_without_syncs_loses(tmp_path):
    """The test above fails where nothing is synchronized: its disk does lose things."""
    disk = Recorder(tmp_path)
    disk.write_new_file(tmp_path / "new", archive("1"))
    disk.rename_file(tmp_path / "new", tmp_path / "checkpoint")
    disk.done(1)
    outcomes = {frozenset(files.items()) for done, files in disk.losses() if done == 1}
    assert frozenset() in outcomes
    assert frozenset({("checkpoint", archive("1")[: len(archive("1")) // 2])}) in outcomes


@pytest.mark.parametrize("url", ["memory://durable/run", "{}/run"])
def test_two_are_kept_on_every_store(tmp_path, url):
    store = native.Store(url.format(tmp_path))
    for epoch in (1, 2, 3):
        durable_writes.write_durably(store, "checkpoint", archive(str(epoch)), keeps=True)
    assert [name for name, _ in store.list()] == ["checkpoint", "checkpoint.previous"]
    assert [text_of(store.read(name)) for name, _ in store.list()] == ["3", "2"]


def test_a_write_that_fails_leaves_both_checkpoints_and_nothing_else(tmp_path):
    class Full(durable_writes.DurableFileOperations):
        def fsync_path(self, path):
            raise OSError(errno.ENOSPC, "no space left on device", str(path))

    store = native.Store(str(tmp_path))
    for epoch in (1, 2):
        durable_writes.write_durably(store, "checkpoint", archive(str(epoch)), keeps=True)
    with pytest.raises(OSError, match="no space left"):
        durable_writes.write_durably(store, "checkpoint", archive("3"), keeps=True, disk=Full())
    assert [name for name, _ in store.list()] == ["checkpoint", "checkpoint.previous"]
    assert text_of(store.read("checkpoint")) == "2"


def flipped(data):
    """The archive with another text: headers hold the time of the day, so any byte may be there."""
    at = data.index(b"weights2") + len("weights")
    return data[:at] + b"X" + data[at + 1 :]


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:20], lambda _: b"", flipped, lambda data: bytes(len(data)), None]
)
def test_the_one_before_takes_the_place_of_a_damaged_or_missing_one(tmp_path, caplog, spoil):
    store = native.Store(str(tmp_path))
    for epoch in (1, 2):
        durable_writes.write_durably(store, "checkpoint", archive(str(epoch)), keeps=True)
    path = tmp_path / "checkpoint"
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "farandole"):
        found = durable_writes.recover_last_checkpoint(store, "checkpoint")
    assert text_of(found) == "1"
    assert f"{path} {'is missing' if spoil is None else 'cannot be used'}" in caplog.text
    assert path.read_bytes() == found


def test_damaged_checkpoints_alone_are_an_error_and_none_at_all_a_fresh_run(tmp_path):
    store = native.Store(str(tmp_path))
    assert durable_writes.recover_last_checkpoint(store, "checkpoint") is None
    store.write("checkpoint", archive("1")[:-5])
    with pytest.raises(ValueError, match="the run has no usable checkpoint"):
        durable_writes.recover_last_checkpoint(store, "checkpoint")


# Estimators.


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, _index):
        return torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def torch_fit(data, run, epochs):
    return fit(data, linear(), epochs=epochs, run_id=run)


def lightning_fit(data, run, epochs, **more):
    known = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "verbose": 0,
        "random_seed": 1,
    }
    store = LocalStore(str(data))
    made = LightningEstimator(
        model=Line(), run_id=run, epochs=epochs, store=store, backend=Here(), **known, **more
    )
    return made.fit_on_parquet()


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
@pytest.mark.parametrize("fitted", [torch_fit, lightning_fit])
def test_a_run_with_a_truncated_checkpoint_ends_like_an_undisturbed_one(data, caplog, fitted):
    whole = fitted(data, "whole", 4)
    fitted(data, "again", 2)
    path = Path(data, "runs", "again", "checkpoint")
    assert path.with_name("checkpoint.previous").exists()
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "farandole"):
        again = fitted(data, "again", 4)
    assert f"{path}: " in caplog.text
    assert "the run continues from the one before" in caplog.text
    assert [one["epoch"] for one in again.getHistory()] == [0, 1, 2, 3]
    assert torch.allclose(weights(again), weights(whole), atol=1e-6)


def keras_fit(data, run, epochs):
    keras = pytest.importorskip("keras")
    from farandole.spark.keras import KerasEstimator

    keras.utils.set_random_seed(1)
    known = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "verbose": 0,
        "random_seed": 1,
    }
    made = KerasEstimator(
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
        epochs=epochs,
        run_id=run,
        store=LocalStore(str(data)),
        backend=Here(),
        **known,
    )
    return made.fit_on_parquet()


def test_a_run_of_keras_with_a_truncated_checkpoint_continues_from_the_one_before(data, caplog):
    first = keras_fit(data, "r", 2).getHistory()["loss"]
    path = data / "runs" / "r" / "checkpoint"
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "farandole"):
        second = keras_fit(data, "r", 4).getHistory()["loss"]
    assert "the run continues from the one before" in caplog.text
    assert len(second) == 4
    assert second[:2] == first
