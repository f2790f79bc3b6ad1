# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`farandole.data.ParquetLoader`."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader


@pytest.fixture
def path(tmp_path):
    """1000 rows whose columns tell the row."""
    ids = np.arange(1000)
    table = pa.table(
        {
            "a": ids.astype(np.float32),
            "b": (ids * 2).astype(np.float32),
            "label": ids,
            "c": (ids * 3).astype(np.float32),
            "v": np.stack([ids, ids], 1).astype(np.float64).tolist(),
            "flag": ids % 2 == 0,
        }
    )
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=90)
    return tmp_path


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_batches_are_dicts_whose_rows_belong_together(path, framework):
    loader = ParquetLoader(path, 64, framework=framework, cast={"v": "float32"})
    seen = []
    for batch in loader:
        label = np.asarray(batch["label"])
        assert np.asarray(batch["v"]).dtype == np.float32
        assert (np.asarray(batch["v"]) == np.stack([label, label], 1)).all()
        for name, factor in {"a": 1, "b": 2, "c": 3}.items():
            assert (np.asarray(batch[name]) == label * factor).all()
        assert (np.asarray(batch["flag"]) == (label % 2 == 0)).all()
        seen.extend(label.tolist())
    assert len(loader) == 16
    assert sorted(seen) == list(range(1000))


def test_every_iteration_is_the_next_epoch(path):
    loader = ParquetLoader(path, 1000, columns=["label"])
    first, second = (next(iter(loader))["label"].tolist() for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert next(iter(loader))["label"].tolist() == first


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_padding_has_no_weight_and_kept_tails_may_be_empty(path, framework):
    padded = [
        list(ParquetLoader(path, 333, rank=r, size=3, tail="pad", framework=framework))[-1]
        for r in range(3)
    ]
    assert [float(batch["_weights"].sum()) for batch in padded] == [1.0, 0.0, 0.0]
    assert all(len(batch["label"]) == 333 for batch in padded)
    kept = [
        list(ParquetLoader(path, 333, rank=r, size=3, framework=framework))[-1] for r in range(3)
    ]
    assert [tuple(batch["v"].shape) for batch in kept] == [(1, 2), (0, 2), (0, 2)]


def test_tensors_share_the_batchs_memory_and_can_be_written(path):
    import torch

    batch = next(iter(ParquetLoader(path, 10, framework="torch")))
    before = batch["b"].clone()
    batch["a"].fill_(-1)
    assert torch.equal(batch["b"], before)
    assert batch["a"].data_ptr() % 64 == 0


def test_an_unknown_framework_is_refused(path):
    with pytest.raises(ValueError, match="framework must be numpy or torch: jax"):
        ParquetLoader(path, 10, framework="jax")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": -1}, "batch_size must be at least 1 and below 2**64: -1"),
        ({"seed": -1}, "seed must be at least 0 and below 2**64: -1"),
        ({"byte_budget": 1 << 64}, "byte_budget must be at least 0 and below 2**64"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"columns": "label"}, "columns must be a list of names: 'label'"),
    ],
)
def test_arguments_that_cannot_be_are_named_with_their_value(path, arguments, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        ParquetLoader(path, **{"batch_size": 10, **arguments})


def test_a_number_that_is_none_and_an_epoch_that_cannot_be_are_named(path):
    with pytest.raises(TypeError, match=r"batch_size must be a whole number: 1\.5"):
        ParquetLoader(path, 1.5)
    loader = ParquetLoader(path, np.int64(10))
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        loader.set_epoch(-1)


def test_a_column_of_the_name_of_the_weights_is_refused_where_there_are_some(tmp_path):
    pq.write_table(pa.table({"_weights": [0.5, 1.0]}), tmp_path / "f.parquet")
    assert next(iter(ParquetLoader(tmp_path, 2, shuffle=False)))["_weights"].tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match="a column is called _weights"):
        ParquetLoader(tmp_path, 2, tail="pad")
