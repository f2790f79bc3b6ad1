# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Epochs over files that others wrote: order, shares of ranks, bad input."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole._native import store as native
from farandole._native.reader import Dataset, Reader

ROWS = 3001


@pytest.fixture
def files(tmp_path):
    """Three files with row groups of different sizes."""
    for number, (start, end) in enumerate([(0, 1000), (1000, 1100), (1100, ROWS)]):
        ids = np.arange(start, end)
        table = pa.table(
            {"id": ids, "x": ids.astype(np.float32), "v": np.stack([ids, -ids], 1).tolist()}
        )
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=300 + number * 77)
    (tmp_path / "_SUCCESS").write_text("")
    return tmp_path


def ids(epoch):
    """Ids of the valid rows of every batch; checks that rows are whole."""
    found = []
    for batch in epoch:
        of = {
            name: np.frombuffer(batch.column(name), batch.column(name).dtype)
            for name in batch.names
        }
        assert (of["x"] == of["id"]).all()
        assert (of["v"].reshape(-1, 2) == np.stack([of["id"], -of["id"]], 1)).all()
        assert np.frombuffer(batch.row_weights(), np.float32).sum() == batch.valid_rows
        found.append(of["id"][: batch.valid_rows].tolist())
    return found


def flat(batches):
    return [row for batch in batches for row in batch]


