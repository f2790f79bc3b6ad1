# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's PyTorch loaders: batches of one size out of batches of any."""

import itertools
from collections import namedtuple
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from farandole.data import ParquetLoader
from farandole.spark.data_loaders import pytorch_data_loaders as loaders

ROWS = 103


@pytest.fixture
def reader(tmp_path):
    """Batches of 17 rows of a data set."""
    pq.write_table(
        pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float32)}),
        tmp_path / "a.parquet",
    )
    return ParquetLoader(tmp_path, 17, shuffle=False, framework="torch")


def ids(batches):
    batches = list(batches)
    assert all((batch["x"] == batch["id"]).all() for batch in batches)
    return [batch["id"].tolist() for batch in batches]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("kind", [loaders.PytorchDataLoader, loaders.PytorchAsyncDataLoader])
def test_an_epoch_has_every_row_once_in_batches_of_the_asked_size(reader, kind):
    loader = kind(reader=reader, batch_size=10, shuffling_queue_capacity=0)
    for _ in range(2):
        assert ids(loader) == [list(range(at, min(at + 10, ROWS))) for at in range(0, ROWS, 10)]
    assert len(loader) == 0, "nobody said how many"


def test_a_limit_ends_an_epoch(reader):
    loader = loaders.PytorchDataLoader(reader, 10, 0, limit_step_per_epoch=3)
    assert len(loader) == 3
    assert [ids(loader), ids(loader)] == [[list(range(at, at + 10)) for at in (0, 10, 20)]] * 2


def test_a_queue_shuffles_and_loses_nothing(reader):
    loader = loaders.PytorchDataLoader(reader, 10, 40)
    first, second = ids(loader), ids(loader)
    assert first != second
    assert {len(batch) for batch in first[:-1]} == {10}
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(ROWS))
    near = [abs(a - b) for a, b in zip(flat(first), flat(first)[1:], strict=False)]
    assert np.mean(near) > 5


@pytest.mark.parametrize(
    "kind", [loaders.PytorchInfiniteDataLoader, loaders.PytorchInfiniteAsyncDataLoader]
)
def test_an_endless_loader_continues_where_it_was(reader, kind):
    # The thread makes no batch without a request: the next epoch misses none.
    options: dict[str, Any] = (
        {"async_loader_queue_size": 4} if kind is loaders.PytorchInfiniteAsyncDataLoader else {}
    )
    loader = kind(
        reader=reader, batch_size=10, shuffling_queue_capacity=0, limit_step_per_epoch=8, **options
    )
    seen = ids(loader) + ids(loader)
    assert flat(seen)[:150] == [*range(ROWS), *range(150 - ROWS)]
    reader.num_epochs = 1
    with pytest.raises(ValueError, match="num_epochs=None: 1"):
        kind(reader=reader, batch_size=10, shuffling_queue_capacity=0)


@pytest.mark.parametrize(
    "kind", [loaders.PytorchInmemDataLoader, loaders.PytorchInmemAsyncDataLoader]
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_stay_in_memory(reader, kind, shuffle):
    loader = kind(
        reader=reader, batch_size=10, num_epochs=2, shuffle=shuffle, limit_step_per_epoch=5
    )
    assert len(loader) == 5
    epochs = [ids(loader) for _ in range(3)]
    assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(50)), list(range(50)), []]
    assert (epochs[0] != epochs[1]) == shuffle


def test_few_rows_in_memory_are_gone_over_again(reader):
    loader = loaders.PytorchInmemDataLoader(reader, 50, None, limit_step_per_epoch=3)
    assert [len(batch) for batch in ids(loader)] == [50, 50, 50]
    with pytest.raises(ValueError, match="limit_step_per_epoch must say how many"):
        loaders.PytorchInmemDataLoader(reader, 50, None)


def test_a_reader_of_petastorms_kind_is_read_to_its_end_and_started_again():
    row = namedtuple("Row", ["id", "x"])  # noqa: PYI024 - as petastorm makes them

    class Reader:
        num_epochs = 1
        last_row_consumed = False
        resets = 0

        def __iter__(self):
            for at in (0, 5):
                part = np.arange(at, at + 5)
                part.flags.writeable = False
                yield row(part, part.astype(np.float32))
            self.last_row_consumed = True

        def reset(self):
            self.last_row_consumed = False
            self.resets += 1

    reader = Reader()
    loader = loaders.PetastormBatchedDataLoader("", -1, False, reader, 4, 0)
    assert ids(loader) == ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert reader.resets == 1
    assert isinstance(next(iter(loader))["id"], torch.Tensor)


def test_a_reader_without_rows_is_an_error():
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        loaders.PytorchDataLoader([], 0, 0)
    with pytest.raises(ValueError, match="the reader of train gives no rows"):
        next(iter(loaders.PytorchInfiniteDataLoader([], 1, 0, name="train")))
    with pytest.raises(ValueError, match="gives no rows"):
        loaders.PytorchInmemDataLoader([], 1, None, limit_step_per_epoch=1)
