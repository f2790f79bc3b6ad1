# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Paths and files of the local store."""

import os
import pickle

import pytest

from farandole.spark.common import (
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    ObjectStore,
    Store,
)


def test_the_layout_is_horovods(tmp_path):
    store = LocalStore(str(tmp_path))
    root = f"file://{tmp_path}"
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_train_data_path(3) == f"{root}/intermediate_train_data.3"
    assert store.get_val_data_path(0) == f"{root}/intermediate_val_data.0"
    assert store.get_test_data_path(1) == f"{root}/intermediate_test_data.1"
    assert store.get_runs_path() == f"{root}/runs"
    assert store.get_run_path("r") == f"{root}/runs/r"
    assert store.get_checkpoint_path("r") == f"{root}/runs/r"
    assert store.get_logs_path("r") == f"{root}/runs/r/logs"
    assert (store.get_checkpoint_filename(), store.get_logs_subdir()) == ("checkpoint", "logs")


def test_paths_of_ones_own_replace_the_defaults_and_still_get_numbers(tmp_path):
    store = FilesystemStore(
        str(tmp_path), train_path="/data/train", runs_path="/runs", checkpoint_filename="last.pt"
    )
    assert store.get_train_data_path(2) == "file:///data/train.2"
    assert store.get_run_path("r") == "file:///runs/r"
    assert store.get_checkpoint_filename() == "last.pt"


def test_without_saved_runs_there_is_no_checkpoint_path(tmp_path):
    store = LocalStore(str(tmp_path), save_runs=False)
    assert store.get_checkpoint_path("r") is None
    assert store.get_logs_path("r") is None
    assert store.to_remote("r").saving_runs is False


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("hdfs://namenode:8020/data", HDFSStore),
        ("s3://bucket/data", ObjectStore),
        ("memory://here/data", ObjectStore),
        ("dbfs:/data", DBFSLocalStore),
        ("/dbfs/data", DBFSLocalStore),
        ("file:///dbfs/data", DBFSLocalStore),
        ("/Volumes/main/schema/volume", DBFSLocalStore),
        ("/data", FilesystemStore),
        ("file:///data", FilesystemStore),
    ],
)
def test_the_url_says_which_store(url, kind):
    assert type(Store.create(url)) is kind


def test_another_scheme_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"no store for the scheme ftp.*ftp://host/data|not a path.*ftp://host/data",
    ):
        Store.create("ftp://host/data")
    with pytest.raises(ValueError, match="dbfs://data"):
        Store.create("dbfs://data")


def test_paths_in_hdfs_get_the_name_node_and_lose_it():
    store = HDFSStore("/user/x", host="node", port=8020)
    assert store.prefix_path == "hdfs://node:8020/user/x"
    assert store.get_full_path("/y") == "hdfs://node:8020/y"
    assert store.get_localized_path("hdfs://node:8020/user/x/y") == "/user/x/y"
    assert pickle.loads(pickle.dumps(store)).prefix_path == store.prefix_path
    assert Store.create("hdfs:///user/x").prefix_path == "hdfs:///user/x"
    for wrong in ("s3://bucket/x", "hdfs://node:8020"):
        with pytest.raises(ValueError, match=wrong):
            HDFSStore(wrong)


def test_databricks_paths_are_one_place_and_a_directory_may_stand_in(tmp_path, monkeypatch):
    for form in ("dbfs:/x", "/dbfs/x", "file:///dbfs/x"):
        assert DBFSLocalStore(form).prefix_path == "file:///dbfs/x"
    assert DBFSLocalStore("dbfs:/x").get_localized_path("dbfs:/x/y") == "/dbfs/x/y"
    assert DBFSLocalStore("dbfs:/x").get_checkpoint_filename() == "checkpoint.tf"
    with pytest.raises(ValueError, match="/tmp/x"):
        DBFSLocalStore("/tmp/x")
    monkeypatch.setenv("FARANDOLE_DBFS_ROOT", str(tmp_path))
    DBFSLocalStore("dbfs:/x").write_text("dbfs:/x/note", "text")
    assert (tmp_path / "x" / "note").read_text() == "text"


def test_files_are_written_whole_and_read_back(tmp_path):
    store = LocalStore(str(tmp_path))
    path = f"{store.get_run_path('r')}/note.txt"
    assert not store.exists(path)
    store.write_text(path, "one")
    store.write_text(path, "two")
    assert store.read(path) == b"two"
    assert store.exists(path)
    assert os.listdir(tmp_path / "runs" / "r") == ["note.txt"]


def test_checkpoints_are_listed_by_suffix(tmp_path):
    store = LocalStore(str(tmp_path))
    for name in ("b.ckpt", "a.ckpt", "c.txt"):
        store.write_text(f"{store.get_run_path('r')}/{name}", "")
    run = store.get_run_path("r")
    assert store.get_checkpoints("r") == [f"{run}/a.ckpt", f"{run}/b.ckpt"]


def test_a_local_directory_is_copied_into_the_run(tmp_path):
    store = LocalStore(str(tmp_path))
    with store.get_local_output_dir_fn("r")() as directory:
        os.makedirs(f"{directory}/logs")
        with open(f"{directory}/logs/events", "wb") as file:
            file.write(b"events")
        store.sync_fn("r")(directory)
    assert not os.path.exists(directory)
    assert store.read(f"{store.get_run_path('r')}/logs/events") == b"events"


def test_a_directory_counts_as_a_data_set_when_it_holds_parquet(tmp_path):
    store = LocalStore(str(tmp_path))
    path = store.get_train_data_path()
    assert not store.is_parquet_dataset(path)
    store.write_text(f"{path}/notes.txt", "")
    assert not store.is_parquet_dataset(path)
    store.write_text(f"{path}/part-0.parquet", "")
    assert store.is_parquet_dataset(path)


def test_a_store_and_its_remote_form_pickle(tmp_path):
    store = LocalStore(str(tmp_path), save_runs=False)
    copied = pickle.loads(pickle.dumps(store))
    assert type(copied) is LocalStore
    assert copied.get_checkpoint_path("r") is None
    remote = LocalStore(str(tmp_path)).to_remote("r", 1)
    assert pickle.loads(pickle.dumps(remote)) == remote
    assert remote.train_data_path.endswith("intermediate_train_data.1")


def test_a_failed_write_names_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    store = LocalStore(str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="file/below"):
        store.check_writable()


@pytest.mark.parametrize(
    "url", ["s3://id:hidden@bucket/x", "abfss://c@a.dfs.core.windows.net/x?sig=hidden"]
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(ValueError, match="storage_options") as refused:
        Store.create(url)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("answers", [(True, True), (False, False), OSError("501 Not Implemented")])
def test_a_service_that_does_not_create_a_file_once_is_found_out_at_the_start(monkeypatch, answers):
    from farandole._native import store as native

    real, asked = native.Store, []

    class Service:
        def __init__(self, url):
            self.inner = real(url)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def create_if_absent(self, name, data):
            asked.append(name)
            if isinstance(answers, OSError):
                raise answers
            self.inner.write(name, data)
            return answers[len(asked) - 1]

    store = Store.create("memory://once/prefix")
    store.check_writable()
    monkeypatch.setattr(native, "Store", Service)
    with pytest.raises(OSError, match=r"memory://once/prefix does not support .*If-None-Match"):
        store.check_writable()
    assert not real("memory://once/prefix").list(), "nothing is left"
