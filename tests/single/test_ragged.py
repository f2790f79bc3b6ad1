# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lists of different lengths, without Spark: stored, read, padded and learned from."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import Here

from farandole._native.reader import Dataset, Reader
from farandole.data import (
    Jagged,
    LengthLoader,
    MixedLoader,
    Nested,
    Pad,
    ParquetLoader,
    prepare_data,
)
from farandole.data.ragged import RaggedColumn
from farandole.spark.common import LocalStore
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.torch import TorchEstimator

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def lists(rows=300, longest=40, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, 50, random.integers(0, longest + 1)).tolist() for _ in range(rows)]


def table(**columns):
    return pa.table(
        {"id": range(300), "tokens": pa.array(lists(), pa.list_(pa.int32())), **columns}
    )


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
    with pytest.raises(
        ValueError, match="buckets of a ragged column must be a whole number, 1 or more: 0"
    ):
        Pad(buckets=0)


def test_long_rows_and_short_ones_are_padded_alike():
    random = np.random.default_rng(3)
    for longest in (4, 200):
        lengths = random.integers(0, longest, 50)
        values = random.integers(0, 9, lengths.sum())
        starts = np.concatenate([[0], np.cumsum(lengths)])
        padded = RaggedColumn("int64", -1, 150, 3).pad_rows(starts, values)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            kept = values[start : start + min(length, 150)]
            assert padded[row].tolist() == [*kept, *[-1] * (padded.shape[1] - len(kept))]


@pytest.mark.parametrize("kind", ["int8", "uint16", "int64", "float32", "float64"])
def test_padded_and_nested_rows_are_views_of_the_memory_of_their_batch(tmp_path, kind):
    lists = [[1, 2, 3], [], [4], [5, 6]]
    table = pa.table(
        {"t": pa.array(lists, pa.list_(pa.type_for_alias(kind.replace("float64", "double"))))}
    )
    for number, ragged in enumerate((Pad(7, max_length=2), Pad(7, buckets=3), Nested())):
        data = prepare_data(table, tmp_path / str(number), ragged={"t": ragged})
        how = data.ragged["t"]
        pad = None if how.nested else {"t": how.native_padding_argument()}
        reader = Reader(
            Dataset.open_url(data.train_url), columns=["t"], batch_size=4, shuffle=False, pad=pad
        )
        batch = next(reader.read_epoch(0))
        assert how.row_lengths(batch, "t").tolist() == [
            min(len(row), how.max_length) for row in lists
        ]
        first, again = (
            how.read_jagged(batch, "t").values if how.nested else how.read_padded(batch, "t")
            for _ in range(2)
        )
        assert np.shares_memory(first, again)
        assert first.flags.writeable
        assert first.dtype == np.dtype(kind)
        if how.nested:
            assert first.tolist() == [1, 2, 3, 4, 5, 6]
            assert how.read_jagged(batch, "t").offsets.tolist() == [0, 3, 3, 4, 6]
            assert batch.padded_length("t") is None
        else:
            assert first.tolist() == [[*row, 7, 7, 7][: first.shape[1]] for row in lists]
            assert first.shape == (4, batch.padded_length("t")) == (4, how.max_length)
        first[...] = 9
        shape = first.shape
        del batch, again
        # The array keeps its memory: the reader's next batches get other memory than what was given
        # back to it.
        others = [
            how.read_jagged(one, "t").values if how.nested else how.read_padded(one, "t")
            for one in epochs(reader, 8)
        ]
        for other in others:
            assert other.shape == shape
            assert not np.shares_memory(first, other)
            other[...] = 5
        assert (first == 9).all()


def epochs(reader, count):
    """The first batch of each of the next epochs, all of them at once."""
    return [next(reader.read_epoch(number)) for number in range(1, count + 1)]


