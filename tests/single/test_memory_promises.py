# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory that was promised to one loader is not promised to another, before it is filled."""

from __future__ import annotations

import collections
import gc
import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader, data_memory_budget
from farandole.spark.common.data.batch_source import BatchSource

KIB = 1 << 10
ROW_BYTES = 8


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A directory that is taken for shared memory; other directories are on a disk."""
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr(data_memory_budget, "_SHARED_MEMORY_PATH", directory)
    monkeypatch.setattr(data_memory_budget, "_file_system_kind", lambda _: "ext4")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(data_memory_budget.tempfile, "tempdir", None)
    return directory


def taken(directory):
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def write(folder, rows):
    folder.mkdir()
    table = pa.table({"id": pa.array(range(rows), pa.int64())})
    pq.write_table(table, folder / "rows.parquet")
    return str(folder)


def ids(batches):
    return [int(row) for batch in batches for row in batch["id"]]


@pytest.mark.parametrize("sizes", list(itertools.product([100, 300, 600], repeat=3)))
@pytest.mark.parametrize("filled", [0, 1, 2])
def test_caches_of_several_loaders_stay_within_the_memory(
    tmp_path, cache, monkeypatch, sizes, filled
):
    limit = 1000 * KIB
    monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda: limit - taken(cache))
    loaders = []
    for number, size in enumerate(sizes):
        path = write(tmp_path / f"{number}", size * KIB // ROW_BYTES)
        loaders.append(ParquetLoader(path, 1024, inmemory_cache_all=True))
        if number < filled:
            ids(loaders[-1])
    promised = sum(path.stat().st_size for path in cache.iterdir())
    assert promised <= limit
    if sum(sizes) * 1.2 < 1000:
        assert promised >= sum(sizes) * KIB
    for loader, size in zip(loaders, sizes, strict=True):
        assert sorted(ids(loader)) == list(range(size * KIB // ROW_BYTES))
    assert taken(cache) <= limit


def test_memory_of_a_loader_that_is_gone_is_free_again(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda: 1000 * KIB)
    first, second = (write(tmp_path / f"{name}", 75 * KIB) for name in "ab")
    loader = ParquetLoader(first, 1024, inmemory_cache_all=True)
    assert len(list(cache.iterdir())) == 1
    other = ParquetLoader(second, 1024, inmemory_cache_all=True)
    assert len(list(cache.iterdir())) == 1
    del loader, other
    gc.collect()
    other = ParquetLoader(second, 1024, inmemory_cache_all=True)
    assert len(list(cache.iterdir())) == 1
    assert len(ids(other)) == 75 * KIB


def make_source(path, rank, size, **more):
    return BatchSource(
        path,
        {"id": None},
        batch_size=64,
        rank=rank,
        size=size,
        shuffle=more.pop("shuffle", True),
        in_memory=True,
        **more,
    )


def pass_rows(source, number):
    return [
        int(row)
        for batch in source.iterate_epoch_batches(number, source.steps)
        for row in batch.columns["id"][: batch.valid]
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("free", list(itertools.product([0, 1 << 40], repeat=3)))
def test_a_pass_has_each_row_once_whichever_ranks_keep_their_rows(
    tmp_path, monkeypatch, caplog, free, shuffle
):
    path = write(tmp_path / "rows", 1000)
    sources = []
    for rank, own in enumerate(free):
        monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda own=own: own)
        sources.append(make_source(path, rank, 3, shuffle=shuffle))
        pass_rows(sources[-1], 0)
        assert bool(sources[-1]._cached_batches) == bool(own)
    for number in range(1, 3):
        rows = [row for source in sources for row in pass_rows(source, number)]
        assert set(collections.Counter(rows).items()) == {(row, 1) for row in range(1000)}
    warned = [
        one.getMessage() for one in caplog.records if "inmemory_cache_all" in one.getMessage()
    ]
    assert len(warned) == free.count(0)


def test_training_and_validation_rows_share_the_memory(tmp_path, monkeypatch):
    rows = 1000
    monkeypatch.setattr(
        data_memory_budget,
        "available_memory_bytes",
        lambda: int(1.5 * data_memory_budget._FREE_SPACE_FACTOR * rows * 8),
    )
    path = write(tmp_path / "rows", rows)
    train, val = (make_source(path, 0, 1, shuffle=False) for _ in range(2))
    with_train, with_val = (
        train.iterate_epoch_batches(0, train.steps),
        val.iterate_epoch_batches(0, val.steps),
    )
    next(with_train), next(with_val)
    collections.deque(with_train, 0), collections.deque(with_val, 0)
    assert (bool(train._cached_batches), bool(val._cached_batches)) == (True, False)


@pytest.mark.parametrize(("ranks", "kept"), [(1, True), (2, True), (4, False)])
def test_ranks_of_a_host_share_its_memory(tmp_path, monkeypatch, ranks, kept):
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", str(ranks))
    monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda: 3 * 8 * 1000)
    source = make_source(write(tmp_path / "rows", 1000), 0, 1, shuffle=False)
    pass_rows(source, 0)
    assert bool(source._cached_batches) == kept
