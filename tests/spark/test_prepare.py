# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prepared data: what is in it, when it is reused, and when it must not be."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as sf

from farandole._native.store import Store as NativeStore
from farandole.data.columns import ColumnRoles
from farandole.spark.common import LocalStore
from farandole.spark.common.data.prepare import (
    clear_training_cache,
    find_existing_data,
    prepare_data,
)

pytestmark = pytest.mark.timeout(180)
ROLES = ColumnRoles(features=("x",), labels=("y",))


@pytest.fixture
def store(tmp_path):
    yield LocalStore(str(tmp_path))
    clear_training_cache()


@pytest.fixture(scope="module")
def frame(spark):
    rows = [
        (Vectors.dense([float(index), 0.0]), index % 3, index, index % 4 == 0)
        for index in range(200)
    ]
    return spark.createDataFrame(rows, ["x", "y", "id", "held"])


def prepared(store, frame, roles=ROLES, **options):
    with prepare_data(2, store, frame, roles, **options) as found:
        return found


def ids(url):
    return sorted(pq.read_table(url.removeprefix("file://"))["id"].to_pylist())


def test_every_row_lands_on_one_side(store, frame):
    found = prepared(store, frame, ColumnRoles(("x", "id"), ("y",), validation=0.25))
    assert found.train_rows + found.val_rows == 200
    assert 25 <= found.val_rows <= 75
    assert sorted(ids(found.train_url) + ids(found.val_url)) == list(range(200))
    assert {name: column.shape for name, column in found.columns.items()} == {
        "x": (2,),
        "id": (),
        "y": (),
    }


def test_the_split_depends_on_rows_and_seed_alone(store, frame):
    roles = ColumnRoles(("x", "id"), ("y",), validation=0.25)
    one = prepared(store, frame, roles, seed=1)
    other = prepared(store, frame.repartition(3), roles, seed=1)
    third = prepared(store, frame, roles, seed=2)
    assert ids(one.val_url) == ids(other.val_url) != ids(third.val_url)


def test_a_column_can_say_which_rows_are_held_out(store, frame):
    found = prepared(store, frame, ColumnRoles(("x", "id"), ("y",), validation="held"))
    assert ids(found.val_url) == list(range(0, 200, 4))
    assert set(found.columns) == {"x", "id", "y"}
    numbered = frame.withColumn(
        "held", sf.expr("case when id < 10 then -1 when id < 50 then 2 else 0 end")
    )
    found = prepared(store, numbered, ColumnRoles(("x", "id"), ("y",), validation="held"))
    assert ids(found.val_url) == list(range(10, 50))
    assert (found.train_rows, found.dropped) == (150, 10)


def test_the_same_data_is_prepared_once(store, frame):
    first = prepared(store, frame)
    again = prepared(store, frame if pyspark.__version__ < "4" else frame.select("*"))
    assert (first.reused, again.reused) == (False, True)
    assert again.train_url == first.train_url


def test_other_columns_options_or_rows_are_prepared_again(store, frame):
    known = [prepared(store, frame)]
    for roles, options, rows in (
        (ColumnRoles(("x", "id"), ("y",)), {}, frame),
        (ColumnRoles(("x",), ("id",)), {}, frame),
        (ColumnRoles(("x",), ("y",), validation=0.5), {}, frame),
        (ColumnRoles(("x",), ("y",), validation=0.5), {"seed": 7}, frame),
        (ROLES, {}, frame.where("id < 100")),
    ):
        found = prepared(store, rows, roles, **options)
        assert not found.reused
        assert found.train_url not in [one.train_url for one in known]
        known.append(found)


def coin():
    """Returns a function that Spark must treat as nondeterministic."""
    return sf.udf(lambda value: value % 2 == 0, "boolean").asNondeterministic()


