# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`prepare_data` without Spark: every source, in bounded memory, gone on with after a kill,
found again.
"""

import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

from farandole._native import prepare as native
from farandole._native import reader
from farandole.data import prepare_data
from farandole.spark.common import LocalStore

pytestmark = pytest.mark.timeout(120)
ROWS = 500


@pytest.fixture
def table():
    numbers = np.arange(ROWS)
    return pa.table({"id": numbers, "x": numbers * 0.5, "y": numbers % 3, "w": np.ones(ROWS)})


def column(url, name):
    opened = reader.Reader(
        reader.Dataset.open_url(url), columns=[name], batch_size=1 << 20, shuffle=False
    )
    (batch,) = opened.read_epoch(0)
    held = batch.column(name)
    return np.frombuffer(held, held.dtype).reshape(held.shape)


def ids(prepared):
    urls = [prepared.train_url, *([prepared.val_url] if prepared.val_url else [])]
    return [sorted(column(url, "id").tolist()) for url in urls]


def written(tmp_path, table, kind):
    path = tmp_path / f"source.{kind}"
    {
        "parquet": lambda: pq.write_table(table, path, row_group_size=60),
        "csv": lambda: pa.csv.write_csv(table, path),
        "tsv": lambda: pa.csv.write_csv(table, path, pa.csv.WriteOptions(delimiter="\t")),
        "jsonl": lambda: table.to_pandas().to_json(path, orient="records", lines=True),
        "arrow": lambda: pa.feather.write_feather(table, path, compression="uncompressed"),
    }[kind]()
    return path


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv", "jsonl", "arrow"])
def test_files_of_every_format_become_the_same_rows(tmp_path, table, kind):
    path = written(tmp_path, table, kind)
    done = prepare_data(
        path,
        tmp_path / "store",
        label_cols=["y"],
        sample_weight_col="w",
        validation=0.2,
        seed=7,
        compression="lz4",
    )
    assert (done.train_rows + done.val_rows, done.reused) == (ROWS, False)
    train, val = ids(done)
    assert sorted(train + val) == list(range(ROWS))
    assert 60 < len(val) < 140
    assert column(done.train_url, "x").tolist() == [
        value * 0.5 for value in column(done.train_url, "id").tolist()
    ]
    manifest = json.loads(
        (tmp_path / "store" / "intermediate_train_data.0" / "_manifest.json").read_text()
    )
    roles = {one["name"]: one["role"] for one in manifest["columns"]}
    assert roles == {"id": "feature", "x": "feature", "y": "label", "w": "weight"}


def test_frames_tables_and_streams_are_sources(tmp_path, table):
    class Stream:
        def __arrow_c_stream__(self, requested_schema=None):
            return table.__arrow_c_stream__(requested_schema)

    store = LocalStore(str(tmp_path))
    sources = [
        table,
        table.to_pandas(),
        pl.from_arrow(table),
        pl.from_arrow(table).lazy(),
        table.to_batches()[0],
        ds.dataset(table),
        pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=33)),
        Stream(),
    ]
    for source in sources:
        done = prepare_data(
            source, store, feature_cols=["id", "x"], label_cols=["y"], validation=0.2
        )
        assert sorted(itertools.chain.from_iterable(ids(done))) == list(range(ROWS)), type(source)
        again = (
            prepare_data(
                source, store, feature_cols=["id", "x"], label_cols=["y"], validation=0.2
            ).reused
            if not isinstance(source, pa.RecordBatchReader)
            else None
        )
        assert again in (None, not isinstance(source, Stream | ds.Dataset | pl.LazyFrame)), type(
            source
        )


def test_a_filtered_dataset_keeps_its_filter_and_a_directory_its_partitions(tmp_path, table):
    ds.write_dataset(
        table, tmp_path / "parts", format="parquet", partitioning=["y"], partitioning_flavor="hive"
    )
    (tmp_path / "parts" / "_SUCCESS").touch()
    done = prepare_data(tmp_path / "parts", tmp_path / "store", label_cols=["y"])
    assert sorted(column(done.train_url, "y").tolist()) == sorted(table["y"].to_pylist())
    some = ds.dataset(tmp_path / "parts", partitioning="hive").filter(ds.field("id") < 10)
    assert ids(prepare_data(some, tmp_path / "store")) == [list(range(10))]


def test_patterns_and_lists_name_files(tmp_path, table):
    for index in range(3):
        place = tmp_path / "in" / f"day={index} ü"
        place.mkdir(parents=True)
        pq.write_table(table.slice(index * 100, 100), place / "part=0 ä.parquet")
    (tmp_path / "in" / "day=0 ü" / "notes.txt").write_text("no data")
    done = prepare_data(f"{tmp_path}/in/**/*.parquet", tmp_path / "a b=ü")
    assert ids(done) == [list(range(300))]
    chosen = [f"{tmp_path}/in/day={index} ü/part=0 ä.parquet" for index in (2, 0)]
    assert ids(prepare_data(chosen, tmp_path / "a b=ü")) == [[*range(100), *range(200, 300)]]
    with pytest.raises(ValueError, match=r"names that end in \.parquet, \.txt: pass format="):
        prepare_data(tmp_path / "in", tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        prepare_data(f"{tmp_path}/in/*.csv", tmp_path / "store")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        prepare_data(tmp_path / "nowhere.csv", tmp_path / "store")


def test_csv_takes_options_and_types_and_files_may_guess_differently(tmp_path):
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    first.write_text("a;b\n1;007\n2;008\n")
    second.write_text("a;b\n2.5;009\n")
    (tmp_path / "3.csv").write_text("")
    done = prepare_data(
        f"{tmp_path}/*.csv", tmp_path / "store", options={"delimiter": ";"}, types={"b": "string"}
    )
    assert sorted(column(done.train_url, "a").tolist()) == [1, 2, 2.5]
    assert done.columns["b"].dtype == "utf8"
    with pytest.raises(ValueError, match=r"unknown option of csv .*: delimeter"):
        prepare_data(first, tmp_path / "store", options={"delimeter": ";"})
    with pytest.raises(ValueError, match=r"validation column 'c' is not in the source"):
        prepare_data(first, tmp_path / "store", options={"delimiter": ";"}, validation="c")


def test_an_error_of_a_file_names_it(tmp_path, table):
    store = tmp_path / "store"
    late = tmp_path / "late.csv"
    late.write_text("a\n" + "1\n" * 3_000_000 + "x\n")
    with pytest.raises(ValueError, match=r"cannot read .*late\.csv: .*conversion error.*types="):
        prepare_data(late, store)
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(table, parts / "0.parquet")
    pq.write_table(table.drop_columns("x"), parts / "1.parquet")
    with pytest.raises(
        ValueError, match=r"no column 'x' in .*parts/1\.parquet, it is in .*parts/0\.parquet"
    ):
        prepare_data(parts, store)
    pq.write_table(table.set_column(1, "x", pa.array(["t"] * ROWS)), parts / "1.parquet")
    with pytest.raises(
        ValueError, match=r"column 'x' is string in .*1\.parquet, in .*0\.parquet it is double"
    ):
        prepare_data(parts, store)
    whole = (parts / "0.parquet").read_bytes()
    (parts / "1.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises((ValueError, OSError), match=r"cannot read .*1\.parquet"):
        prepare_data(parts, store)
    (parts / "1.parquet").write_bytes(b"")
    with pytest.raises((ValueError, OSError), match=r"cannot read .*1\.parquet"):
        prepare_data(parts, store)
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_no_rows_and_one_row(tmp_path, table):
    with pytest.raises(ValueError, match=r"no rows of training data \(the data is empty\)"):
        prepare_data(table.slice(0, 0), tmp_path)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="empty"):
        prepare_data(tmp_path / "empty.csv", tmp_path)
    assert ids(prepare_data(table.slice(7, 1), tmp_path)) == [[7]]


def test_nulls_and_nan_are_errors_unless_something_takes_their_place(tmp_path):
    frame = pd.DataFrame({"id": [1, 2, 3], "x": [0.5, None, 1.5]})
    holes = pa.table(
        {
            "id": [1, 2, 3],
            "x": pa.array([0.5, None, float("nan")]),
            "f": pa.array([True, None, False]),
        }
    )
    with pytest.raises(ValueError, match=r"column x has nulls in 1 of 3 rows"):
        prepare_data(frame, tmp_path)
    filled = prepare_data(holes, tmp_path, fill={"x": -1, "f": True})
    assert column(filled.train_url, "x").tolist() == [0.5, -1, -1]
    assert column(filled.train_url, "f").tolist() == [True, True, False]
    assert column(prepare_data(holes, tmp_path, fill=0).train_url, "f").tolist() == [
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match=r"column x has NaN in 1 of 2 rows.*first at its row 1"):
        prepare_data(pa.table({"x": [1.0, float("nan")]}), tmp_path)
    kept = prepare_data(pa.table({"x": [1.0, float("nan")]}), tmp_path, allow_nan=True)
    assert kept.train_rows == 2
    infinite = pa.table({"x": [1.0, float("nan"), float("inf")]})
    with pytest.raises(
        ValueError, match=r"column x has infinite values in 1 of 3 rows.*first at its row 2 \(allow"
    ):
        prepare_data(infinite, tmp_path, fill=0)
    kept = prepare_data(infinite, tmp_path, fill=0, allow_nan=True)
    assert column(kept.train_url, "x").tolist() == [1.0, 0.0, float("inf")]
    with pytest.raises(ValueError, match="not kept: z"):
        prepare_data(holes, tmp_path, fill={"z": 0})


def test_extremes_are_given_for_columns_whose_values_are_all_numbers_and_for_no_others(tmp_path):
    # Two batches of one partition: what the first has does not speak for the second.
    first, second = (
        pa.table({"x": [0.5, 1.5], "i": [1, 2]}),
        pa.table({"x": [float("nan"), 2.5], "i": [3, 4]}),
    )
    done = prepare_data(pa.concat_tables([first, second]), tmp_path, allow_nan=True)
    columns = json.loads(native.read_manifest(done.train_url))["columns"]
    told = {one["name"]: (one.get("min"), one.get("max")) for one in columns}
    assert told == {"x": (None, None), "i": (1.0, 4.0)}


def test_a_column_of_words_says_what_is_held_out(tmp_path):
    words = pa.table({"id": range(5), "side": ["train", "val", "Test", "train", None]})
    done = prepare_data(words, tmp_path, validation="side")
    assert ids(done) == [[0, 3], [1]]
    assert done.dropped == 2


def test_data_is_found_again_by_another_process_and_not_after_a_change(tmp_path, table):
    path = written(tmp_path, table, "parquet")
    code = f"""