def test_batches_without_rows_or_values_and_prepared_lists_that_are_damaged(tmp_path):
    table = pa.table({"t": pa.array([[], []], pa.list_(pa.int32())), "id": [0, 1]})
    for number, ragged in enumerate((Pad(max_length=3), Nested(max_length=3))):
        url = prepare_data(table, tmp_path / str(number), ragged={"t": ragged}).train_url
        (batch,) = ParquetLoader(url, 4)
        if number:
            assert batch["t"].values.shape == (0,)
            assert batch["t"].offsets.tolist() == [0, 0, 0]
        else:
            assert batch["t"].tolist() == [[0, 0, 0], [0, 0, 0]]
        assert len(batch["t"]) == 2
        nothing = [one["t"] for one in ParquetLoader(url, 1, rank=2, size=3)]
        assert [len(one) for one in nothing] == [0]
    wide = prepare_data(table, tmp_path / "wide", ragged={"t": Pad(max_length=1 << 50)}).train_url
    with pytest.raises(
        ValueError,
        match="a budget of 536870912 bytes is too small for this data set, the least that",
    ):
        next(iter(ParquetLoader(wide, 2)))
    with pytest.raises(MemoryError, match="there is no memory for the padded rows of column t: "):
        next(iter(ParquetLoader(wide, 2, byte_budget=1 << 60)))
    reader = Reader(
        Dataset.open_url(prepare_data(pa.table({"b": [b"12345"]}), tmp_path / "torn").train_url),
        columns=["b"], batch_size=1, pad={"b": (b"\0" * 4, 8, 8, False)},
    )  # fmt: skip
    told = (
        r"column b has a row of 5 bytes, .* no whole values of 4 bytes, in row group 0 of "
        r".*torn.*\.parquet"
    )
    with pytest.raises(ValueError, match=told):
        next(reader.read_epoch(0))


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
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["tokens", "size"], label_cols=["label"], batch_size=8, epochs=6, verbose=0,
        random_seed=1,
        store=LocalStore(str(tmp_path)), backend=Here(), ragged={"tokens": Pad(buckets=4)},
    )  # fmt: skip
    if source == "frame":
        fitted = estimator.fit(rows)
    else:
        (tmp_path / "intermediate_train_data").mkdir()
        pq.write_table(rows, tmp_path / "intermediate_train_data" / "part-0.parquet")
        fitted = estimator.fit_on_parquet()
    assert fitted.getRagged() == {
        "tokens": {"dtype": "int32", "value": 0, "max_length": 40, "buckets": 4, "nested": False}
    }
    assert fitted.getInputDtypes() == ["int64", "float32"]
    last = fitted.getHistory()[-1]
    assert last["train"]["loss"] < 0.3
    with pytest.raises(ValueError, match="a ragged column must be a separate input: 'tokens'"):
        estimator.copy().setFeatureCols([["tokens", "size"]]).fit(rows)


@pytest.mark.parametrize("nested", [Nested(), Nested(max_length=7)])
def test_a_nested_column_is_read_without_padding(tmp_path, nested):
    rows, most = lists(), nested.max_length or 40
    data = prepare_data(table(), tmp_path, ragged={"tokens": nested}, validation=0.2)
    found = {}
    for url in (data.train_url, data.val_url):
        for batch in ParquetLoader(url, 3, framework="torch", seed=2):
            tokens = batch["tokens"]
            assert tokens.layout == torch.jagged
            assert tokens.dtype == torch.int32
            found |= dict(
                zip(batch["id"].tolist(), [row.tolist() for row in tokens.unbind()], strict=True)
            )
    assert found == {key: row[:most] for key, row in enumerate(rows)}
    batch = next(iter(ParquetLoader(data.train_url, 5)))
    assert isinstance(batch["tokens"], Jagged)
    assert len(batch["tokens"]) == 5
    ends = batch["tokens"].offsets
    pieces = [batch["tokens"].values[start:end].tolist() for start, end in itertools.pairwise(ends)]
    assert pieces == [rows[key][:most] for key in batch["id"]]


@pytest.mark.slow
def test_tensorflow_gets_ragged_tensors_of_a_nested_column(tmp_path):
    script = """
import sys
import tensorflow as tf
from farandole.data import ParquetLoader
dataset = ParquetLoader(sys.argv[1], 4, shuffle=False).as_tf_dataset()
assert isinstance(dataset.element_spec["tokens"], tf.RaggedTensorSpec), dataset.element_spec
batch = next(iter(dataset))
print(batch["tokens"].to_list())
"""
    data = prepare_data(table(), tmp_path, ragged={"tokens": Nested()})
    # Tests of estimators choose Keras's torch backend. It loads triton, which aborts a process of
    # TensorFlow 2.21.
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", script, data.train_url]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    batch = next(iter(ParquetLoader(data.train_url, 4, shuffle=False)))
    assert ast.literal_eval(done.stdout) == [lists()[key] for key in batch["id"].tolist()]