def test_the_footers_tell_rows_types_and_shapes(files):
    dataset = Dataset.open_url(str(files))
    assert (dataset.rows, dataset.is_prepared) == (ROWS, False)
    assert [(c.name, c.dtype, c.shape) for c in dataset.columns] == [
        ("id", "int64", ()),
        ("x", "float32", ()),
        ("v", "int64", (2,)),
    ]
    assert dataset.fingerprint == Dataset.open_url(str(files)).fingerprint
    pq.write_table(
        pa.table({"id": [1], "x": pa.array([1], pa.float32()), "v": [[1, -1]]}), files / "3.parquet"
    )
    assert dataset.fingerprint != Dataset.open_url(str(files)).fingerprint


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_cover_every_row_once_in_equal_steps(files, size, shuffle):
    dataset = Dataset.open_url(str(files))
    readers = [
        Reader(dataset, batch_size=64, rank=rank, size=size, shuffle=shuffle)
        for rank in range(size)
    ]
    shares = [ids(reader.read_epoch(0)) for reader in readers]
    assert {len(share) for share in shares} == {readers[0].step_count()}
    lengths = [len(flat(share)) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert sorted(row for share in shares for row in flat(share)) == list(range(ROWS))


def test_global_batches_do_not_depend_on_the_size_of_the_world(files):
    dataset = Dataset.open_url(str(files))

    def world(size):
        shares = [
            ids(Reader(dataset, batch_size=120 // size, rank=rank, size=size).read_epoch(2))
            for rank in range(size)
        ]
        return [sorted(flat(step)) for step in zip(*shares, strict=True)]

    assert world(1) == world(2) == world(3) == world(4)


def test_the_order_depends_on_seed_and_epoch_and_not_on_threads(files):
    dataset = Dataset.open_url(str(files))
    orders = [
        ids(Reader(dataset, batch_size=50, threads=threads).read_epoch(0)) for threads in (1, 2, 7)
    ]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] != ids(Reader(dataset, batch_size=50, seed=1).read_epoch(0))
    assert orders[0] != ids(Reader(dataset, batch_size=50).read_epoch(1))
    assert ids(Reader(dataset, batch_size=50, shuffle=False).read_epoch(0))[0] == list(range(50))


def test_the_tail_is_kept_padded_or_dropped(files):
    dataset = Dataset.open_url(str(files))
    last = {
        tail: list(Reader(dataset, batch_size=1000, tail=tail).read_epoch(0))[-1]
        for tail in ("keep", "pad", "drop")
    }
    assert [(b.rows, b.valid_rows) for b in last.values()] == [(1, 1), (1000, 1), (1000, 1000)]
    padded = np.frombuffer(last["pad"].column("id"), np.int64)
    assert (padded == padded[0]).all()
    weights = np.frombuffer(last["pad"].row_weights(), np.float32)
    assert weights.tolist() == [1.0] + [0.0] * 999


def test_an_epoch_continues_where_it_was_left_on_another_size(files):
    dataset = Dataset.open_url(str(files))
    done = [
        flat(ids(Reader(dataset, batch_size=50, rank=rank, size=2).read_epoch(0))[:7])
        for rank in range(2)
    ]
    rest = [
        flat(ids(Reader(dataset, batch_size=9, rank=rank, size=3).read_epoch(0, 700)))
        for rank in range(3)
    ]
    assert sorted(flat(done) + flat(rest)) == list(range(ROWS))


def test_threads_end_when_an_epoch_is_left(files):
    before = threads()
    epoch = Reader(Dataset.open_url(str(files)), batch_size=10, threads=5).read_epoch(0)
    next(epoch)
    assert threads() == before + 5
    epoch.close()
    assert threads() == before
    assert list(epoch) == []


def threads():
    import os

    return len(os.listdir("/proc/self/task"))


def test_buffers_are_aligned_writable_and_outlive_their_epoch(files):
    epoch = Reader(Dataset.open_url(str(files)), batch_size=10).read_epoch(0)
    batch = next(epoch)
    epoch.close()
    arrays = [np.frombuffer(batch.column(name), batch.column(name).dtype) for name in batch.names]
    del batch
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    arrays[0][:] = 7
    assert arrays[0].tolist() == [7] * 10


def test_other_python_threads_run_while_a_batch_is_waited_for(files):
    reader = Reader(Dataset.open_url(str(files)), batch_size=1)
    seen = threading.Event()
    other = threading.Thread(target=seen.set)
    epoch = reader.read_epoch(0)
    other.start()
    for _ in epoch:
        pass
    assert seen.is_set()
    other.join()


def test_a_column_that_no_batch_can_hold_is_an_error_with_the_reason(tmp_path):
    table = pa.table({"n": [1.0, None], "s": [{"a": "b"}] * 2, "r": [[1], [1, 2]], "ok": [1, 2]})
    pq.write_table(table, tmp_path / "f.parquet")
    dataset = Dataset.open_url(str(tmp_path))
    for column, reason in {"s": "it is Struct", "r": "its rows have different lengths"}.items():
        with pytest.raises(
            ValueError, match=f"column {column} cannot be read into batches: {reason}"
        ):
            Reader(dataset, columns=[column], batch_size=1)
    assert [field.name for field in Reader(dataset, batch_size=1).columns] == ["n", "ok"]
    with pytest.raises(ValueError, match=r"column n has 1 nulls in row group 0 of .*f\.parquet"):
        list(Reader(dataset, columns=["n"], batch_size=1).read_epoch(0))
    with pytest.raises(ValueError, match="no column z, there are: n, s, r, ok"):
        Reader(dataset, columns=["z"], batch_size=1)


def test_ragged_lists_that_add_up_are_found_when_they_are_read(tmp_path):
    pq.write_table(pa.table({"r": [[1, 2], [3], [4, 5, 6]]}), tmp_path / "f.parquet")
    with pytest.raises(
        ValueError,
        match=r"column r has rows of other lengths than 2 in row group 0 of .*f\.parquet",
    ):
        list(Reader(Dataset.open_url(str(tmp_path)), batch_size=1).read_epoch(0))


@pytest.mark.parametrize(
    "kind",
    [
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float32",
        "float64",
        "bool",
    ],
)
def test_lists_of_every_type_are_read_by_their_leaves(tmp_path, kind):
    values = np.arange(40).reshape(20, 2).astype(kind)
    pq.write_table(
        pa.table({"r": pa.array(list(values), pa.list_(pa.from_numpy_dtype(kind)))}),
        tmp_path / "f.parquet",
    )
    (batch,) = Reader(Dataset.open_url(str(tmp_path)), batch_size=20, shuffle=False).read_epoch(0)
    assert (np.frombuffer(batch.column("r"), kind).reshape(20, 2) == values).all()


def test_columns_about_which_files_disagree_are_refused(tmp_path):
    def read(*columns):
        opened = Dataset.open_url(str(tmp_path))
        return Reader(opened, batch_size=2, columns=list(columns) or None)

    pq.write_table(pa.table({"a": [1], "b": [1.0]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "1.parquet")
    for columns in ((), ("b",), ("a", "b")):
        with pytest.raises(ValueError, match=r"no column b in .*1\.parquet"):
            read(*columns)
    assert [one.name for one in read("a").columns] == ["a"]
    pq.write_table(pa.table({"a": ["x"], "b": [1.0]}), tmp_path / "1.parquet")
    for columns in ((), ("a",)):
        with pytest.raises(
            ValueError, match=r"column a is Utf8 in .*1\.parquet, elsewhere it is Int64"
        ):
            read(*columns)
    assert [one.name for one in read("b").columns] == ["b"]


def test_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "0.parquet")
    twice = pa.Table.from_arrays(
        [pa.array([1]), pa.array([3]), pa.array([2])], names=["a", "a", "b"]
    )
    pq.write_table(twice, tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"several columns are called a in .*1\.parquet"):
        Dataset.open_url(str(tmp_path))


def test_a_file_is_no_data_set(files):
    pq.write_table(pa.table({"a": [1]}), files / "x.parquet")
    for url in (str(files / "x.parquet"), f"file://{files}/x.parquet"):
        with pytest.raises(
            ValueError, match=r"this is a file; a data set is the directory .*x\.parquet"
        ):
            Dataset.open_url(url)
    native.Store("memory://a-file").write("x.parquet", b"")
    with pytest.raises(ValueError, match=r"this is a file; .*memory://a-file/x\.parquet"):
        Dataset.open_url("memory://a-file/x.parquet")


def test_truncated_files_are_errors_that_name_them(files):
    whole = (files / "2.parquet").read_bytes()
    for length in (0, 3, 11, len(whole) // 2, len(whole) - 1):
        (files / "2.parquet").write_bytes(whole[:length])
        with pytest.raises(OSError, match=r"2\.parquet"):
            Dataset.open_url(str(files))


def test_flipped_bytes_are_errors_and_never_a_hang(files):
    whole = (files / "2.parquet").read_bytes()
    for seed in range(40):
        random = np.random.default_rng(seed)
        broken = bytearray(whole)
        for at in random.integers(0, len(whole), 20):
            broken[at] ^= int(random.integers(1, 256))
        (files / "2.parquet").write_bytes(bytes(broken))
        message = ""
        try:
            for _ in Reader(Dataset.open_url(str(files)), batch_size=100).read_epoch(0):
                pass
        except (OSError, ValueError) as error:
            message = str(error)
        assert not message or "2.parquet" in message


def test_a_budget_that_is_too_small_says_what_would_do(files):
    reader = Reader(Dataset.open_url(str(files)), batch_size=10, byte_budget=1000)
    with pytest.raises(
        ValueError,
        match="a budget of 1000 bytes is too small for this data set, the least that works is",
    ):
        reader.read_epoch(0)


def test_a_request_that_cannot_be_is_refused(files):
    dataset = Dataset.open_url(str(files))
    with pytest.raises(ValueError, match="rank 2 of 2 with batches of 5"):
        Reader(dataset, batch_size=5, rank=2, size=2)
    with pytest.raises(ValueError, match="tail must be"):
        Reader(dataset, batch_size=5, tail="later")
    with pytest.raises(FileNotFoundError, match="no Parquet files and no manifest"):
        Dataset.open_url(str(files / "nowhere"))


@pytest.mark.timing
def test_the_first_batch_does_not_wait_for_thousands_of_files(tmp_path):
    one = tmp_path / "one.parquet"
    pq.write_table(pa.table({"x": np.arange(500, dtype=np.float32)}), one)
    seconds = {}
    for files in (100, 10_000):
        directory = tmp_path / str(files)
        directory.mkdir()
        for number in range(files):
            (directory / f"{number}.parquet").hardlink_to(one)
        reader = Reader(Dataset.open_url(str(directory)), batch_size=1024)
        firsts = []
        for number in range(5):
            start = time.perf_counter()
            epoch = reader.read_epoch(number)
            next(epoch)
            firsts.append(time.perf_counter() - start)
            epoch.close()
        seconds[files] = min(firsts)
    # The plan of an epoch knows all its files, which takes milliseconds; as many are opened of all
    # as of a hundred.
    assert seconds[10_000] < 2 * seconds[100] + 0.05


@pytest.mark.timing
def test_a_directory_of_a_thousand_files_is_planned_in_a_second(tmp_path):
    pq.write_table(
        pa.table({f"c{n}": np.zeros(100, np.float32) for n in range(20)}), tmp_path / "one.parquet"
    )
    for number in range(999):
        (tmp_path / f"{number}.parquet").hardlink_to(tmp_path / "one.parquet")
    best = 10.0
    for _ in range(3):
        start = time.perf_counter()
        assert Dataset.open_url(str(tmp_path)).rows == 100_000
        best = min(best, time.perf_counter() - start)
    assert best < 1