from farandole.data import prepare_data
done = prepare_data({str(path)!r}, {str(tmp_path / "store")!r}, validation=0.5)
print(done.index, done.reused)
"""
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.split() == ["0", "False"]
    found = prepare_data(path, tmp_path / "store", validation=0.5)
    assert (found.index, found.reused, found.train_rows + found.val_rows) == (0, True, ROWS)
    for change in (
        {"validation": 0.4},
        {"validation": 0.5, "seed": 1},
        {"validation": 0.5, "feature_cols": ["x"]},
    ):
        assert not prepare_data(path, tmp_path / "store", **change).reused
    pq.write_table(table.slice(1), path)
    assert not prepare_data(path, tmp_path / "store", validation=0.5).reused
    anew = prepare_data(path, tmp_path / "store", validation=0.5, reuse=False)
    assert not anew.reused


def test_damaged_data_is_prepared_again_and_a_flipped_bit_is_found(tmp_path, table):
    done = prepare_data(table, tmp_path)
    (file,) = (tmp_path / "intermediate_train_data.0").glob("*.parquet")
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 1
    file.write_bytes(bad)
    with pytest.raises(OSError, match=r"row group \d+.* damaged"):
        [column(done.train_url, name) for name in table.column_names]
    file.write_bytes(good[:-1])
    again = prepare_data(table, tmp_path)
    assert not again.reused
    assert ids(again) == [list(range(ROWS))]


KILLED = program_path(__file__, "prepare_until_stopped")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_killed_preparation_continues_with_what_is_missing(tmp_path, kind):
    rows = 40_000
    source = tmp_path / f"many.{kind}"
    table = pa.table({"id": np.arange(rows), "x": np.arange(rows) * 0.5})
    if kind == "csv":
        pa.csv.write_csv(table, source)
    else:
        source.mkdir()
        for index in range(4):
            pq.write_table(table.slice(index * 10_000, 10_000), source / f"{index}.parquet")
    command = [sys.executable, KILLED, str(source), str(tmp_path / "store")]
    # Parquet: one partition a file, so the third file's is number 200000.
    stop = {"csv": "2", "parquet": "200000"}[kind]
    with subprocess.Popen([*command, stop], stdout=subprocess.PIPE, text=True) as killed:
        for line in killed.stdout:
            if line.strip() == stop:
                break
        os.kill(killed.pid, signal.SIGKILL)
    place = tmp_path / "store" / "intermediate_train_data.0"
    assert not (place / "_manifest.json").exists()
    with pytest.raises(OSError, match="preparation was killed"):
        reader.Dataset.open_url(str(place))
    (place / "part-00001-0badcafe.parquet#1").write_bytes(b"what a killed upload leaves")
    if kind == "csv":  # a finished partition that the disk lost
        next(place.glob("part-00001-*.parquet")).write_bytes(b"")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = 2 if kind == "csv" else 3
    assert done.stdout.splitlines()[-1] == f"done 0 {found} {rows}", done.stdout
    train = set(column(str(place), "id").tolist())
    val = set(column(str(tmp_path / "store" / "intermediate_val_data.0"), "id").tolist())
    assert train | val == set(range(rows))
    assert not train & val
    left = {name for name in os.listdir(place) if not name.startswith("part-")}
    assert left == {"_manifest.json"} | {name for name in left if name.startswith("_use-")}
    assert not any("#" in name or "0badcafe" in name for name in os.listdir(place))


def test_two_preparations_at_once_never_share_a_place(tmp_path, table):
    code = f"""
