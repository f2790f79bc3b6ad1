# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The drop-in `petastorm`: rows, batches, shards, epochs, transformations and loaders.

`tests/clients/petastorm` compares them with the real one.
"""

import itertools
import subprocess
import sys
import threading
from decimal import Decimal

import numpy as np
import petastorm
import petastorm.reader
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from petastorm import NoDataAvailableError, TransformSpec, make_batch_reader, make_reader
from petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
)
from petastorm.errors import DecodeFieldError
from petastorm.etl.dataset_metadata import store_schema
from petastorm.predicates import in_lambda, in_set
from petastorm.pytorch import BatchedDataLoader, DataLoader
from petastorm.transform import edit_field
from petastorm.unischema import Unischema, UnischemaField
from pyspark.sql import types

ROWS, ROW_GROUP_ROWS = 20, 3


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The URL of 20 rows in two files, in row groups of 3, 3, 3 and 1."""
    folder = tmp_path_factory.mktemp("plain")
    for file in range(2):
        ids = np.arange(10) + 10 * file
        columns = {
            "id": ids,
            "half": (ids / 2).astype(np.float32),
            "even": ids % 2 == 0,
            "name": [f"row {each}" for each in ids],
            "vector": [[each, each + 0.5] for each in ids.tolist()],
        }
        pq.write_table(
            pa.table(columns), folder / f"part-{file}.parquet", row_group_size=ROW_GROUP_ROWS
        )
    return folder.as_uri()


SCHEMA = Unischema(
    "Pictures",
    [
        UnischemaField("id", np.int32, (), ScalarCodec(types.IntegerType()), False),
        UnischemaField("price", Decimal, (), ScalarCodec(types.DecimalType(6, 2)), False),
        UnischemaField("flag", np.bool_, (), ScalarCodec(types.BooleanType()), False),
        UnischemaField("maybe", np.int64, (), ScalarCodec(types.LongType()), True),
        UnischemaField("matrix", np.float32, (None, 2), NdarrayCodec(), False),
        UnischemaField("packed", np.int8, (3,), CompressedNdarrayCodec(), False),
        UnischemaField("png", np.uint8, (4, 5, 3), CompressedImageCodec("png"), False),
        UnischemaField("jpeg", np.uint8, (8, 8), CompressedImageCodec("jpeg", 95), False),
    ],
)


def make_row(number):
    return {
        "id": np.int32(number),
        "price": Decimal(number) / 4,
        "flag": np.bool_(number % 2),
        "maybe": None if number % 3 else np.int64(number),
        "matrix": np.full((1 + number % 3, 2), number, np.float32),
        "packed": np.array([number, -number, 0], np.int8),
        "png": np.arange(60, dtype=np.uint8).reshape(4, 5, 3) + np.uint8(number),
        "jpeg": np.full((8, 8), 10 * number, np.uint8),
    }


def write_coded(folder, rows):
    encoded = []
    for row in rows:
        fields = SCHEMA.fields
        stored = {
            name: value if value is None else fields[name].codec.encode(fields[name], value)
            for name, value in row.items()
        }
        encoded.append(
            {name: bytes(v) if isinstance(v, bytearray) else v for name, v in stored.items()}
        )
    kinds = {
        "id": pa.int32(),
        "price": pa.decimal128(6, 2),
        "flag": pa.bool_(),
        "maybe": pa.int64(),
    }
    arrow = pa.schema([(name, kinds.get(name, pa.binary())) for name in SCHEMA.fields])
    table = pa.Table.from_pylist(encoded, schema=arrow)
    pq.write_table(table, folder / "part.parquet", row_group_size=ROW_GROUP_ROWS)
    store_schema(folder.as_uri(), SCHEMA)
    return folder.as_uri()


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """The URL of 12 rows with a schema and a codec for each field."""
    return write_coded(tmp_path_factory.mktemp("coded"), map(make_row, range(12)))


def read(make, url, *arguments, **options):
    with make(url, *arguments, **options) as reader:
        return list(reader)


def ids_of(batches):
    return [row for batch in batches for row in batch.id.tolist()]


