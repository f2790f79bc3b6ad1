# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit that deletes old prepared data of its store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.single.training import Here, estimator, linear

from farandole._native.store import Store as NativeStore
from farandole.data import prepare, prepare_data
from farandole.data.prepared_directories import (
    acquire_resumable_or_emptied_directory,
    record_resumable_partition,
)
from farandole.spark.common import LocalStore
from farandole.spark.common.data.data_cleanup import delete_stale_prepared_data
from farandole.spark.torch import TorchEstimator

DAY = 24 * 3600


def rows(seed):
    values = np.random.default_rng(seed).random((64, 3), dtype=np.float32)
    return pd.DataFrame(values, columns=["a", "b", "y"])


def aged(directory, days):
    then = time.time() - days * DAY
    for folder, _, names in os.walk(directory):
        for name in names:
            os.utime(os.path.join(folder, name), (then, then))


def test_a_fit_deletes_prepared_data_that_is_older_and_not_in_use(tmp_path, capsys):
    made = [prepare_data(rows(seed), tmp_path, label_cols=["y"]) for seed in range(3)]
    folders = [tmp_path / f"intermediate_train_data.{data.index}" for data in made]
    made[0].release()
    made[1].release()  # the third one is in use
    mine = tmp_path / "mine.txt"
    mine.touch()
    for folder, days in zip(folders, (40, 20, 40), strict=True):
        aged(folder, days)
    aged(mine.parent / "mine.txt", 40)
    columns = {"feature_cols": [["a", "b"]], "epochs": 1, "run_id": "r", "verbose": 1}
    estimator(tmp_path, linear(), **columns).fit(rows(3))
    assert all(folder.exists() for folder in folders), "nothing is deleted unless it is asked for"
    estimator(tmp_path, linear(), **columns, gc_older_than="30d").fit(rows(3))
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert (
        f"deleted prepared data that was old and not in use: {folders[0].name}"
        in capsys.readouterr().err
    )
    assert mine.exists()
    assert (tmp_path / "runs" / "r" / "checkpoint").exists()
    made[2].release()


class Sweeping(Here):
    """A backend beside which another process tidies the store while the fit trains."""

    def __init__(self, store):
        super().__init__()
        self.store, self.gone = store, []

    def run(self, *args, **more):
        self.gone = self.store.gc(0)
        return super().run(*args, **more)


def test_data_that_fit_on_parquet_reads_is_in_use_until_the_fit_ends(tmp_path):
    store = LocalStore(str(tmp_path))
    mine, other = (
        prepare_data(
            rows(seed), tmp_path, feature_cols=["a", "b"], label_cols=["y"], validation=0.2
        )
        for seed in (0, 1)
    )
    mine.release()
    other.release()
    backend = Sweeping(store)
    made = estimator(tmp_path, linear(), feature_cols=[["a", "b"]], epochs=1, backend=backend)
    made.fit_on_parquet(dataset_idx=mine.index)
    places = {f"intermediate_{side}_data.{other.index}" for side in ("train", "val")}
    assert set(backend.gone) == places
    with pytest.raises(ValueError, match="there is no training data"):
        made.fit_on_parquet(dataset_idx=other.index)
    assert f"intermediate_train_data.{mine.index}" in store.gc(0), "the fit has ended"


def data_files(store):
    """Identities of the data files of a store, by directory."""
    return {
        folder.name: {file.stat().st_ino for file in folder.glob("*.parquet")}
        for folder in store.glob("intermediate_train_data*")
    }


@pytest.mark.parametrize("days", [6, 8])
@pytest.mark.parametrize("options", [{}, {"fill": {"a": "mean"}}], ids=["as it is", "encoded"])
def test_fit_on_parquet_takes_a_place_only_for_a_copy_and_only_one_that_a_fit_has_left(
    tmp_path, options, days
):
    store, columns = tmp_path / "store", {"feature_cols": [["a", "b"]], "epochs": 1}
    prepare_data(rows(0), store, label_cols=["y"]).release()
    estimator(store, linear(), **columns).fit(rows(1))
    asked_for, of_a_fit = sorted(store.glob("intermediate_train_data*"))
    for folder in (asked_for, of_a_fit):
        aged(folder, days)
        (folder / "_used.json").write_text(json.dumps({"time": time.time() - days * DAY}))
    before = data_files(store)
    path = tmp_path / "rows.parquet"
    rows(2).to_parquet(path)
    estimator(store, linear(), **columns, **options).fit_on_parquet(path=str(path))
    after = data_files(store)
    is_emptied = bool(options) and days > 7
    assert after.pop(asked_for.name) == before[asked_for.name]
    assert (after.pop(of_a_fit.name) == before[of_a_fit.name]) == (not is_emptied)
    assert len(after) == (bool(options) and not is_emptied)


