# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An overwriting save that fails leaves the object that was there before."""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml import PipelineModel

from farandole._native import store as native
from farandole.spark.common.saving import save_directory as module
from farandole.spark.common.saving.save_directory import SaveDirectory
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchModel
from farandole.spark.torch.saving import state_bytes

pytestmark = pytest.mark.timeout(300)
WRITES = ("write_rows", "write_metadata_file")
METADATA = {"class": "an.Object", "uid": "u", "paramMap": {}, "defaultParamMap": {}}


class Broken(OSError):
    pass


@pytest.fixture(params=["spark", "store"])
def save_path(request, spark, tmp_path):
    """A path that Spark writes, and one that the native store does."""
    return (
        f"{tmp_path}/object"
        if request.param == "spark"
        else f"memory://saved-{tmp_path.name}/object"
    )


def files(save_path):
    return sorted(
        name
        for name, _ in native.Store(save_path).list()
        if not name.rpartition("/")[2].startswith(("_", "."))
    )


def read(save_path, spark):
    found = SaveDirectory(save_path, spark)
    return found.read_parts(found.read_metadata())


def breaking(monkeypatch, saved, call, *, after):
    """Makes a call of the files fail, before it did anything or when it has done its work."""
    real = getattr(saved._files, call)

    def broken(*arguments):
        if after:
            real(*arguments)
        raise Broken(call)

    monkeypatch.setattr(saved._files, call, broken)


@pytest.mark.parametrize("call", WRITES)
def test_a_save_that_fails_leaves_the_old_object(spark, save_path, monkeypatch, call):
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"old"}, overwrite=False
    )
    failing = SaveDirectory(save_path, spark)
    breaking(monkeypatch, failing, call, after=False)
    with pytest.raises(Broken):
        failing.write_object_version(METADATA, {"weights": b"new"}, overwrite=True)
    assert read(save_path, spark) == {"weights": b"old"}
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"next"}, overwrite=True
    )
    assert read(save_path, spark) == {"weights": b"next"}
    assert [name.partition("/")[0] for name in files(save_path)] == ["data", "metadata"]


def test_a_process_that_ends_after_its_data_or_metadata_leaves_one_whole_object(
    spark, save_path, monkeypatch
):
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"old"}, overwrite=False
    )
    for call, expected in zip(WRITES, (b"old", b"new"), strict=True):
        failing = SaveDirectory(save_path, spark)
        breaking(monkeypatch, failing, call, after=True)
        with pytest.raises(Broken):
            failing.write_object_version(METADATA, {"weights": b"new"}, overwrite=True)
        assert read(save_path, spark) == {"weights": expected}


def test_a_failed_deletion_is_logged_and_repeated_by_the_next_save(
    spark, save_path, monkeypatch, caplog
):
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"old"}, overwrite=False
    )
    failing = SaveDirectory(save_path, spark)
    breaking(monkeypatch, failing, "delete_entry", after=False)
    with caplog.at_level(logging.WARNING, "farandole"):
        failing.write_object_version(METADATA, {"weights": b"new"}, overwrite=True)
    assert "could not be deleted" in caplog.text
    assert read(save_path, spark) == {"weights": b"new"}
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"newest"}, overwrite=True
    )
    assert read(save_path, spark) == {"weights": b"newest"}
    assert len(files(save_path)) == 2


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "src/main.py",
        "data/train.csv",
        "metadata/owner.json",
        "metadata.txt",
        "stages/0/x",
    ],
)
def test_files_of_others_are_never_deleted_where_no_object_is(spark, save_path, name, overwrite):
    theirs = native.Store(save_path)
    theirs.write(name, b"of the user")
    theirs.write("data/save=0123/part-0.parquet", b"remains of a save that was cut off")
    shown = name if name.startswith(("data/", "metadata/")) else name.partition("/")[0]
    with pytest.raises(FileExistsError, match=re.escape(shown)) if overwrite else suppress(OSError):
        SaveDirectory(save_path, spark).write_object_version(
            METADATA, {"weights": b"x"}, overwrite=overwrite
        )
    assert theirs.read(name) == b"of the user"
    if overwrite:
        assert files(save_path) == sorted([name, "data/save=0123/part-0.parquet"])


def test_a_save_that_does_not_overwrite_deletes_nothing(spark, tmp_path):
    (tmp_path / "notes.txt").write_text("of the user")
    SaveDirectory(str(tmp_path), spark).write_object_version(
        METADATA, {"weights": b"x"}, overwrite=False
    )
    assert (tmp_path / "notes.txt").read_text() == "of the user"
    assert read(str(tmp_path), spark) == {"weights": b"x"}