def test_loaders_that_choose_rows_refuse_nested_columns(tmp_path):
    nested = prepare_data(table(), tmp_path / "nested", ragged={"tokens": Nested()}).train_url
    padded = prepare_data(table(), tmp_path / "padded", ragged={"tokens": Pad()}).train_url
    told = "prepare tokens with Pad"
    with pytest.raises(ValueError, match=f"rows of a pool must be padded: {told}"):
        LengthLoader(ParquetLoader(nested, 8), "tokens", 4)
    with pytest.raises(ValueError, match=f"lists of a mix must be padded: {told}"):
        MixedLoader({"a": ParquetLoader(nested, 8), "b": ParquetLoader(padded, 8)})
    with pytest.raises(ValueError, match=f"in an elastic job, lists must be padded: {told}"):
        ParquetLoader(nested, 8).take_turns()
    dataset = ParquetLoader(nested, 8, framework="torch").as_torch_dataset()
    (tokens,) = {
        one["tokens"].layout for one in torch.utils.data.DataLoader(dataset, batch_size=None)
    }
    assert tokens == torch.jagged
    with pytest.raises(
        ValueError,
        match="worker processes cannot send nested tensors: use num_workers=0 for tokens",
    ):
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
    with pytest.raises(
        ValueError, match="max_length of a ragged column must be a whole number, 1 or more: 0"
    ):
        Nested(max_length=0)


class Bag(torch.nn.Module):
    """Like `Mean`, of nested tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = (
            torch.nn.EmbeddingBag(50, 4, padding_idx=0),
            torch.nn.Linear(5, 2),
        )

    def forward(self, tokens, size):
        assert tokens.is_nested
        assert tokens.dtype == torch.int64
        pooled = self.embedding(tokens.values(), tokens.offsets()[:-1])
        return self.last(torch.cat([pooled, size], dim=1))


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator], ids=["torch", "lightning"])
def test_an_estimator_learns_the_same_from_nested_rows_as_from_padded_ones(tmp_path, kind):
    label = [int(sum(row) > 500) for row in lists()]
    rows = table(size=[len(row) / 40 for row in lists()], label=label)

    def fitted(model, ragged, **more):
        return kind(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            loss=torch.nn.CrossEntropyLoss(),
            feature_cols=["tokens", "size"], label_cols=["label"], batch_size=8, epochs=2,
            verbose=0, random_seed=1,
            store=LocalStore(str(tmp_path / str(ragged))), backend=Here(),
            ragged={"tokens": ragged}, **more,
        ).fit(rows)  # fmt: skip

    padded, nested = fitted(Mean(), Pad()), fitted(Bag(), Nested())
    kept = fitted(Bag(), Nested(), inmemory_cache_all=True, shuffle=False)
    assert nested.getRagged()["tokens"]["nested"]
    assert nested.getSignature()[0] | {"shape": None} == {
        "columns": ["tokens"], "shape": None, "dtype": "int64", "ragged": True, "nested": True,
    }  # fmt: skip
    losses = [one["train"]["loss"] for model in (padded, nested) for one in model.getHistory()]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-4)
    assert len(kept.getHistory()) == 2
    batch = pa.RecordBatch.from_arrays(
        [pa.array(lists()[:9]), pa.array([0.5] * 9)], ["tokens", "size"]
    )
    found = [
        model.setBatchSize(4)._create_predictor(_Columns()).predict_outputs(batch)
        for model in (padded, nested)
    ]
    assert found[1][0].shape == (9, 2)
    for model, (output,) in zip((padded, nested), found, strict=True):
        network = model.getModel().eval()
        first = lists()[0]
        tokens = torch.tensor([first + [0] * (40 - len(first))])
        if model is nested:
            tokens = torch.nested.nested_tensor([torch.tensor(first)], layout=torch.jagged)
        with torch.no_grad():
            wanted = network(tokens, torch.tensor([[0.5]]))
        np.testing.assert_allclose(output[:1], wanted.numpy(), rtol=1e-4)


class _Columns:
    """Stands for a DataFrame: its columns, in a session without Spark."""

    columns = ("tokens", "size")
    sparkSession = None  # noqa: N815 - Spark's name


def test_data_that_was_prepared_padded_does_not_become_nested_and_the_other_way_round(tmp_path):
    model = Bag()
    rows = table(size=[0.5] * 300, label=[key % 2 for key in range(300)])
    for number, (had, wanted, told) in enumerate(
        [(Pad(), Nested(), "Pad, not with Nested"), (Nested(), Pad(), "Nested, not with Pad")]
    ):
        store = LocalStore(str(tmp_path / str(number)))
        data = prepare_data(rows, store, label_cols=["label"], ragged={"tokens": had})
        estimator = TorchEstimator(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.CrossEntropyLoss(),
            feature_cols=["tokens", "size"], label_cols=["label"], verbose=0, store=store,
            backend=Here(),
            ragged={"tokens": wanted},
        )  # fmt: skip
        with pytest.raises(ValueError, match=f"column 'tokens' was prepared with {told}"):
            estimator.fit_on_parquet(dataset_idx=data.index)