def test_data_that_another_process_deletes_is_not_trained_on(tmp_path):
    data = prepare_data(rows(0), tmp_path, feature_cols=["a", "b"], label_cols=["y"])
    data.release()
    taken = NativeStore(data.train_url)
    assert taken.acquire_lease() is not None
    with pytest.raises(
        OSError,
        match=r"another process deletes the prepared data at .*, or prepares other data there",
    ):
        estimator(tmp_path, linear(), feature_cols=[["a", "b"]]).fit_on_parquet(
            dataset_idx=data.index
        )


def test_data_that_is_read_only_is_trained_on(tmp_path, monkeypatch):
    class ReadOnly:
        def __init__(self, url):
            self.url = url

        def mark_in_use(self):
            raise PermissionError(self.url)

    data = prepare_data(rows(0), tmp_path / "other", feature_cols=["a", "b"], label_cols=["y"])
    data.release()
    monkeypatch.setattr("farandole.spark.common.data.existing_data.NativeStore", ReadOnly)
    made = estimator(tmp_path / "store", linear(), feature_cols=[["a", "b"]], epochs=1)
    assert made.fit_on_parquet(path=data.train_url).getHistory()[-1]["rows"] == 64


def test_a_fit_deletes_the_oldest_prepared_data_until_the_rest_is_small_enough(tmp_path, capsys):
    made = [prepare_data(rows(seed), tmp_path, label_cols=["y"]) for seed in range(4)]
    folders = [tmp_path / f"intermediate_train_data.{data.index}" for data in made]
    for data in made[1:]:
        data.release()  # the first one, which is the oldest, is in use
    for folder, days in zip(folders, (40, 30, 20, 10), strict=True):
        aged(folder, days)
    columns = {"feature_cols": [["a", "b"]], "epochs": 1, "run_id": "r", "verbose": 1}
    one = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in folders)
    estimator(tmp_path, linear(), **columns, gc_max_size=100 * one).fit(rows(4))
    assert all(folder.exists() for folder in folders), "all of it together is smaller"
    # What the fit has prepared is as large as any other, and in use.
    estimator(tmp_path, linear(), **columns, gc_max_size=f"{3 * one + one // 2}B").fit(rows(4))
    assert [folder.exists() for folder in folders] == [True, False, False, True]
    told = (
        f"deleted prepared data that was old or too much and not in use: {folders[1].name}, "
        f"{folders[2].name}"
    )
    assert told in capsys.readouterr().err
    assert (tmp_path / "runs" / "r" / "checkpoint").exists()
    made[0].release()


def test_a_store_is_tidied_by_age_by_size_or_by_both(tmp_path):
    store = LocalStore(str(tmp_path))
    for seed, days in ((0, 40), (1, 20), (2, 1)):
        data = prepare_data(rows(seed), tmp_path, label_cols=["y"])
        data.release()
        aged(tmp_path / f"intermediate_train_data.{data.index}", days)
    with pytest.raises(ValueError, match="gc needs a limit: pass older_than="):
        store.gc()
    assert store.gc(max_size=1 << 30) == []
    folders = sorted(tmp_path.glob("intermediate_train_data.*"))
    last = sum(file.stat().st_size for file in folders[2].iterdir())
    assert store.gc(timedelta(days=30), max_size=last) == [folder.name for folder in folders[:2]]
    assert store.gc(max_size=0) == [folders[2].name]


