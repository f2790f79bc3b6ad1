# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lists of different lengths, without Spark: stored, read, padded and learned from."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import Here

from farandole.data import Pad, ParquetLoader, prepare_data
from farandole.data.ragged import Ragged
from farandole.spark.common import LocalStore
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.torch import TorchEstimator

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*does not have many workers.*")]


def lists(rows=300, longest=40, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, 50, random.integers(0, longest + 1)).tolist() for _ in range(rows)]


def table(**columns):
    return pa.table({"id": range(300), "tokens": pa.array(lists(), pa.list_(pa.int32())), **columns})


def expected(row, width, most=40):
    return (row[:most] + [-1] * width)[:width]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("pad", "widths"), [(Pad(-1), {40}), (Pad(-1, buckets=4), {10, 20, 30, 40}), (Pad(-1, 7), {7})]
)
def test_a_loader_pads_each_batch_to_one_of_a_few_lengths(tmp_path, framework, pad, widths):
    rows = lists()
    data = prepare_data(table(), tmp_path, ragged={"tokens": pad}, validation=0.2)
    assert data.columns["tokens"].shape == (pad.max_length or 40,)
    seen, found = set(), {}
    for url in (data.train_url, data.val_url):
        for batch in ParquetLoader(url, 3, framework=framework, seed=2):
            assert str(batch["tokens"].dtype).endswith("int32")
            width = batch["tokens"].shape[1]
            seen.add(width)
            for key, values in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True):
                found[key] = values
                assert values == expected(rows[key], width, pad.max_length or 40)
    assert seen <= widths
    assert len(seen) == len(widths)
    assert set(found) == set(range(300))


def test_nulls_and_other_lists_become_rows_and_what_holds_no_numbers_is_refused(tmp_path):
    wide = pa.table({"t": pa.array([[1.5], None, []], pa.large_list(pa.float64())), "y": [1, 2, 3]})
    data = prepare_data(wide, tmp_path, ragged={"t": Pad()})
    batch = next(iter(ParquetLoader(data.train_url, 3, shuffle=False)))
    assert batch["t"].tolist() == [[1.5], [0.0], [0.0]]
    for column, told in (
        (pa.array([["a"]]), "column 't' is list<.*string>: ragged columns are lists of numbers"),
        (pa.array([1.0]), "column 't' is double: ragged columns are lists of numbers"),
        (pa.array([[1.0, None]]), "column 't' has nulls inside of lists: 1 of 2 values"),
    ):
        with pytest.raises(ValueError, match=told):
            prepare_data(pa.table({"t": column}), tmp_path, ragged={"t": Pad()})
    with pytest.raises(ValueError, match="ragged columns must be features; these are not: t"):
        prepare_data(wide, tmp_path, label_cols=["t"], ragged={"t": Pad()})
    with pytest.raises(ValueError, match="buckets of a ragged column must be a whole number, 1 or more: 0"):
        Pad(buckets=0)


def test_long_rows_and_short_ones_are_padded_alike():
    random = np.random.default_rng(3)
    for longest in (4, 200):
        lengths = random.integers(0, longest, 50)
        values = random.integers(0, 9, lengths.sum())
        starts = np.concatenate([[0], np.cumsum(lengths)])
        padded = Ragged("int64", -1, 150, 3).padded(starts, values)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            kept = values[start : start + min(length, 150)]
            assert padded[row].tolist() == [*kept, *[-1] * (padded.shape[1] - len(kept))]


class Mean(torch.nn.Module):
    """The mean of embedded tokens, beside a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = torch.nn.Embedding(50, 4, padding_idx=0), torch.nn.Linear(5, 2)
        self.widths = set()

    def forward(self, tokens, size):
        assert tokens.dtype == torch.int64
        self.widths.add(tokens.shape[1])
        known = (tokens != 0).unsqueeze(-1)
        pooled = (self.embedding(tokens) * known).sum(1) / known.sum(1).clamp(min=1)
        return self.last(torch.cat([pooled, size], dim=1))


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator], ids=["torch", "lightning"])
@pytest.mark.parametrize("source", ["frame", "parquet"])
def test_an_estimator_learns_from_sequences(tmp_path, kind, source):
    label = [int(sum(row) > 500) for row in lists()]
    rows = table(size=[len(row) / 40 for row in lists()], label=label)
    model = Mean()
    estimator = kind(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["tokens", "size"], label_cols=["label"], batch_size=8, epochs=6, verbose=0, random_seed=1,
        store=LocalStore(str(tmp_path)), backend=Here(), ragged={"tokens": Pad(buckets=4)},
    )  # fmt: skip
    if source == "frame":
        fitted = estimator.fit(rows)
    else:
        (tmp_path / "intermediate_train_data").mkdir()
        pq.write_table(rows, tmp_path / "intermediate_train_data" / "part-0.parquet")
        fitted = estimator.fit_on_parquet()
    assert fitted.getRagged() == {"tokens": {"dtype": "int32", "value": 0, "max_length": 40, "buckets": 4}}
    assert fitted.getInputDtypes() == ["int64", "float32"]
    last = fitted.getHistory()[-1]
    assert last["train"]["loss"] < 0.3
    with pytest.raises(ValueError, match="a ragged column must be a separate input: 'tokens'"):
        estimator.copy().setFeatureCols([["tokens", "size"]]).fit(rows)
