# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A real file system loses power: what the product said was written is there afterwards.

The file system is an ext4 in a file. What has not been synchronized is in the kernel's memory
alone, and not in that file. So a copy of the file is the disk as a loss of power leaves it. To
mount it replays its journal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.needs import skipped_without
from tests.single.test_checkpoint_safety import archive, text_of
from tests.single.test_data_prepare import arrays, write

from farandole._native import prepare
from farandole._native import store as native
from farandole.data import prepare as preparing
from farandole.data import prepared_directories
from farandole.data.prepare import prepare_data
from farandole.spark.common import LocalStore
from farandole.spark.common.model.onnx import write_atomically
from farandole.spark.common.saving import save_directory
from farandole.stores import checkpoint_signatures, durable_writes

pytestmark = pytest.mark.timeout(300)
SIZE = 48 << 20


def missing():
    """Returns the reason why there is no such file system here."""
    if os.geteuid() != 0:
        return "needs root, to mount"
    lacks = [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    if lacks:
        return f"needs {', '.join(lacks)}"
    return None if Path("/dev/loop-control").exists() else "needs loop devices"


needs = skipped_without(missing())


@contextmanager
def mounted(image, folder):
    """An image as a directory; its journal commits by itself only after minutes."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-o", "loop,commit=300", str(image), str(folder)], check=True, timeout=60
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.fixture
def disk(tmp_path):
    """A disk, and what copies it as a loss of power would leave it."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(
        ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image)],
        check=True,
        timeout=60,
    )
    losses = 0

    @contextmanager
    def lose_power():
        nonlocal losses
        losses += 1
        copy = tmp_path / f"after-{losses}"
        shutil.copyfile(image, copy)
        with mounted(copy, tmp_path / f"mount-{losses}") as folder:
            yield folder
        copy.unlink()

    with mounted(image, tmp_path / "mount") as folder:
        os.sync()
        yield folder, lose_power


@needs
def test_the_disk_loses_unsynchronized_data(disk):
    folder, lose_power = disk
    (folder / "lost").write_bytes(b"x" * 5000)
    with lose_power() as after:
        assert not (after / "lost").exists() or (after / "lost").read_bytes() != b"x" * 5000
    with (folder / "kept").open("wb") as file:
        file.write(b"x" * 5000)
        file.flush()
        os.fsync(file.fileno())
    with lose_power() as after:
        assert (after / "kept").read_bytes() == b"x" * 5000


@needs
def test_checkpoints_that_were_written_are_there(disk):
    folder, lose_power = disk
    for epoch in range(1, 4):
        LocalStore(str(folder)).to_remote("r").write_checkpoint("checkpoint", archive(str(epoch)))
        with lose_power() as after:
            assert text_of(
                LocalStore(str(after)).to_remote("r").read_checkpoint_to_resume()
            ) == str(epoch)


@needs
def test_manifests_never_name_what_is_lost(disk):
    folder, lose_power = disk
    store = native.Store(str(folder / "deep" / "below"))
    for number in range(3):
        store.write(f"part-{number}", bytes([number]) * 30_000)
        store.write("_manifest.json", str(number).encode())
        with lose_power() as after:
            left = native.Store(str(after / "deep" / "below"))
            assert left.read("_manifest.json") == str(number).encode()
            for part in range(number + 1):
                assert left.read(f"part-{part}") == bytes([part]) * 30_000


@needs
def test_prepared_data_that_is_complete_is_whole(disk):
    folder, lose_power = disk
    rows = pa.table({"x": np.arange(20_000, dtype=np.float32)})
    write(folder / "store", [rows])
    with lose_power() as after:
        assert arrays(after / "store" / "train")["x"].tolist() == list(range(20_000))


@needs
def test_the_marker_and_the_records_of_a_run_are_there_with_its_checkpoint(disk, monkeypatch):
    monkeypatch.setenv(
        checkpoint_signatures.SECRET_VARIABLE, "nobody may write a marker without it"
    )
    folder, lose_power = disk
    records = ("_record.json", "logs/steps.jsonl", "logs/history.jsonl")
    for epoch in range(1, 4):
        run = LocalStore(str(folder)).to_remote("r")
        for name in records:
            run.write(name, str(epoch).encode())
        run.write_checkpoint("checkpoint", archive(str(epoch)))
        with lose_power() as after:
            left = LocalStore(str(after)).to_remote("r")
            # Without the marker, this checkpoint has no seal and is refused.
            assert text_of(left.read_checkpoint_to_resume()) == str(epoch)
            assert [left.read(name) for name in records] == [str(epoch).encode()] * 3