@pytest.mark.parametrize("place", ["train", "val", "link", "moved"])
def test_a_place_with_files_of_a_user_is_neither_swept_nor_prepared_again(tmp_path, place, caplog):
    store = LocalStore(str(tmp_path / "store"))
    with prepare_data(rows(0), store, label_cols=["y"], validation=0.2) as data:
        key = json.loads(store.read(f"{data.train_url}/_manifest.json"))["fingerprint"]
    train, val = (Path(NativeStore(url).local_path) for url in (data.train_url, data.val_url))
    mine = {"train": train, "val": val, "link": tmp_path, "moved": train}[place] / "mine.parquet"
    mine.write_bytes(b"mine")
    if place == "link":
        (train / "link").symlink_to(tmp_path)
    if place == "moved":
        train.rename(tmp_path / "elsewhere")
        train.symlink_to(tmp_path / "elsewhere")
    assert store.gc(0) == []
    assert f"intermediate_train_data.{data.index}" in caplog.text
    held, resumed = acquire_resumable_or_emptied_directory(
        store, key, resumable=False, replace=True
    )
    assert held.index != data.index
    assert not resumed
    held.release_and_delete_data()
    assert mine.read_bytes() == b"mine"


def test_a_training_directory_that_is_a_link_is_not_emptied(tmp_path):
    store = LocalStore(str(tmp_path / "store"))
    with prepare_data(rows(0), store, label_cols=["y"]) as data:
        key = json.loads(store.read(f"{data.train_url}/_manifest.json"))["fingerprint"]
    train, elsewhere = Path(NativeStore(data.train_url).local_path), tmp_path / "elsewhere"
    train.rename(elsewhere)
    train.symlink_to(elsewhere)
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    assert store.gc(0) == []
    held, _ = acquire_resumable_or_emptied_directory(store, key, resumable=False, replace=True)
    held.release_and_delete_data()
    assert held.index != data.index
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before


@pytest.mark.parametrize("step", ["empty_and_mark_directory", "release_and_delete_data"])
def test_a_directory_that_becomes_a_link_is_not_emptied(tmp_path, step):
    store = LocalStore(str(tmp_path / "store"))
    held, _ = acquire_resumable_or_emptied_directory(store, "once a", resumable=False)
    train, elsewhere = Path(NativeStore(held.train_url).local_path), tmp_path / "elsewhere"
    train.rename(elsewhere)
    (elsewhere / "mine.parquet").write_bytes(b"mine")
    train.symlink_to(elsewhere)
    with contextlib.suppress(OSError):
        held.empty_and_mark_directory(
            "once b"
        ) if step == "empty_and_mark_directory" else held.release_and_delete_data()
    assert (elsewhere / "mine.parquet").read_bytes() == b"mine"
    held.delete_if_held()


def test_an_unfinished_preparation_in_a_link_is_not_continued(tmp_path):
    store = LocalStore(str(tmp_path / "store"))
    held, _ = acquire_resumable_or_emptied_directory(store, "fit a", resumable=True)
    train, elsewhere = Path(NativeStore(held.train_url).local_path), tmp_path / "elsewhere"
    held.delete_if_held()
    train.rename(elsewhere)
    train.symlink_to(elsewhere)
    other, begun = acquire_resumable_or_emptied_directory(store, "fit a", resumable=True)
    assert other.index != held.index
    assert not begun
    other.release_and_delete_data()


def taken_by_another(store, directory):
    """Another preparation's directory, where the lease of one was deleted after a week."""
    train = NativeStore(directory.train_url)
    train.delete(directory.lease_name)
    train.write("_preparation.json", b'{"key": "once a", "time": 0}')
    other, _ = acquire_resumable_or_emptied_directory(store, "once b", resumable=False)
    assert other.index == directory.index
    return other


def test_a_preparation_that_lost_its_place_does_not_complete(tmp_path):
    store = LocalStore(str(tmp_path))
    held, _ = acquire_resumable_or_emptied_directory(store, "once a", resumable=False)
    other = taken_by_another(store, held)
    with pytest.raises(RuntimeError, match=r"lost its lease.*intermediate_train_data\.0"):
        held.finish_preparation()
    assert NativeStore(other.train_url).exists("_preparation.json")
    other.delete_if_held()


