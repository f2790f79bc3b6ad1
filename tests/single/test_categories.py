# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Strings as categories and learned values for what is missing, without Spark."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import Here

from farandole.data import ParquetLoader, prepare_data
from farandole.data.column_accumulators import ExactMean, QuantileSketch, ValueCounts
from farandole.spark.common import LocalStore
from farandole.spark.lightning import TorchEstimator as LightningEstimator
from farandole.spark.torch import TorchEstimator

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

TABLE = pa.table(
    {
        "sex": ["male", "female", None, "male", "female", "male"],
        "age": pa.array([20, None, 40, 60, None, 30], pa.int32()),
        "fare": [1.5, float("nan"), 2.5, None, 3.5, 0.5],
        "port": ["S", "C", "S", None, "Q", "S"],
        "class": ["low", "high", "high", "low", "high", "low"],
    }
)
FEATURES = ["sex", "age", "age__missing", "fare", "port"]
WISH = {
    "categories": {"sex": None, "port": 2, "class": None},
    "fill": {"age": "mean", "fare": "median", "port": "most_frequent"},
}


def columns(prepared):
    loader = ParquetLoader(prepared.train_url, 100, shuffle=False)
    return {name: values.tolist() for name, values in next(iter(loader)).items()}


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_statistics_are_exact_however_rows_are_cut(cut):
    values = [
        *np.random.default_rng(0).normal(size=999) * 10.0 ** np.arange(-30, 30).repeat(17)[:999],
        1e300,
        -1e-300,
    ]
    parts = [[], []]
    for kind, found in ((ExactMean, parts[0]), (QuantileSketch, parts[1])):
        for begin in range(0, len(values), cut):
            tally = kind()
            tally.add(pa.array([*values[begin : begin + cut], None, math.nan, math.inf]))
            found.append(tally)
        for other in found[1:]:
            found[0].merge(other)
    assert parts[0][0].value == statistics.fmean(values)
    assert parts[1][0].value_at(0.5) == statistics.median(values)


def test_a_median_of_many_numbers_becomes_coarser_the_same_way_in_any_order():
    values = np.random.default_rng(1).normal(size=5000)
    whole, other, rest = (
        QuantileSketch(max_cells=64),
        QuantileSketch(max_cells=64),
        QuantileSketch(max_cells=64),
    )
    whole.add(pa.array(values))
    other.add(pa.array(values[:10]))
    rest.add(pa.array(values[10:]))
    other.merge(rest)
    assert (other.cells, other.dropped) == (whole.cells, whole.dropped)
    assert len(whole.cells) <= 64
    assert abs(whole.value_at(0.5) - np.median(values)) < 0.1


def test_columns_with_too_many_values_are_no_categories(monkeypatch):
    monkeypatch.setattr("farandole.data.column_accumulators.MAX_CATEGORY_VALUES", 3)
    with pytest.raises(ValueError, match=r"column 'port' has more than 3 different values"):
        prepare_data(
            pa.table({"port": list("abcd"), "y": [1, 2, 3, 4]}),
            "memory://many",
            categories=["port"],
        )
    assert ValueCounts({"a": 1, "b": 1}).value == "a"


def test_prepared_rows_hold_indices_and_learned_values(tmp_path):
    prepared = prepare_data(TABLE, tmp_path, feature_cols=FEATURES, label_cols=["class"], **WISH)
    assert columns(prepared) == {
        "sex": [3, 2, 0, 3, 2, 3],
        "age": [20.0, 37.5, 40.0, 60.0, 37.5, 30.0],
        "age__missing": [False, True, False, False, True, False],
        "fare": [1.5, 2.0, 2.5, 2.0, 3.5, 0.5],
        "port": [3, 2, 3, 3, 1, 3],
        "class": [1, 0, 0, 1, 0, 1],
    }
    assert prepared.categories == {
        "sex": ["female", "male"],
        "port": ["C", "S"],
        "class": ["high", "low"],
    }
    assert prepared.fill == {"age": 37.5, "fare": 2.0, "port": "S"}
    again = prepare_data(TABLE, tmp_path, feature_cols=FEATURES, label_cols=["class"], **WISH)
    assert (again.reused, again.encoding) == (True, prepared.encoding)


def test_one_word_for_all_fills_features_of_numbers_and_leaves_labels_alone(tmp_path):
    table = pa.table(
        {"a": [1.0, None, 3.0], "b": pa.array([4, None, 6], pa.int64()), "y": [1.0, 2.0, 3.0]}
    )
    prepared = prepare_data(table, tmp_path, label_cols=["y"], fill="mean")
    assert prepared.fill == {"a": 2.0, "b": 5.0}
    assert columns(prepared)["b"] == [4.0, 5.0, 6.0]
    lacking = table.set_column(2, "y", pa.array([1.0, None, 3.0]))
    with pytest.raises(ValueError, match="column y has nulls in 1 of 3 rows"):
        prepare_data(lacking, tmp_path, label_cols=["y"], fill="mean")