def test_remains_of_a_first_save_that_was_cut_off_are_replaced(spark, save_path, monkeypatch):
    for call in WRITES:
        failing = SaveDirectory(save_path, spark)
        breaking(monkeypatch, failing, call, after=call == WRITES[0])
        with pytest.raises(Broken):
            failing.write_object_version(METADATA, {"weights": b"cut"}, overwrite=True)
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"new"}, overwrite=True
    )
    assert read(save_path, spark) == {"weights": b"new"}
    assert len(files(save_path)) == 2


def test_objects_of_the_earlier_layout_are_read_and_replaced(spark, save_path):
    old, text = native.Store(save_path), json.dumps({**METADATA, "uid": "before"})
    old.write(
        "data/part-00000.parquet", module._encode_parquet([("weights", 0, bytearray(b"earlier"))])
    )
    old.write("metadata/part-00000.txt", text.encode() + b"\n")
    assert read(save_path, spark) == {"weights": b"earlier"}
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"new"}, overwrite=True
    )
    assert read(save_path, spark) == {"weights": b"new"}
    assert len(files(save_path)) == 2


def test_earlier_versions_read_what_is_written_now(spark, tmp_path):
    save_path = f"{tmp_path}/object"
    for data in (b"one", b"two"):
        SaveDirectory(save_path, spark).write_object_version(
            METADATA, {"weights": data}, overwrite=True
        )
    (row,) = spark.read.parquet(f"{save_path}/data").collect()
    assert (row.part, row.chunk, bytes(row.bytes)) == ("weights", 0, b"two")
    assert json.loads(spark.read.text(f"{save_path}/metadata").first()[0])["class"] == "an.Object"


def test_a_save_of_a_newer_format_is_refused(spark, save_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"newer"}, overwrite=False
    )
    monkeypatch.undo()
    with pytest.raises(
        ValueError,
        match=f"has format {module.FORMAT_VERSION + 1}, .* reads up to format "
        f"{module.FORMAT_VERSION}:",
    ):
        read(save_path, spark)


def test_metadata_cannot_point_outside(spark, save_path):
    SaveDirectory(save_path, spark).write_object_version(METADATA, {}, overwrite=False)
    found = SaveDirectory(save_path, spark)
    metadata = found.read_metadata() | {"save": {"data": "data/../../elsewhere", "number": 9}}
    with pytest.raises(ValueError, match="names no directory of its data"):
        found.read_parts(metadata)


def damaged(save_path, spark, table):
    """An object whose rows are this table; written as a dictionary is, and packed."""
    file = pa.BufferOutputStream()
    pq.write_table(table, file, compression="zstd", row_group_size=1 << 20)
    save = SaveDirectory(save_path, spark)
    save.write_object_version(METADATA, {"weights": b"sound"}, overwrite=False)
    directory = save.read_metadata()["save"]["data"]
    store = native.Store(save_path)
    for name, _ in store.list():
        if name.startswith(directory):
            store.delete(name)
    store.write(f"{directory}/part-0.parquet", file.getvalue().to_pybytes())
    return f"{save_path}/{directory}"


def test_a_file_whose_rows_take_more_than_its_size_allows_is_read_only_with_a_higher_limit(
    spark, save_path, monkeypatch
):
    """A text of a dictionary, at which all rows point: 200 MB in a file of some kilobytes.

    A foreign file may be like that, and so may weights of zeros that an earlier version saved.
    """
    monkeypatch.setattr(module, "_BASE_ROW_BYTES", 8 << 20)
    rows = 200
    points = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([b"x" * (1 << 20)])
    )
    columns = [pa.array(["weights"] * rows), pa.array(range(rows), pa.int32()), points]
    damaged(save_path, spark, pa.Table.from_arrays(columns, names=["part", "chunk", "bytes"]))
    with pytest.raises(
        ValueError,
        match=rf"take more than files of their size .* set {module.SAVED_BYTES_VARIABLE} to the "
        rf"bytes",
    ):
        read(save_path, spark)
    monkeypatch.setenv(module.SAVED_BYTES_VARIABLE, str(rows + 10 << 20))
    assert read(save_path, spark) == {"weights": b"x" * (rows << 20)}
    monkeypatch.setenv(module.SAVED_BYTES_VARIABLE, "much")
    with pytest.raises(
        ValueError, match=f"{module.SAVED_BYTES_VARIABLE} must be a whole number.*: much"
    ):
        read(save_path, spark)