def test_rows_that_may_differ_next_time_are_never_reused(store, frame):
    for strange in (frame.where(coin()("id")), frame.where((sf.rand(1) < 2) & coin()("id"))):
        assert not prepared(store, strange).reused
        assert not prepared(store, strange).reused


def test_rows_drawn_by_a_seed_are_drawn_once(store, frame):
    drawn = [prepared(store, frame.where(sf.rand(seed) < 0.5)) for seed in (1, 1, 2)]
    assert [found.reused for found in drawn] == [False, True, False]
    unnamed = frame.where(sf.rand() < 0.5)
    assert not prepared(store, unnamed).reused
    assert prepared(store, unnamed).reused


def test_files_that_changed_are_read_again(store, frame, spark, tmp_path):
    path = f"{tmp_path}/source"
    frame.limit(20).coalesce(1).write.parquet(path)
    assert prepared(store, spark.read.parquet(path)).train_rows == 20
    assert prepared(store, spark.read.parquet(path)).reused
    frame.limit(30).coalesce(1).write.mode("overwrite").parquet(path)
    found = prepared(store, spark.read.parquet(path))
    assert (found.reused, found.train_rows) == (False, 30)


def test_an_rdd_over_a_text_file_is_read_again(store, spark, tmp_path):
    source = tmp_path / "numbers.txt"
    source.write_text("\n".join(str(number) for number in range(50)))
    rdd = spark.sparkContext.textFile(str(source)).map(
        lambda line: (float(line), float(line), int(line))
    )
    frame = spark.createDataFrame(rdd, "x double, y double, id long")
    assert not prepared(store, frame).reused
    assert not prepared(store, frame).reused


@pytest.mark.newest
def test_data_whose_manifest_is_gone_is_prepared_again(store, frame, tmp_path):
    first = prepared(store, frame)
    (tmp_path / "intermediate_train_data.0" / "_manifest.json").unlink()
    again = prepared(store, frame)
    assert not again.reused
    assert find_existing_data(store, ROLES, again.index).train_rows == first.train_rows


@pytest.mark.newest
def test_data_in_use_is_not_written_over(store, frame):
    random = frame.where(coin()("id"))
    with (
        prepare_data(2, store, random, ROLES) as outer,
        prepare_data(2, store, random, ROLES) as inner,
    ):
        assert outer.train_url != inner.train_url
    assert prepared(store, random).train_url == outer.train_url


def test_a_failed_preparation_leaves_nothing(store, spark, tmp_path):
    ragged = spark.createDataFrame([([1.0], 0), ([1.0, 2.0], 0)], ["x", "y"])
    with pytest.raises(ValueError, match="column x"):
        prepared(store, ragged, ColumnRoles(("x",), ("y",), validation=0.5))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.newest
def test_foreign_files_are_ignored(store, frame, tmp_path):
    theirs = tmp_path / "intermediate_train_data.0" / "part-0.parquet"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    assert prepared(store, frame).index == 1
    assert theirs.read_text() == "precious"


def holder_here(pid, written):
    """Returns the content of a mark of a process that this process can observe."""
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": str(Path("/proc/self/ns/pid").readlink()),
        "pid": pid,
        "time": written,
    }


@pytest.mark.newest
def test_data_of_a_process_that_has_ended_gives_its_place(store, frame, tmp_path):
    first = prepared(store, frame)
    clear_training_cache()
    mark = tmp_path / "intermediate_train_data.0" / "_use-other.json"
    mark.write_text(json.dumps(holder_here(os.getppid(), 0)))
    assert prepared(store, frame.where("id > 5")).index == 1
    mark.write_text(json.dumps(holder_here(2**22 + 1, time.time())))
    assert prepared(store, frame.where("id > 6")).train_url == first.train_url


@pytest.mark.newest
def test_other_stores_have_their_own_data(store, frame, tmp_path):
    first = prepared(store, frame)
    other = prepared(LocalStore(f"{tmp_path}/other"), frame)
    assert not other.reused
    assert other.train_url != first.train_url


