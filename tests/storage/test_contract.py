# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The contract of all stores, for each kind of storage."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from tests.spark.test_saved import METADATA, WRITES, Broken, breaking

from farandole._native import store as native
from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import Store
from farandole.spark.common.saving import save_directory

HADOOP = ["hdfs", "name_service", "kerberos", "kerberos_privacy"]
KINDS = ["local", "memory", "dbfs", "s3", "gcs", "azure", *HADOOP]


@pytest.fixture(params=KINDS)
def store(request, tmp_path, prefix, monkeypatch):
    kind = request.param
    if kind == "local":
        return Store.create(str(tmp_path / "a b=ü"))
    if kind == "memory":
        return Store.create(f"memory://{prefix}/x")
    if kind == "dbfs":
        monkeypatch.setenv("FARANDOLE_DBFS_ROOT", str(tmp_path))
        return Store.create(f"dbfs:/{prefix}")
    if kind in HADOOP:
        cluster = request.getfixturevalue(kind)
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        return Store.create(f"{cluster.url}/of-alice/{prefix}")
    root = {"s3": "s3://bucket", "gcs": "gs://bucket", "azure": "az://bucket"}[kind]
    return Store.create(
        f"{root}/{prefix}", storage_options=request.getfixturevalue(f"{kind}_options")
    )


def test_files_appear_whole_are_listed_and_go(store):
    note = f"{store.get_run_path('r')}/note.txt"
    assert not store.exists(note)
    store.write_text(note, "one")
    store.write_text(note, "two")
    assert store.exists(note)
    assert store.exists(store.get_run_path("r"))
    assert store.read(note) == b"two"
    run = native.Store(store.get_run_path("r"))
    assert run.list() == [("note.txt", 3)]
    assert [item[0] for item in native.Store(store.get_runs_path()).list_directory()] == ["r"]
    assert run.read_range("note.txt", 1, 3) == b"wo"
    with pytest.raises(FileNotFoundError, match="absent"):
        store.read(f"{store.get_run_path('r')}/absent")
    store.check_writable()
    assert run.delete_all() == 1
    assert not store.exists(note)


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize("call", WRITES)
def test_an_overwriting_save_that_fails_leaves_an_object(store, monkeypatch, call, after):
    # As where Spark does not know the store: the object is written by the store itself.
    monkeypatch.setattr(save_directory, "_spark_has_scheme", lambda *_: False)
    place = f"{store.prefix_path}/object"

    def overwrite(data, *broken):
        writing = save_directory.SaveDirectory(place, None)
        for name in broken:
            breaking(monkeypatch, writing, name, after=after)
        writing.write_object_version(METADATA, {"weights": data}, overwrite=True)

    def found():
        reading = save_directory.SaveDirectory(place, None)
        return reading.read_parts(reading.read_metadata())["weights"]

    overwrite(b"old")
    with pytest.raises(Broken):
        overwrite(b"new", call)
    assert found() == (b"new" if call == "write_metadata_file" and after else b"old")
    overwrite(b"next")
    assert found() == b"next"
    assert len(native.Store(place).list()) == 2, "the rest of the object that failed is gone"


def test_a_pickled_store_reaches_the_same_files(store):
    store.write_text(f"{store.prefix_path}/x", "text")
    again = pickle.loads(pickle.dumps(store))
    assert again.read(f"{again.prefix_path}/x") == b"text"
    remote = pickle.loads(pickle.dumps(store.to_remote("run")))
    remote.write("checkpoint", b"weights")
    assert store.read(f"{store.get_run_path('run')}/checkpoint") == b"weights"


def test_fsspec_reads_and_writes_the_store(store):
    fs, path = store.fs, f"{store.prefix_path}/table/data.bin"
    with fs.open(path, "wb") as file:
        file.write(b"0123456789" * 1000)
    with fs.open(path, "rb") as file:
        file.seek(-5, 2)
        assert file.read() == b"56789"
    assert fs.info(path)["size"] == 10_000
    assert fs.cat_file(path, 3, 6) == b"345"
    assert [entry["name"] for entry in fs.ls(f"{store.prefix_path}/table")] == [path]
    assert fs.exists(path)
    assert not fs.exists(path + "x")
    fs.rm(f"{store.prefix_path}/table", recursive=True)
    assert not fs.exists(path)


def test_pandas_and_pyarrow_go_through_the_same_door(store):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"x": list(range(100))})
    pq.write_table(table, f"{store.get_train_data_path()}/part-0.parquet", filesystem=store.fs)
    assert store.is_parquet_dataset(store.get_train_data_path())
    assert store.get_parquet_dataset(store.get_train_data_path()).to_table().equals(table)


def test_old_prepared_data_is_swept_and_runs_stay(store):
    prepare_data(pa.table({"x": np.arange(10)}), store).release()
    store.write_text(f"{store.get_train_data_path(1)}/mine.parquet", "x")
    store.write_text(f"{store.get_run_path('r')}/checkpoint", "x")
    assert store.gc(older_than=3600) == []
    assert store.gc(older_than=-0.0) == ["intermediate_train_data.0"]
    assert store.gc(older_than=-0.0) == [], "nothing of it is left, directories neither"
    assert store.exists(f"{store.get_run_path('r')}/checkpoint")
    assert store.exists(f"{store.get_train_data_path(1)}/mine.parquet")


def test_of_many_creators_of_a_file_one_succeeds(store):
    place = native.Store(store.get_run_path("r"))
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda name: place.create_if_absent("lease.json", name),
                [b"%d" % number for number in range(8)],
            )
        )
    assert made.count(True) == 1
    assert place.read("lease.json") == b"%d" % made.index(True)
    assert not place.create_if_absent("lease.json", b"late")
    place.delete("lease.json")
    assert place.create_if_absent("lease.json", b"again")


def test_data_is_prepared_found_again_and_read(store):
    import pyarrow as pa

    table = pa.table({"x": np.arange(500, dtype=np.float32), "y": np.arange(500)})
    with (
        prepare_data(table, store, label_cols=["y"], validation=0.2) as prepared,
        ThreadPoolExecutor(2) as pool,
    ):
        assert prepared.train_rows + prepared.val_rows == 500
        rows = [
            batch
            for url in (prepared.train_url, prepared.val_url)
            for batch in ParquetLoader(url, 64)
        ]
        assert sorted(np.concatenate([batch["y"] for batch in rows]).tolist()) == list(range(500))
        assert all((batch["x"] == batch["y"]).all() for batch in rows)
        others = [table.slice(0, 100 + number) for number in range(2)]
        found = list(pool.map(lambda one: prepare_data(one, store, label_cols=["y"]), others))
        assert len({prepared.index, *(one.index for one in found)}) == 3, (
            "nobody writes where another one does"
        )
        assert [one.train_rows for one in found] == [100, 101]
        for one in found:
            one.release()
    with prepare_data(table, store, label_cols=["y"], validation=0.2) as again:
        assert again.reused
