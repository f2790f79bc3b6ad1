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

import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as sf

from farandole.spark.common import LocalStore
from farandole.spark.common.columns import Roles
from farandole.spark.common.prepare import clear_training_cache, find_data, prepare_data

pytestmark = pytest.mark.timeout(60)
ROLES = Roles(features=("x",), labels=("y",))


@pytest.fixture
def store(tmp_path):
    yield LocalStore(str(tmp_path))
    clear_training_cache()


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(Vectors.dense([float(index), 0.0]), index % 3, index, index % 4 == 0) for index in range(200)]
    return spark.createDataFrame(rows, ["x", "y", "id", "held"])


def prepared(store, frame, roles=ROLES, **options):
    with prepare_data(2, store, frame, roles, **options) as found:
        return found


def ids(url):
    return sorted(pq.read_table(url.removeprefix("file://"))["id"].to_pylist())


def test_every_row_lands_on_one_side(store, frame):
    found = prepared(store, frame, Roles(("x", "id"), ("y",), validation=0.25))
    assert found.train_rows + found.val_rows == 200
    assert 25 <= found.val_rows <= 75
    assert sorted(ids(found.train_url) + ids(found.val_url)) == list(range(200))
    assert {name: column.shape for name, column in found.columns.items()} == {"x": (2,), "id": (), "y": ()}


def test_the_split_depends_on_rows_and_seed_alone(store, frame):
    roles = Roles(("x", "id"), ("y",), validation=0.25)
    one = prepared(store, frame, roles, seed=1)
    other = prepared(store, frame.repartition(3), roles, seed=1)
    third = prepared(store, frame, roles, seed=2)
    assert ids(one.val_url) == ids(other.val_url) != ids(third.val_url)


def test_a_column_can_say_which_rows_are_held_out(store, frame):
    found = prepared(store, frame, Roles(("x", "id"), ("y",), validation="held"))
    assert ids(found.val_url) == list(range(0, 200, 4))
    assert set(found.columns) == {"x", "id", "y"}
    numbered = frame.withColumn("held", sf.expr("case when id < 10 then -1 when id < 50 then 2 else 0 end"))
    found = prepared(store, numbered, Roles(("x", "id"), ("y",), validation="held"))
    assert ids(found.val_url) == list(range(10, 50))
    assert (found.train_rows, found.dropped) == (150, 10)


def test_the_same_data_is_prepared_once(store, frame):
    first = prepared(store, frame)
    again = prepared(store, frame.select("*"))
    assert (first.reused, again.reused) == (False, True)
    assert again.train_url == first.train_url


def test_other_columns_options_or_rows_are_prepared_anew(store, frame):
    known = [prepared(store, frame)]
    for roles, options, rows in (
        (Roles(("x", "id"), ("y",)), {}, frame),
        (Roles(("x",), ("id",)), {}, frame),
        (Roles(("x",), ("y",), validation=0.5), {}, frame),
        (Roles(("x",), ("y",), validation=0.5), {"seed": 7}, frame),
        (ROLES, {}, frame.where("id < 100")),
    ):
        found = prepared(store, rows, roles, **options)
        assert not found.reused
        assert found.train_url not in [one.train_url for one in known]
        known.append(found)


def test_rows_that_may_differ_next_time_are_never_reused(store, frame):
    random = frame.where(sf.rand() < 0.5)
    assert not prepared(store, random).reused
    assert not prepared(store, random).reused


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
    rdd = spark.sparkContext.textFile(str(source)).map(lambda line: (float(line), float(line), int(line)))
    frame = spark.createDataFrame(rdd, "x double, y double, id long")
    assert not prepared(store, frame).reused
    assert not prepared(store, frame).reused


def test_data_whose_manifest_is_gone_is_prepared_again(store, frame, tmp_path):
    first = prepared(store, frame)
    (tmp_path / "intermediate_train_data.0" / "_manifest.json").unlink()
    again = prepared(store, frame)
    assert not again.reused
    assert find_data(store, ROLES, again.index).train_rows == first.train_rows


def test_data_in_use_is_not_written_over(store, frame):
    random = frame.where(sf.rand() < 0.5)
    with prepare_data(2, store, random, ROLES) as outer, prepare_data(2, store, random, ROLES) as inner:
        assert outer.train_url != inner.train_url
    assert prepared(store, random).train_url == outer.train_url


def test_a_failed_preparation_leaves_nothing(store, spark, tmp_path):
    ragged = spark.createDataFrame([([1.0], 0), ([1.0, 2.0], 0)], ["x", "y"])
    with pytest.raises(ValueError, match="column x"):
        prepared(store, ragged, Roles(("x",), ("y",), validation=0.5))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_of_somebody_else_are_passed_over(store, frame, tmp_path):
    theirs = tmp_path / "intermediate_train_data.0" / "part-0.parquet"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    assert prepared(store, frame).index == 1
    assert theirs.read_text() == "precious"


def test_data_of_a_process_that_has_ended_gives_its_place(store, frame, tmp_path):
    first = prepared(store, frame)
    clear_training_cache()
    lease = tmp_path / "intermediate_train_data.0" / "_lease.json"
    lease.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "time": 0}))
    assert prepared(store, frame.where("id > 5")).index == 1
    lease.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "time": time.time()}))
    assert prepared(store, frame.where("id > 6")).train_url == first.train_url


def test_other_stores_have_their_own_data(store, frame, tmp_path):
    first = prepared(store, frame)
    other = prepared(LocalStore(f"{tmp_path}/other"), frame)
    assert not other.reused
    assert other.train_url != first.train_url


def test_prepared_data_is_found_without_spark(store, frame):
    first = prepared(store, frame, Roles(("x",), ("y",), validation=0.2))
    found = find_data(store, ROLES, first.index)
    assert (found.train_rows, found.val_rows) == (first.train_rows, first.val_rows)
    assert found.columns["x"].shape == (2,)


def test_names_with_dots_and_backticks_are_columns_like_others(store, spark):
    frame = spark.createDataFrame([(1.0, 2)], ["a.b", "c`d"])
    found = prepared(store, frame, Roles(("a.b",), ("c`d",)))
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

    slow = spark.range(0, 8, 1, 2).selectExpr("cast(id as float) x", "id y").mapInArrow(slowly, "x float, y bigint")

    def interrupt():
        while not os.listdir(begun):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        prepared(store, slow)
    running = spark.sparkContext.statusTracker().getActiveStageIds
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running()
    ready = prepared(store, spark.range(8).selectExpr("cast(id as float) x", "id y"))
    assert (ready.index, ready.train_rows) == (0, 8)


def test_what_a_killed_preparation_left_is_emptied(store, frame, tmp_path):
    for side in ("train", "val"):
        left = tmp_path / f"intermediate_{side}_data.0"
        left.mkdir()
        (left / "part-00000-0badcafe-3.parquet").write_bytes(b"")
    gone = {"host": socket.gethostname(), "pid": 2**22 + 1, "time": time.time()}
    (tmp_path / "intermediate_train_data.0" / "_lease.json").write_text(json.dumps(gone))
    found = prepared(store, frame, Roles(("x",), ("y",), validation=0.5))
    assert found.index == 0
    assert len(os.listdir(tmp_path / "intermediate_val_data.0")) <= 3
    assert "part-00000-0badcafe-3.parquet" not in os.listdir(tmp_path / "intermediate_val_data.0")