import pyarrow as pa
from farandole.data import prepare_data
for number in range(4):
    done = prepare_data(pa.table({{"id": [number] * 50}}), {str(tmp_path)!r})
    print(done.index, number)
"""
    several = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.communicate(timeout=60)[0] for process in several]
    assert all(process.returncode == 0 for process in several)
    for line in "".join(told).splitlines():
        index, number = line.split()
        values = column(str(tmp_path / f"intermediate_train_data.{index}"), "id")
        assert values.tolist() == [int(number)] * 50


def test_a_full_disk_is_said_and_the_next_try_continues(tmp_path):
    pa.csv.write_csv(
        pa.table({"id": np.arange(200_000), "x": np.arange(200_000) * 0.5}), tmp_path / "many.csv"
    )
    code = f"""
import resource, sys
from farandole.data import prepare, prepare_data
prepare.PARTITION_TARGET_BYTES = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    done = prepare_data({str(tmp_path / "many.csv")!r}, {str(tmp_path / "store")!r}, types={{"id": "int64"}})
    print(done.index, done.train_rows)
except OSError as error:
    print("OSError", error)
"""  # noqa: E501

    def run(limit, part):
        command = [sys.executable, "-c", code, str(limit), str(part)]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    told = run(300_000, 1 << 30)
    assert told.startswith("OSError"), told
    assert "intermediate_train_data.0/part-00000-" in told
    place = tmp_path / "store" / "intermediate_train_data.0"
    assert os.listdir(place) == ["_preparation.json"]
    assert run(1 << 40, 1 << 30).split() == ["0", "200000"]


def test_memory_is_bounded_whatever_the_source(tmp_path):
    rows = 1_500_000
    path = tmp_path / "large.csv"
    piece = pa.table(
        {f"c{index}": np.random.default_rng(index).random(50_000) for index in range(8)}
    )
    with pa.csv.CSVWriter(path, piece.schema) as writer:
        for _ in range(rows // 50_000):
            writer.write(piece)
    code = f"""