def test_rows_are_named_tuples_of_decoded_values(coded):
    with make_reader(coded, shuffle_row_groups=False) as reader:
        rows = list(reader)
        assert not reader.batched_output
    assert type(rows[0]).__name__ == "Pictures_view"
    for number, row in enumerate(rows):
        expected = make_row(number)
        assert row._fields == tuple(expected)
        for name, value in expected.items():
            found = getattr(row, name)
            assert type(found) is type(value)
            assert not isinstance(found, np.ndarray) or found.flags.writeable
            np.testing.assert_array_equal(found, value)


def test_batches_are_the_arrays_of_a_row_group(plain):
    first, *_, last = read(make_batch_reader, plain, shuffle_row_groups=False)
    assert first._fields == ("id", "half", "even", "name", "vector")
    assert [each.dtype.str for each in first] == ["<i8", "<f4", "|b1", "<U5", "<f8"]
    np.testing.assert_array_equal(first.vector, [[0, 0.5], [1, 1.5], [2, 2.5]])
    assert all(each.flags.writeable for each in first)
    assert last.name.tolist() == ["row 19"]


def test_lists_of_different_lengths_are_an_error_that_names_the_column(tmp_path):
    pq.write_table(pa.table({"x": [[1, 2], [3]]}), tmp_path / "part.parquet")
    with pytest.raises(RuntimeError, match=r"'x'.*same length.*2, 1"):
        read(make_batch_reader, tmp_path.as_uri())


NATIVE_COLUMNS = {
    **{name: pa.array([1, 2, 3, 4, 5], name) for name in ("int8", "int16", "int32", "int64")},
    **{name: pa.array([1, 2, 3, 4, 5], name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "float32": pa.array([0.5, -1, float("nan"), float("inf"), 0], pa.float32()),
    "float64": pa.array([0.1, -1, 2, 3, 4]),
    "bool": pa.array([True, False, True, True, False]),
    "text": pa.array(["a", "", "wörd", "d", "e"]),
    "large_text": pa.array(["a", "", "wörd", "d", "e"], pa.large_string()),
    "bytes": pa.array([b"", b"\xff", b"c", b"d", b"e"]),
    "vector": pa.array([[each, -each] for each in range(5)], pa.list_(pa.int16())),
    "fixed": pa.array([[each, 0.5] for each in range(5)], pa.list_(pa.float32(), 2)),
    "flags": pa.array([[True, each > 2] for each in range(5)]),
}
"""Columns that the native reader decodes."""
OTHER_COLUMNS = {
    "half": pa.array(np.arange(5, dtype=np.float16)),
    "null": pa.array([1, None, 3, 4, 5]),
    "null_flag": pa.array([True, None, False, True, True]),
    "null_text": pa.array(["a", None, "c", "d", "e"]),
    "null_list": pa.array([[1], None, [3], [4], [5]]),
    "null_in_list": pa.array([[1], [None], [3], [4], [5]]),
    "price": pa.array([Decimal(each) / 4 for each in range(5)], pa.decimal128(6, 2)),
    "date": pa.array([1, 2, 3, 4, 5], pa.date32()),
    "moment": pa.array([1, 2, 3, 4, 5], pa.timestamp("us")),
    "category": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
    "ragged": pa.array([[1], [1, 2], [], [4], [5]]),
    "texts": pa.array([["a"], ["b"], ["c"], ["d"], ["e"]]),
}
"""Columns that pyarrow decodes."""


def test_each_column_is_read_by_the_reader_that_keeps_its_values(tmp_path):
    table = pa.table(NATIVE_COLUMNS | OTHER_COLUMNS)
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=2)
    source = petastorm._row_groups.ParquetRowGroups(tmp_path.as_uri())
    assert source.native_columns == set(NATIVE_COLUMNS)
    assert [group.rows for group in source.groups] == [2, 2, 1]
    for group in reversed(source.groups):
        expected = table.slice(group.first_row, group.rows)
        found = source.read_table(group, table.column_names)
        for name in table.column_names:
            assert str(found[name].to_pylist()) == str(expected[name].to_pylist()), name
        without_pyarrow = group._replace(file=None)
        assert source.read_table(without_pyarrow, list(NATIVE_COLUMNS)).num_rows == group.rows


def test_lists_whose_lengths_differ_within_a_row_group_are_rows_of_their_lengths(tmp_path):
    # As many values as lists of one length would have.
    table = pa.table({"id": [1, 2], "x": [[1], [2, 3, 4]]})
    pq.write_table(table, tmp_path / "part.parquet")
    with pytest.warns(UserWarning, match="make_batch_reader is meant for it"):
        rows = read(make_reader, tmp_path.as_uri())
    assert [(row.id, row.x.tolist()) for row in rows] == [(1, [1]), (2, [2, 3, 4])]


def test_files_without_rows_have_no_batches(tmp_path):
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "part.parquet")
    with pytest.warns(UserWarning, match="no row group"):
        assert read(make_batch_reader, tmp_path.as_uri()) == []