def test_rows_that_a_column_holds_out_teach_nothing(tmp_path):
    held = TABLE.append_column("held", pa.array([False, False, False, True, False, None]))
    wish = {"categories": ["port"], "fill": {"age": "mean"}}
    prepared = prepare_data(held, tmp_path, feature_cols=["age", "port"], validation="held", **wish)
    assert prepared.fill == {"age": 30.0}
    assert prepared.categories == {"port": ["C", "Q", "S"]}


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (
            {"fill": {"sex": "mean"}},
            r"column 'sex' is string, which has no mean to fill in; most_frequent is for",
        ),
        (
            {"categories": ["fare"]},
            r"column 'fare' is double: categories are strings, integers or booleans",
        ),
        (
            {"categories": {"sex": 0}},
            r"categories of column 'sex' must be a list of values, a number of values, or None: 0",
        ),
        (
            {"categories": {"sex": ["a", "a"]}},
            r"categories of column 'sex' must be at least one value, without duplicates",
        ),
        (
            {"categories": {"sex": [1]}},
            r"column 'sex' is large_string, which its categories or its fill do not match",
        ),
        (
            {"categories": {"class": ["low"]}},
            r"label column 'class' has values that are no class, such as 'high'",
        ),
        (
            {"categories": ["none"]},
            r"categories must be features or labels; these are neither: none",
        ),
    ],
)
def test_values_that_cannot_be_learned_are_refused_by_name(tmp_path, wish, told):
    with pytest.raises(ValueError, match=told):
        prepare_data(TABLE, tmp_path, feature_cols=["sex", "fare"], label_cols=["class"], **wish)


def test_a_stream_teaches_nothing_and_takes_what_is_given(tmp_path):
    stream = pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches())
    with pytest.raises(
        ValueError, match=r"a stream can be read only once.*give the values for sex"
    ):
        prepare_data(
            stream,
            tmp_path,
            feature_cols=["sex"],
            label_cols=["age"],
            categories=["sex"],
            fill={"age": 1},
        )
    prepared = prepare_data(
        stream,
        tmp_path,
        feature_cols=["sex"],
        label_cols=["age"],
        categories={"sex": ["male"]},
        fill={"age": 1},
    )
    assert columns(prepared)["sex"] == [2, 1, 0, 2, 1, 2]


class Embedded(torch.nn.Module):
    """Two embeddings and two numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sex, self.port, self.last = (
            torch.nn.Embedding(4, 2),
            torch.nn.Embedding(4, 2),
            torch.nn.Linear(7, 2),
        )

    def forward(self, sex, numbers, port):
        assert (sex.dtype, numbers.dtype, port.dtype) == (torch.int64, torch.float32, torch.int64)
        return self.last(torch.cat([self.sex(sex[:, 0]), numbers, self.port(port[:, 0])], dim=1))


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator], ids=["torch", "lightning"])
def test_an_estimator_learns_and_its_model_carries_what_was_learned(tmp_path, kind):
    model = Embedded()
    estimator = kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["sex", ["age", "age__missing", "fare"], "port"],
        label_cols=["class"],
        batch_size=3,
        epochs=1,
        verbose=0,
        random_seed=1,
        store=LocalStore(str(tmp_path)),
        backend=Here(),
        **WISH,
    )
    fitted = estimator.fit(TABLE)
    assert fitted.getCategories() == {
        "sex": ["female", "male"],
        "port": ["C", "S"],
        "class": ["high", "low"],
    }
    assert fitted.getFill() == {"age": 37.5, "fare": 2.0, "port": "S"}

    # Data of others has strings and nulls: a copy in the store has neither, and is found again.
    place = tmp_path / "foreign" / "intermediate_train_data"
    place.mkdir(parents=True)
    pq.write_table(TABLE, place / "part-0.parquet")
    held_out = tmp_path / "foreign" / "intermediate_val_data"
    held_out.mkdir()
    pq.write_table(TABLE.slice(1, 3), held_out / "part-0.parquet")
    for _ in range(2):
        other = estimator.copy().setStore(LocalStore(str(tmp_path / "foreign"))).fit_on_parquet()
        assert other.getFill() == fitted.getFill()
        state, before = other.getModel().state_dict(), fitted.getModel().state_dict()
        assert all(torch.equal(state[name], before[name]) for name in state)
    assert len(list((tmp_path / "foreign").glob("intermediate_train_data.*"))) == 2

    # Data that was prepared with them needs no words about them.
    data = prepare_data(
        TABLE, tmp_path / "own", feature_cols=FEATURES, label_cols=["class"], **WISH
    )
    own = estimator.copy().setStore(LocalStore(str(tmp_path / "own")))
    assert (
        own.setCategories([]).setFill(None).fit_on_parquet(dataset_idx=data.index).getFill()
        == fitted.getFill()
    )
    with pytest.raises(
        ValueError, match="column 'age' was prepared with its mean, not with its median"
    ):
        own.setFill({"age": "median"}).fit_on_parquet(dataset_idx=data.index)