@pytest.mark.newest
def test_prepared_data_is_found_without_spark(store, frame):
    first = prepared(store, frame, ColumnRoles(("x",), ("y",), validation=0.2))
    found = find_existing_data(store, ROLES, first.index)
    assert (found.train_rows, found.val_rows) == (first.train_rows, first.val_rows)
    assert found.columns["x"].shape == (2,)


def test_names_with_dots_and_backticks_are_columns_like_others(store, spark):
    frame = spark.createDataFrame([(1.0, 2)], ["a.b", "c`d"])
    found = prepared(store, frame, ColumnRoles(("a.b",), ("c`d",)))
    assert set(found.columns) == {"a.b", "c`d"}


def test_more_partitions_than_asked_for_are_merged(store, frame, tmp_path):
    prepared(store, frame.repartition(8), partitions_per_process=2)
    assert len(list((tmp_path / "intermediate_train_data.0").glob("*.parquet"))) == 4


def test_an_interrupt_ends_the_job_and_the_place_is_used_again(spark, store, tmp_path):
    begun = tmp_path.with_name(f"{tmp_path.name}-begun")
    begun.mkdir()

    def slowly(batches):
        import uuid

        (begun / uuid.uuid4().hex).touch()
        for batch in batches:
            time.sleep(60)
            yield batch

    slow = (
        spark.range(0, 8, 1, 2)
        .selectExpr("cast(id as float) x", "id y")
        .mapInArrow(slowly, "x float, y bigint")
    )

    def interrupt():
        while not os.listdir(begun):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        prepared(store, slow)
    running = spark.sparkContext.statusTracker().getActiveStageIds
    deadline = time.monotonic() + 30
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running()
    ready = prepared(store, spark.range(8).selectExpr("cast(id as float) x", "id y"))
    assert (ready.index, ready.train_rows) == (0, 8)


@pytest.mark.newest
def test_files_of_a_killed_preparation_are_deleted(store, frame, tmp_path):
    for side in ("train", "val"):
        left = tmp_path / f"intermediate_{side}_data.0"
        left.mkdir()
        (left / "part-00000-0badcafe-3.parquet").write_bytes(b"")
    gone = holder_here(2**22 + 1, time.time())
    (tmp_path / "intermediate_train_data.0" / "_lease-1.json").write_text(json.dumps(gone))
    begun = {"key": "once-upon-a-time", "time": time.time()}
    (tmp_path / "intermediate_train_data.0" / "_preparation.json").write_text(json.dumps(begun))
    found = prepared(store, frame, ColumnRoles(("x",), ("y",), validation=0.5))
    assert found.index == 0
    assert len(os.listdir(tmp_path / "intermediate_val_data.0")) <= 3
    assert "part-00000-0badcafe-3.parquet" not in os.listdir(tmp_path / "intermediate_val_data.0")


TYPES = """
    array(cast(id as float), 1f) as floats, array(array(cast(id as int), 2)) as nested, array(true, id > 3) as flags,
    cast(id as decimal(10, 2)) / 4 as price, cast(id % 2 as boolean) as yes,
    date_add(date'1970-01-01', cast(id as int)) as day,
    timestamp_micros(id) as at, cast(timestamp_micros(id) as timestamp_ntz) as wall, cast(id as string) as word,
    cast(cast(id as string) as binary) as bytes, cast(id as byte) as tiny, cast(id as short) as small, id as y
"""  # noqa: E501
EXPECTED = {
    "floats": ("float32", (2,), [3.0, 1.0]),
    "nested": ("int32", (1, 2), [[3, 2]]),
    "flags": ("bool", (2,), [True, False]),
    "price": ("float64", (), 0.75),
    "yes": ("bool", (), True),
    "day": ("int64", (), 3),
    "at": ("int64", (), 3),
    "wall": ("int64", (), 3),
    "tiny": ("int8", (), 3),
    "small": ("int16", (), 3),
}