def test_columns_that_no_array_can_hold_are_left_out_with_a_warning(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": [{"z": 2}]}), tmp_path / "part.parquet")
    with pytest.warns(UserWarning, match="'y' has an unsupported type"):
        assert read(make_batch_reader, tmp_path.as_uri())[0]._fields == ("x",)


def test_a_value_that_its_codec_cannot_decode_is_an_error_that_names_the_field(tmp_path):
    write_coded(tmp_path, [make_row(1)])
    table = pq.read_table(tmp_path / "part.parquet")
    broken = table.set_column(4, "matrix", pa.array([b"no array"], pa.binary()))
    pq.write_table(broken, tmp_path / "part.parquet")
    with pytest.raises(DecodeFieldError, match='Decoding field "matrix" failed'):
        read(make_reader, tmp_path.as_uri())


def test_make_reader_and_make_batch_reader_say_for_what_they_are(plain, coded):
    with pytest.warns(UserWarning, match="make_batch_reader is meant for it"):
        read(make_reader, plain, ["id"])
    with pytest.warns(UserWarning, match="make_reader is meant for it"):
        read(make_batch_reader, coded, ["id"])


@pytest.mark.parametrize("seed", [None, 3])
def test_every_row_is_in_one_shard_whatever_the_seed(plain, seed):
    options = {"seed": seed, "shard_count": 3}
    shards = [
        ids_of(read(make_batch_reader, plain, cur_shard=each, **options)) for each in range(3)
    ]
    assert all(shards)
    assert sorted(itertools.chain(*shards)) == list(range(ROWS))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cur_shard": 0, "shard_count": 9}, NoDataAvailableError, "8 row groups, 9 shards"),
        ({"cur_shard": 0}, ValueError, "both given"),
        ({"cur_shard": 2, "shard_count": 2}, ValueError, "below shard_count"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be a positive integer"),
        ({"reader_pool_type": "fiber"}, ValueError, "Unknown reader_pool_type: fiber"),
        ({"cache_type": "moon"}, ValueError, "cache_type"),
        ({"schema_fields": "id"}, ValueError, "schema_fields"),
        ({"schema_fields": ["ix"]}, RuntimeError, "No fields matching"),
        ({"predicate": 1}, ValueError, "derived from PredicateBase"),
        ({"predicate": in_set({1}, "ix")}, ValueError, "the predicate tests ix"),
        ({"rowgroup_selector": 1}, NotImplementedError, "rowgroup_selector"),
        ({"shuffel": 1}, TypeError, "shuffel"),
    ],
)
def test_an_impossible_option_is_an_error_before_reading(plain, options, error, message):
    with pytest.raises(error, match=message):
        make_batch_reader(plain, **options)


def test_a_data_set_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make_batch_reader((tmp_path / "nowhere").as_uri())