def test_a_preparation_that_lost_its_place_deletes_nothing_there(tmp_path, caplog):
    store = LocalStore(str(tmp_path))
    held, _ = acquire_resumable_or_emptied_directory(store, "once a", resumable=False)
    other = taken_by_another(store, held)
    train = NativeStore(other.train_url)
    train.write("part-00000-b.parquet", b"theirs")
    before = train.list()
    held.release_and_delete_data()
    assert train.list() == before
    assert held.train_url in caplog.text
    for step in (
        lambda: held.empty_and_mark_directory("once c"),
        lambda: record_resumable_partition(held.train_url, held.lease_name, 0, b"{}"),
    ):
        with pytest.raises(RuntimeError, match="lost its lease"):
            step()
    assert [name for name, _ in train.list()] == [name for name, _ in before]
    other.delete_if_held()


@pytest.mark.parametrize("step", ["write_encoding", "adjust_split_to_nonempty"])
@pytest.mark.parametrize("resumable", [True, False], ids=["files", "rows"])
def test_a_preparation_stops_when_another_takes_its_place(tmp_path, monkeypatch, step, resumable):
    store, others = LocalStore(str(tmp_path / "store")), []
    source = rows(0)
    if resumable:
        source = str(tmp_path / "rows.parquet")
        rows(0).to_parquet(source)
    before, acquire, held = getattr(prepare, step), acquire_resumable_or_emptied_directory, []

    def acquired(*args, **more):
        held.append(acquire(*args, **more))
        return held[-1]

    def lose(*args, **more):
        result = before(*args, **more)
        monkeypatch.undo()
        others.append(taken_by_another(store, held[0][0]))
        return result

    monkeypatch.setattr(
        prepare.prepared_directories, "acquire_resumable_or_emptied_directory", acquired
    )
    monkeypatch.setattr(prepare, step, lose)
    with pytest.raises(RuntimeError, match=r"lost its lease.*intermediate_train_data\.0"):
        prepare_data(source, store, label_cols=["y"])
    train = NativeStore(others[0].train_url)
    assert json.loads(train.read("_preparation.json"))["key"] == "once b"
    names = {name for name, _ in train.list()}
    assert names == {"_preparation.json", others[0].lease_name}
    others[0].delete_if_held()


def test_sizes_are_bytes():
    made = TorchEstimator()
    for given, number in (
        ("7B", 7),
        ("2KB", 2000),
        ("3 MiB", 3 << 20),
        ("20GiB", 20 << 30),
        (" 1TB ", 10**12),
        (5, 5),
    ):
        assert made.setGcMaxSize(given).getGcMaxSize() == number
    assert made.setGcMaxSize(None).getGcMaxSize() is None


@pytest.mark.parametrize(
    ("limits", "kind", "told"),
    [
        ({"max_size": "500GB"}, TypeError, "max_size must be a whole number: '500GB'"),
        ({"max_size": 5e11}, TypeError, "max_size must be a whole number: 5"),
        ({"max_size": -1}, ValueError, "max_size must be at least 0: -1"),
        ({"max_size": 1 << 70}, ValueError, r"max_size must be less than 2\*\*63 bytes: 11"),
        ({"older_than": "30d"}, TypeError, "older_than must be a timedelta or seconds: '30d'"),
        ({"older_than": -1}, ValueError, "older_than must be at least 0: -1"),
        ({"older_than": float("nan")}, ValueError, "older_than must be at least 0: nan"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(tmp_path, limits, kind, told):
    with pytest.raises(kind, match=told):
        LocalStore(str(tmp_path)).gc(**limits)


def test_ages_are_seconds():
    made = TorchEstimator()
    for given, seconds in (
        ("90s", 90),
        ("2m", 120),
        ("1h", 3600),
        ("7d", 7 * DAY),
        ("1w", 7 * DAY),
        (5, 5),
    ):
        assert made.setGcOlderThan(given).getGcOlderThan() == seconds
    assert made.setGcOlderThan(timedelta(days=2)).getGcOlderThan() == 2 * DAY
    assert made.setGcOlderThan(None).getGcOlderThan() is None


def test_a_store_that_cannot_be_tidied_does_not_end_the_fit():
    class Store:
        def gc(self, older_than, *, max_size):
            assert max_size == 7
            raise PermissionError(f"no: {older_than}")

    told = []
    delete_stale_prepared_data(Store(), 3.0, 7, told.append)
    assert told == ["old prepared data cannot be deleted: no: 3.0"]
    delete_stale_prepared_data(Store(), None, None, pytest.fail)