def test_every_type_of_spark_that_can_be_a_feature(store, spark):
    import numpy as np

    from farandole._native.reader import Dataset, Reader
    from farandole.data import ParquetLoader

    frame = spark.range(20).selectExpr(*[one.strip() for one in split(TYPES)])
    found = prepared(
        store, frame, ColumnRoles(tuple(name for name in frame.columns if name != "y"), ("y",))
    )
    assert (found.columns["word"].dtype, found.columns["bytes"].dtype) == ("utf8", "binary")
    (batch,) = Reader(
        Dataset.open_url(found.train_url),
        columns=[*EXPECTED, "y"],
        batch_size=100,
        shuffle=False,
        tail="keep",
    ).read_epoch(0)
    held = {name: batch.column(name) for name in batch.names}
    values = {name: np.frombuffer(one, one.dtype).reshape(one.shape) for name, one in held.items()}
    row = values["y"].tolist().index(3)
    for name, (dtype, shape, value) in EXPECTED.items():
        assert (found.columns[name].dtype, found.columns[name].shape) == (dtype, shape), name
        assert values[name][row].tolist() == value, name
    (texts,) = ParquetLoader(found.train_url, 100, columns=["word", "bytes", "y"], shuffle=False)
    assert (texts["word"][row], texts["bytes"][row], texts["y"][row]) == ("3", b"3", 3)