import resource
from farandole.data import prepare_data
import pyarrow.dataset, pyarrow.csv, pyarrow.json
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = prepare_data({str(path)!r}, {str(tmp_path / "store")!r}, validation=0.1)
print(done.train_rows + done.val_rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    count, grown = map(int, done.stdout.split())
    assert count == rows
    assert grown < 400, f"{grown} MiB for a source of {path.stat().st_size >> 20} MiB"


def test_stores_of_other_kinds_hold_prepared_data_and_sources(tmp_path, table):
    from farandole.spark.common import Store

    store = Store.create(f"memory://prepare-{os.getpid()}/data")
    path = f"memory://prepare-{os.getpid()}/source/rows.parquet"
    with store.fs.open(path, "wb") as file:
        pq.write_table(table, file)
    done = prepare_data(path, store, label_cols=["y"])
    assert ids(done) == [list(range(ROWS))]
    assert prepare_data(path, store, label_cols=["y"]).reused


def test_data_of_a_name_is_kept_and_data_of_a_stream_gives_its_place(tmp_path, table):
    named = prepare_data(table, tmp_path)
    named.release()
    stream = pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    with prepare_data(stream, tmp_path) as once:
        assert once.index == 1
    again = prepare_data(
        pa.RecordBatchReader.from_batches(table.schema, table.to_batches()), tmp_path
    )
    assert again.index == 1
    assert prepare_data(table, tmp_path).reused


def test_a_foreign_place_is_ignored(tmp_path, table):
    theirs = tmp_path / "intermediate_train_data.0" / "part-0.parquet"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    assert prepare_data(table, tmp_path).index == 1
    assert theirs.read_text() == "precious"
    assert os.listdir(theirs.parent) == ["part-0.parquet"]


def test_an_object_that_is_no_source_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a source must be a path.*builtins\.int"):
        prepare_data(5, tmp_path)
    with pytest.raises(ValueError, match="label column 'z' is not in the source"):
        prepare_data(pa.table({"a": [1]}), tmp_path, label_cols=["z"])
    with pytest.raises(ValueError, match="columns must be a list of names: 'a'"):
        prepare_data(pa.table({"a": [1]}), tmp_path, label_cols="a")
    with pytest.raises(
        ValueError, match="validation must be a share of the rows or the name of a column: nan"
    ):
        prepare_data(pa.table({"a": [1]}), tmp_path, validation=float("nan"))


def test_a_query_is_a_source(tmp_path, table):
    pq.write_table(table, tmp_path / "rows.parquet")
    names = pa.table({"y": [0, 1, 2], "weight": [0.5, 1.0, 1.5]})
    sql = "select r.id, r.x + 1 as x, n.weight from rows r join names n on r.y = n.y where r.y > 0"
    done = prepare_data(
        {"rows": tmp_path / "rows.parquet", "names": names}, tmp_path / "store", sql=sql
    )
    expected = [one for one in range(ROWS) if one % 3]
    assert ids(done) == [expected]
    again = [
        prepare_data(
            tmp_path / "rows.parquet", tmp_path / "store", sql="select id from source where id < 7"
        )
        for _ in range(2)
    ]
    assert [one.reused for one in again] == [False, True]
    assert ids(again[1]) == [list(range(7))]
    with pytest.raises(ValueError, match="not a query of source: "):
        prepare_data(
            tmp_path / "rows.parquet", tmp_path / "store", sql="select nothing from source"
        )
    with pytest.raises(ValueError, match=r"the query failed: .*[Dd]ivi"):
        prepare_data(
            tmp_path / "rows.parquet",
            tmp_path / "store",
            sql="select 1 / (id - id) as q from source",
        )


@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_of_few_rows_leaves_a_row_on_each_side(tmp_path, rows, share):
    frame = pa.table({"x": [float(row) for row in range(rows)]})
    data = prepare_data(frame, tmp_path, validation=share)
    assert (data.val_rows, data.train_rows) == ((1, rows - 1) if share < 0.5 else (rows - 1, 1))
    seen = [read_rows(url) for url in (data.train_url, data.val_url)]
    assert sorted(itertools.chain(*seen)) == [float(row) for row in range(rows)]
    assert prepare_data(frame, tmp_path, validation=share).reused


def test_the_row_held_out_of_few_is_the_same_however_they_are_cut(tmp_path):
    whole = prepare_data(
        pa.table({"x": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "whole", validation=0.001
    )
    for name, rows in (("a", [3.0, 1.0]), ("b", [2.0]), ("c", [4.0])):
        pq.write_table(pa.table({"x": rows}), tmp_path / f"{name}.parquet")
    cut = prepare_data(str(tmp_path / "*.parquet"), tmp_path / "cut", validation=0.001)
    assert read_rows(cut.val_url) == read_rows(whole.val_url)
    sums = [_content(one) for data in (whole, cut) for one in (data.train_url, data.val_url)]
    assert sums[:2] == sums[2:]


def test_rows_that_are_all_the_same_cannot_be_split(tmp_path):
    with pytest.raises(ValueError, match="no rows of validation data"):
        prepare_data(pa.table({"x": [1.0, 1.0, 1.0]}), tmp_path, validation=0.001)


def read_rows(url):
    return pq.read_table(url.removeprefix("file://")).column("x").to_pylist()


def _content(url):
    files = json.loads(native.read_manifest(url))["files"]
    return sum(int(one["content"], 16) for one in files) % 2**64