def test_a_relative_path_is_synchronized_where_spark_writes_it(spark, tmp_path, monkeypatch):
    synchronized = []
    monkeypatch.setattr(module.durable_writes, "fsync_directory_tree", synchronized.append)
    save_path = os.path.relpath(
        tmp_path / "object", spark._jvm.java.lang.System.getProperty("user.dir")
    )
    elsewhere = tmp_path / "some" / "other" / "directory"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": b"here"}, overwrite=False
    )
    assert (tmp_path / "object" / "metadata").is_dir()
    assert synchronized == [tmp_path / "object"] * 2


def test_files_with_other_columns_are_an_error_that_names_the_place(spark, save_path):
    where = damaged(save_path, spark, pa.table({"part": [1], "chunk": [0], "bytes": [b"x"]}))
    with pytest.raises(ValueError, match="are not those of a save") as told:
        read(save_path, spark)
    assert where.removeprefix("memory:/") in str(told.value)


def test_a_file_takes_no_more_memory_than_its_largest_row_and_no_more_bytes_than_its_rows(
    spark, save_path
):
    SaveDirectory(save_path, spark).write_object_version(
        METADATA, {"weights": bytes(40 << 20), "rest": b""}, overwrite=False
    )
    assert read(save_path, spark) == {"weights": bytes(40 << 20), "rest": b""}
    (size,) = (size for name, size in native.Store(save_path).list() if name.endswith(".parquet"))
    assert 40 << 20 < size < 41 << 20, "what is packed could be larger than its file says"
    (name,) = (name for name, _ in native.Store(save_path).list() if name.endswith(".parquet"))
    footer = pq.ParquetFile(pa.BufferReader(native.Store(save_path).read(name))).metadata
    assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == [1] * 4


def test_no_file_holds_the_consent_to_run_it(spark, tmp_path):
    save_path = f"{tmp_path}/object"
    LightningEstimator(model=torch.nn.Linear(1, 1), allow_pickle=True, epochs=3).write().save(
        save_path
    )
    found = SaveDirectory(save_path, spark)
    metadata = found.read_metadata()
    assert "allow_pickle" not in json.dumps(metadata)
    forged = {
        name: metadata[name] | {"allow_pickle": True} for name in ("paramMap", "defaultParamMap")
    }
    objects = state_bytes.unpickle_on_cpu(found.read_parts(metadata)["objects"]) | {
        "allow_pickle": True
    }
    SaveDirectory(save_path, spark).write_object_version(
        metadata | forged, {"objects": state_bytes.pickle_with_tensors(objects)}, overwrite=True
    )
    loaded = LightningEstimator.load(save_path)
    assert (loaded.getEpochs(), loaded.getAllowPickle()) == (3, None)
    # Spark saves the param maps of a CrossValidator, which it applies by `copy`.
    with pytest.raises(ValueError, match="a param map cannot set allow_pickle"):
        loaded.copy({loaded.allow_pickle: True})
    assert loaded.copy({loaded.epochs: 4}).getEpochs() == 4


def test_a_model_and_its_pipeline_are_overwritten_and_what_was_cut_off_is_ignored(
    spark, tmp_path, monkeypatch
):
    def model(weight):
        linear = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(linear.weight, weight)
        return TorchModel(model=linear, feature_columns=["x"], label_columns=["y"])

    path = f"{tmp_path}/model"
    model(1.0).write().overwrite().save(path)
    with monkeypatch.context() as patch:
        patch.setattr(
            module._SparkSaveFiles,
            "write_metadata_file",
            lambda *_: (_ for _ in ()).throw(Broken("full")),
        )
        with pytest.raises(Broken):
            model(2.0).write().overwrite().save(path)
    assert float(TorchModel.load(path).getModel().weight.detach()) == 1.0
    model(3.0).write().overwrite().save(path)
    assert float(TorchModel.load(path).getModel().weight.detach()) == 3.0
    with pytest.raises(FileExistsError, match="the path already exists"):
        model(4.0).write().save(path)
    pipeline = PipelineModel([model(5.0)])
    pipeline.write().overwrite().save(path)
    (stage,) = PipelineModel.load(path).stages
    assert float(stage.getModel().weight.detach()) == 5.0
    assert not Path(path, "data").exists()