@needs
def test_data_that_is_prepared_is_no_data_set_at_any_step_before_all_of_it_is_there(
    disk, monkeypatch
):
    folder, lose_power = disk
    steps = []

    def step(name):
        sync_names(folder)
        with lose_power() as after:
            (train,) = after.glob("intermediate_train_data*")
            try:
                steps.append((name, arrays(train)["x"].tolist()))
            except (OSError, ValueError):
                steps.append((name, None))

    for owner, name in (
        (preparing._OpenPartition, "finish_partition"),
        (prepared_directories, "record_resumable_partition"),
        (prepare, "commit_partitions"),
        (prepared_directories.PreparedDirectory, "finish_preparation"),
    ):
        followed(monkeypatch, owner, name, step)
    rows = list(map(float, range(5_000)))
    prepare_data(pd.DataFrame({"x": rows, "y": rows}), LocalStore(str(folder)), label_cols=["y"])
    assert steps == [
        ("finish_partition", None),
        ("record_resumable_partition", None),
        ("commit_partitions", rows),
        ("finish_preparation", rows),
    ]


@needs
def test_a_model_that_was_exported_is_there_and_so_is_the_one_before_until_then(disk):
    folder, lose_power = disk
    for number in range(2):
        with write_atomically(folder / "model.onnx") as made:
            made.write_bytes(b"%d" % number * 5_000)
            weights = f"{made.name}.data"
            made.with_name(weights).write_bytes(b"w%d" % number * 5_000)
            if number:
                with lose_power() as after:
                    assert (after / "model.onnx").read_bytes() == b"0" * 5_000
        with lose_power() as after:
            assert (after / "model.onnx").read_bytes() == b"%d" % number * 5_000
            assert (after / weights).read_bytes() == b"w%d" % number * 5_000


def followed(patch, owner, name, step):
    """Runs a step after every call of a function."""
    real = getattr(owner, name)

    def call(*arguments, **named):
        done = real(*arguments, **named)
        step(name)
        return done

    patch.setattr(owner, name, call)


def sync_names(folder):
    """Writes the names below a directory to the disk, as the kernel may do at any time before
    contents.
    """
    for place, _, _ in os.walk(folder):
        durable_writes.DurableFileOperations().fsync_path(Path(place))


@needs
@pytest.mark.parametrize("by_spark", [False, True], ids=["store", "Spark"])
def test_a_loss_of_power_at_every_step_of_a_save_leaves_a_whole_model(
    disk, request, monkeypatch, by_spark
):
    session = request.getfixturevalue("spark")
    monkeypatch.setattr(save_directory, "_spark_has_scheme", lambda *_: by_spark)
    folder, lose_power = disk
    weights = [bytes([number]) * 300_000 for number in range(2)]
    place, steps = folder / "model", []

    def step(_name):
        # The worst of what the kernel may write back by itself: the metadata without the data.
        for path in (place / "metadata").iterdir():
            durable_writes.DurableFileOperations().fsync_path(path)
        sync_names(folder)
        with lose_power() as after:
            left = save_directory.SaveDirectory(str(after / "model"), session)
            found = left.read_metadata("m")
            assert left.read_parts(found) == {"weights": weights[found["n"]]}
            steps.append(found["n"])

    save_directory.SaveDirectory(str(place), session).write_object_version(
        {"class": "m", "n": 0}, {"weights": weights[0]}, overwrite=False
    )
    second = save_directory.SaveDirectory(str(place), session)
    for call in ("write_rows", "write_metadata_file", "delete_entry"):
        followed(monkeypatch, second._files, call, step)
    second.write_object_version({"class": "m", "n": 1}, {"weights": weights[1]}, overwrite=True)
    assert steps[:2] == [0, 1]
    assert set(steps[2:]) == {1}


@needs
@pytest.mark.parametrize("by_spark", [False, True], ids=["store", "Spark"])
def test_a_model_that_was_saved_is_there_and_so_is_one_that_is_saved_over_it(
    disk, request, monkeypatch, by_spark
):
    session = request.getfixturevalue("spark")
    monkeypatch.setattr(save_directory, "_spark_has_scheme", lambda *_: by_spark)
    folder, lose_power = disk
    for number in range(2):
        metadata = {"class": "m", "n": number}
        save_directory.SaveDirectory(str(folder / "model"), session).write_object_version(
            metadata, {"weights": b"%d" % number}, overwrite=True
        )
        with lose_power() as after:
            left = save_directory.SaveDirectory(str(after / "model"), session)
            found = left.read_metadata("m")
            assert found["n"] == number
            assert left.read_parts(found) == {"weights": b"%d" % number}
