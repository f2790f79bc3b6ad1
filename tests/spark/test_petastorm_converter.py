# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The drop-in `petastorm.spark`: a DataFrame becomes files, and files become batches of ranks."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from petastorm import make_reader
from petastorm.codecs import NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.pytorch import BatchedDataLoader
from petastorm.spark import SparkDatasetConverter, make_spark_converter
from petastorm.spark import spark_dataset_converter as converters
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import types
from tests.pages import blocks_of
from tests.programs import program_path

from farandole.runner.backend import LocalBackend

CACHE = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
ROWS = 60


@pytest.fixture
def cache(spark, tmp_path):
    """A directory for the files of converters, whose URL needs to be quoted."""
    folder = tmp_path / "a cache"
    folder.mkdir()
    spark.conf.set(CACHE, f"file://{folder}/")
    yield folder
    spark.conf.unset(CACHE)


@pytest.fixture
def frame(spark):
    rows = "id", "id / 4 AS quarter", "array(float(id), float(2)) AS pair", "array(id / 2D) AS half"
    return spark.range(ROWS).repartition(4).selectExpr(*rows)


def folder_of(converter):
    return Path(urlsplit(converter.cache_dir_url).path)


def test_a_frame_becomes_batches_of_tensors_and_goes_with_delete(cache, frame):
    converter = make_spark_converter(frame)
    assert len(converter) == ROWS
    assert folder_of(converter).parent == cache
    with converter.make_torch_dataloader(batch_size=16, num_epochs=1) as loader:
        batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [16, 16, 16, 12]
    assert sorted(int(each) for batch in batches for each in batch["id"]) == list(range(ROWS))
    kinds = {name: str(values.dtype) for name, values in batches[0].items()}
    floats = dict.fromkeys(("quarter", "pair", "half"), "torch.float32")
    assert kinds == {"id": "torch.int64", **floats}
    assert batches[0]["pair"].shape == (16, 2)
    converter.delete()
    assert not list(cache.iterdir())


def test_the_same_rows_are_written_once_and_other_options_again(cache, frame):
    first = make_spark_converter(frame)
    assert make_spark_converter(frame).cache_dir_url == first.cache_dir_url
    double = make_spark_converter(frame, dtype=None)
    assert double.cache_dir_url != first.cache_dir_url
    with double.make_torch_dataloader(num_epochs=1) as loader:
        assert str(next(iter(loader))["quarter"].dtype) == "torch.float64"
    first.delete()
    assert make_spark_converter(frame).cache_dir_url != first.cache_dir_url


def test_vectors_become_matrices(cache, spark):
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]),), (Vectors.sparse(2, {1: 3.0}),)]
    converter = make_spark_converter(spark.createDataFrame(rows, ["features"]))
    with converter.make_torch_dataloader(num_epochs=1) as loader:
        (batch,) = loader
    assert sorted(batch["features"].tolist()) == [[0, 3], [1, 2]]
    assert str(batch["features"].dtype) == "torch.float32"


def test_a_directory_of_parquet_is_converted_without_writing(cache, frame, tmp_path):
    frame.write.parquet(f"{tmp_path}/rows")
    converter = make_spark_converter((tmp_path / "rows").as_uri())
    assert len(converter) == ROWS
    assert not list(cache.iterdir())
    converters._delete_at_exit(converter.cache_dir_url, os.getpid())
    assert (tmp_path / "rows").exists()
    converter.delete()  # petastorm deletes it, too, and the page says so
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("setting", "options", "error", "message"),
    [
        (None, {}, ValueError, f"Please set the spark config {CACHE}"),
        ("/tmp/x", {}, ValueError, "needs a scheme"),
        ("file:///tmp/x", {"compression_codec": "zip"}, RuntimeError, "compression_codec"),
        ("file:///tmp/x", {"dtype": "float16"}, ValueError, "float16 is not supported"),
    ],
)
def test_an_impossible_conversion_is_an_error(spark, frame, setting, options, error, message):
    if setting is not None:
        spark.conf.set(CACHE, setting)
    try:
        with pytest.raises(error, match=message):
            make_spark_converter(frame, **options)
    finally:
        spark.conf.unset(CACHE)