def test_epochs_follow_each_other_in_another_order_each_time(plain):
    with make_batch_reader(plain, ["id"], num_epochs=None) as reader:
        epochs = [tuple(ids_of(itertools.islice(reader, 8))) for _ in range(6)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len(set(epochs)) > 1


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("pool", ["dummy", "thread"])
def test_shuffled_parts_of_row_groups_have_each_row_once(plain, seed, pool):
    options = {"schema_fields": ["id"], "shuffle_rows": True, "seed": seed}
    with make_batch_reader(
        plain, shuffle_row_drop_partitions=3, num_epochs=2, reader_pool_type=pool, **options
    ) as reader:
        numbers = ids_of(reader)
    whole = sorted(ids_of_all(plain))
    half = len(numbers) // 2
    assert sorted(numbers[:half]) == whole
    assert sorted(numbers[half:]) == whole
    assert numbers[:half] != numbers[half:]


def ids_of_all(url):
    with make_batch_reader(url, schema_fields=["id"], num_epochs=1) as reader:
        return ids_of(reader)


def test_a_seed_repeats_the_order_of_row_groups_and_rows(plain):
    options = {"schema_fields": ["id"], "seed": 5, "shuffle_rows": True, "num_epochs": 2}
    first, second = (ids_of(read(make_batch_reader, plain, **options)) for _ in range(2))
    assert first == second
    assert first != sorted(first)
    assert sorted(first) == sorted([*range(ROWS)] * 2)


def test_an_endless_reader_without_rows_ends_with_an_error(plain):
    nothing = in_lambda(["id"], lambda ids: ids < 0)
    reader = make_batch_reader(plain, predicate=nothing, num_epochs=None)
    with reader, pytest.raises(NoDataAvailableError, match="no row in a whole pass"):
        next(reader)


def test_a_reader_starts_again_only_after_its_last_row(plain):
    with make_batch_reader(plain, ["id"]) as reader:
        next(reader)
        with pytest.raises(NotImplementedError, match="after all rows"):
            reader.reset()
        list(reader)
        reader.reset()
        assert len(ids_of(reader)) == ROWS
    with pytest.raises(RuntimeError, match="has stopped"):
        next(reader)


@pytest.mark.parametrize("endless", [False, True])
def test_the_threads_of_a_reader_end_with_it(plain, endless):
    def count_threads():
        return sum(thread.name.startswith("fd-petastorm") for thread in threading.enumerate())

    with make_batch_reader(plain, num_epochs=None if endless else 1) as reader:
        next(reader)
        assert count_threads() > 0
    assert count_threads() == 0


def test_reading_ahead_stays_within_the_memory_budget(plain, monkeypatch):
    monkeypatch.setattr(petastorm.reader, "default_byte_budget", lambda: 1)
    reads, most = [], 0
    read_row_group = petastorm._row_groups.RowGroupReading.read

    def count_reads(*arguments):
        reads.append(1)
        return read_row_group(*arguments)

    monkeypatch.setattr(petastorm._row_groups.RowGroupReading, "read", count_reads)
    with make_batch_reader(plain, shuffle_row_groups=False) as reader:
        for taken, _ in enumerate(reader, 1):
            most = max(most, len(reads) - taken)
    assert most <= 1  # one row group is read while the consumer has another one
    assert len(reads) == 8


def test_a_function_on_frames_changes_fields_and_shapes(plain):
    def make_images(frame):
        frame["image"] = frame["half"].map(lambda half: np.full((2, 2), half, np.float32))
        return frame[["image", "id"]]

    spec = TransformSpec(
        make_images,
        [edit_field("image", np.float32, (2, 2))],
        removed_fields=["half", "even", "name", "vector"],
    )
    first = read(make_batch_reader, plain, transform_spec=spec, shuffle_row_groups=False)[0]
    assert first._fields == ("id", "image")
    np.testing.assert_array_equal(first.image[2], [[1, 1], [1, 1]])


def test_a_function_whose_columns_are_not_those_of_its_schema_is_an_error(plain):
    spec = TransformSpec(lambda frame: frame.assign(more=1))
    with pytest.raises(
        ValueError, match=r"\(id, more\) do not match required schema columns \(id\)"
    ):
        read(make_batch_reader, plain, ["id"], transform_spec=spec)


def test_a_function_on_rows_and_a_predicate_on_decoded_values(coded):
    spec = TransformSpec(
        lambda row: {"id": row["id"], "sum": row["packed"].sum(dtype=np.int64)},
        [edit_field("sum", np.int64, ())],
        selected_fields=["sum", "id"],
    )
    big = in_lambda(["packed"], lambda packed: packed[0] > 9)
    rows = read(make_reader, coded, ["id", "packed"], transform_spec=spec, predicate=big)
    assert sorted(map(tuple, rows)) == [(0, 10), (0, 11)]
    assert rows[0]._fields == ("sum", "id")


def test_filters_leave_out_rows(plain):
    batches = read(make_batch_reader, plain, ["half"], filters=[("id", ">", 16)], seed=1)
    assert sorted(half for batch in batches for half in batch.half) == [8.5, 9.0, 9.5]


def test_a_loader_makes_full_batches_across_row_groups_and_a_shorter_last_one(plain):
    reader = make_batch_reader(plain, ["id", "half", "even", "vector"], shuffle_row_groups=False)
    with DataLoader(reader, batch_size=8) as loader:
        batches = list(loader)
        assert [len(batch["id"]) for batch in batches] == [8, 8, 4]
        assert batches[1]["id"].tolist() == list(range(8, 16))
        assert batches[0]["vector"].shape == (8, 2)
        kinds = [torch.int64, torch.float32, torch.uint8, torch.float64]
        assert [each.dtype for each in batches[0].values()] == kinds
        assert [len(batch["id"]) for batch in loader] == [8, 8, 4]  # a second pass


def test_a_loader_of_endless_epochs_has_no_shorter_batch(plain):
    reader = make_batch_reader(plain, ["id"], num_epochs=None)
    with DataLoader(reader, batch_size=8) as loader:
        assert [len(batch["id"]) for batch in itertools.islice(loader, 10)] == [8] * 10


@pytest.mark.parametrize("kind", [DataLoader, BatchedDataLoader])
@pytest.mark.parametrize("capacity", [2, 10, 100])
def test_a_shuffling_queue_mixes_rows_and_loses_none(plain, kind, capacity):
    reader = make_batch_reader(plain, ["id"], shuffle_row_groups=False)
    torch.manual_seed(1)
    with kind(reader, batch_size=3, shuffling_queue_capacity=capacity) as loader:
        ids = [int(each) for batch in loader for each in batch["id"]]
    assert sorted(ids) == list(range(ROWS))
    assert ids != sorted(ids)


def test_loaders_of_rows_collate_arrays_strings_and_decimals(coded):
    fields = ["id", "price", "flag", "png"]
    with DataLoader(make_reader(coded, fields, shuffle_row_groups=False), batch_size=5) as loader:
        batch = next(iter(loader))
    assert batch["png"].shape == (5, 4, 5, 3)
    assert batch["flag"].tolist() == [0, 1, 0, 1, 0]
    assert batch["price"][1] == Decimal("0.25")
    with BatchedDataLoader(make_reader(coded, ["id", "png"]), batch_size=5) as loader:
        assert [batch["png"].shape[0] for batch in loader] == [5, 5, 2]


def test_loaders_name_columns_that_no_tensor_can_hold(plain, coded):
    with (
        pytest.raises(TypeError, match="field name"),
        DataLoader(make_batch_reader(plain)) as loader,
    ):
        next(iter(loader))
    with pytest.raises(TypeError, match="None in maybe"), DataLoader(make_reader(coded)) as loader:
        list(loader)
    with pytest.raises(RuntimeError, match="last time iteration failed"):
        list(loader)


def test_a_loader_refuses_a_second_pass_before_the_first_has_ended(plain):
    with DataLoader(make_batch_reader(plain, ["id"])) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="finish a full pass"):
            next(iter(loader))


def test_importing_petastorm_imports_no_framework():
    program = (
        "import sys, petastorm, petastorm.spark, petastorm.codecs\n"
        "print({'torch', 'tensorflow', 'pyspark'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_the_version_is_that_of_the_petastorm_whose_names_these_are():
    import farandole

    assert (petastorm.__version__, petastorm.__farandole_version__) == (
        "0.13.1",
        farandole.__version__,
    )