def split(text):
    """Splits at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_sparse_vectors_take_little_room_when_asked_to(store, spark):
    rows = [(Vectors.sparse(2000, [index % 2000], [1.5]), index) for index in range(200)]
    frame = spark.createDataFrame(rows, ["x", "y"])
    plain, small = prepared(store, frame), prepared(store, frame, compress_sparse=True)
    sizes = [sum(file.stat().st_size for file in _files(one)) for one in (plain, small)]
    assert sizes[1] * 20 < sizes[0]
    assert small.columns["x"].shape == (2000,)
    assert small.columns["x"].dtype == "float64"


def _files(found):
    from pathlib import Path

    return Path(found.train_url.removeprefix("file://")).glob("*.parquet")


def test_words_hold_rows_out_and_a_fill_takes_the_place_of_nulls(store, spark):
    frame = spark.range(10).selectExpr(
        "case when id < 6 then 'train' when id < 9 then 'VALIDATION' else 'test' end as side",
        "case when id % 2 = 0 then cast(id as double) end as x",
        "id as y",
    )
    roles = ColumnRoles(("x",), ("y",), validation="side")
    with pytest.raises(ValueError, match=r"column x has nulls in \d+ of \d+ rows, in partition \d"):
        prepared(store, frame, roles)
    found = prepared(store, frame, roles, fill={"x": -1})
    assert (found.train_rows, found.val_rows, found.dropped) == (6, 3, 1)


def test_a_null_inside_an_array_is_counted_by_rows(store, spark):
    frame = spark.range(0, 8, 1, 1).selectExpr(
        "array(1f, if(id in (2, 5), null, 3f), 5f) as x", "id as y"
    )
    with pytest.raises(
        ValueError,
        match=(
            r"column x has nulls inside arrays in 2 of 8 rows, in partition 0, first at its row "
            r"2"
        ),
    ):
        prepared(store, frame)


def test_data_read_from_files_is_found_by_another_session_and_continues_after_a_kill(
    store, frame, spark, tmp_path
):
    source = f"{tmp_path}/source"
    frame.select("y", "id").repartition(4).write.parquet(source)

    def plan():
        return spark.read.parquet(source).where("id >= 10").selectExpr("id * 2 as id", "y")

    roles = ColumnRoles(("id",), ("y",))
    first = prepared(store, plan(), roles)
    assert not first.reused
    clear_training_cache()
    assert prepared(store, plan(), roles).reused
    assert not prepared(store, plan().where("id < 100"), roles).reused

    place = tmp_path / "intermediate_train_data.0"
    manifest = json.loads((place / "_manifest.json").read_text())
    assert manifest["fingerprint"].startswith("fit-")
    assert len(manifest["files"]) > 1
    # As a driver leaves it that is killed before the last partition: half of the marks, no
    # manifest.
    from farandole.data import prepared_directories
    from farandole.spark.common.data import plan_fingerprints as plans
    from farandole.spark.common.data import prepare

    kept, base = {}, plan()
    columns = base.select(
        *[base[name].alias(f"column{index}") for index, name in enumerate(("id", "y"))]
    )
    sources = plans.partition_sources(columns.coalesce(20))
    assert sources is not None
    assert len(set(sources)) == len(sources)
    (place / "_manifest.json").unlink()
    (place / "_preparation.json").write_text(
        json.dumps({"key": manifest["fingerprint"], "time": time.time()})
    )
    side = {"columns": manifest["columns"]}
    lease = NativeStore(str(place)).acquire_lease()
    for file in manifest["files"][:-1]:
        number = int(file["path"].split("-")[1])
        kept[number] = file["path"]
        part = {
            "partition": number,
            "rows": file["rows"],
            "dropped": 0,
            "train": {"file": file, **side},
            "val": None,
        }
        prepared_directories.record_resumable_partition(
            str(place), lease, number, json.dumps(part).encode(), source=sources[number]
        )
    NativeStore(str(place)).delete(lease)
    again = prepared(store, plan(), roles)
    assert (again.index, again.resumed, again.reused) == (0, len(kept), False)
    files = os.listdir(place)
    assert set(kept.values()) <= set(files)
    assert ids(again.train_url) == ids_of(plan())
    assert prepare.find_existing_data(store, roles, 0).train_rows == 190


def test_a_preparation_whose_place_another_takes_stops(store, frame, tmp_path, monkeypatch):
    from farandole.data import prepared_directories
    from farandole.spark.common.data import prepare

    place = NativeStore(f"{tmp_path}/intermediate_train_data.0")
    began = prepare._write_partitions

    def lose(*args):
        """Another process takes the directory before tasks write to it, as after a week."""
        for name, _, _, _ in place.list_directory():
            place.delete(name)
        other.append(
            prepared_directories.acquire_resumable_or_emptied_directory(
                store, "once b", resumable=False
            )[0]
        )
        return began(*args)

    other = []
    monkeypatch.setattr(prepare, "_write_partitions", lose)
    with pytest.raises(RuntimeError, match=r"lost its lease.*intermediate_train_data\.0"):
        prepared(store, frame)
    names = sorted(name for name, _ in place.list())
    assert names == sorted([other[0].lease_name, "_preparation.json"])
    other[0].delete_if_held()


def ids_of(frame):
    return sorted(row.id for row in frame.collect())


def test_plans_that_say_too_little_of_themselves_are_not_found_by_others(spark, tmp_path):
    from farandole.spark.common.data import plan_fingerprints

    spark.range(10).write.parquet(f"{tmp_path}/rows")
    rows = spark.read.parquet(f"{tmp_path}/rows")
    assert (
        plan_fingerprints.portable_plan_text(rows.selectExpr("id + 1 as x").where("x > 3"))
        is not None
    )
    assert plan_fingerprints.portable_plan_text(
        rows.selectExpr("id + 1 as x")
    ) != plan_fingerprints.portable_plan_text(rows.selectExpr("id + 2 as x"))
    double = sf.udf(lambda value: value * 2, "long")
    for strange in (
        rows.select(double("id").alias("x")),
        rows.where(sf.current_date() > sf.lit("2020-01-01")),
        rows.where(sf.rand() < 0.5),
        rows.groupBy("id").count(),
        spark.createDataFrame([(1,)], ["id"]),
    ):
        assert plan_fingerprints.portable_plan_text(strange) is None