def test_deleted_files_are_an_error_after_a_while(cache, frame, monkeypatch):
    monkeypatch.setattr(converters, "_FILE_TIMEOUT_SECONDS", 0.1)
    converter = make_spark_converter(frame)
    converter.delete()
    with pytest.raises(FileNotFoundError, match="part-0"):
        converter.make_torch_dataloader().__enter__()


def read_shard(pickled, rank, size):
    """Returns the ids of a shard, as a rank of a notebook reads them."""
    converter, shard = pickle.loads(pickled), {"cur_shard": rank, "shard_count": size}
    with converter.make_torch_dataloader(
        batch_size=7, num_epochs=1, data_loader_fn=BatchedDataLoader, **shard
    ) as loader:
        return [int(each) for batch in loader for each in batch["id"]]


def read_own_shard(pickled):
    import farandole.torch as hvd

    hvd.init()
    return read_shard(pickled, hvd.rank(), hvd.size())


def test_each_rank_of_a_job_reads_its_shard(cache, frame):
    pickled = pickle.dumps(make_spark_converter(frame))
    first, second = LocalBackend(2).run(read_own_shard, (pickled,))
    assert min(len(first), len(second)) > ROWS // 4
    assert sorted(first + second) == list(range(ROWS))


def test_a_shard_that_is_not_the_rank_is_warned_of(cache, frame, monkeypatch, caplog):
    converter = make_spark_converter(frame)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    converter.make_torch_dataloader(cur_shard=1, shard_count=2)
    assert not caplog.records
    converter.make_torch_dataloader()
    assert "cur_shard=None and shard_count=None are not rank 1 and size 2" in caplog.text


@pytest.mark.slow
def test_a_frame_becomes_a_dataset_of_tensorflow(cache, frame):
    # In a process of its own, because this one has Keras on torch.
    converter = make_spark_converter(frame)
    program = program_path(__file__, "read_converter")
    words = [sys.executable, program, pickle.dumps(converter).hex()]
    variables = os.environ | {"KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=200, env=variables
    )
    assert done.returncode == 0, done.stderr
    rows, in_order, shuffled = map(json.loads, done.stdout.splitlines())
    assert rows == [[16, 2], [16, 2], [16, 2], [12, 2]]
    assert sorted(in_order) == sorted(shuffled) == list(range(ROWS))
    assert in_order != shuffled


def test_spark_writes_a_data_set_with_a_schema(spark, tmp_path):
    schema = Unischema(
        "Hello",
        [
            UnischemaField("id", np.int32, (), ScalarCodec(types.IntegerType()), False),
            UnischemaField("array", np.float32, (2, None), NdarrayCodec(), False),
            UnischemaField("text", np.str_, (), None, True),
        ],
    )
    rows = [{"id": number, "array": np.full((2, number), 1.5, np.float32)} for number in range(5)]
    rows[0]["text"] = "hällo"
    url = (tmp_path / "hello").as_uri()
    with materialize_dataset(spark, url, schema, row_group_size_mb=1):
        encoded = [dict_to_spark_row(schema, row) for row in rows]
        spark.createDataFrame(encoded, schema.as_spark_schema()).write.parquet(url)
    with make_reader(url) as reader:
        found = sorted(reader, key=lambda row: row.id)
    assert [(row.id, row.array.shape, row.text) for row in found] == [
        (number, (2, number), "hällo" if number == 0 else None) for number in range(5)
    ]


@pytest.mark.slow
def test_the_files_of_a_converter_go_with_its_process(tmp_path):
    program = program_path(__file__, "convert_and_end")
    words = [sys.executable, program, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 5])
def test_the_notebooks_of_the_page_train(tmp_path, number):
    page = [block for block in blocks_of("docs/moving.md") if block.kind == "python"]
    script = page[number].text.replace("/dbfs/tmp/cache", str(tmp_path / "cache"))
    (tmp_path / "page.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(word) for word in done.stdout.splitlines()[-1].split()]
    assert len(losses) == (1 if number == 4 else 2)
    assert max(losses) < 0.1
    assert len(set(losses)) == 1
