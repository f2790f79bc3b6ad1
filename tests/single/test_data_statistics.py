# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Statistics of columns, kept with prepared data, and the drift of other rows."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.single.training import estimator, linear

from farandole.data import Statistics, data_command, prepare_data, statistics_of
from farandole.data.statistics import read_statistics

ROWS = 20_000


def table(seed=0, shift=0.0, words=("a", "b", "c"), empty=0.1):
    random = np.random.default_rng(seed)
    return pa.table({
        "x": pa.array(random.normal(size=ROWS) + shift, mask=random.random(ROWS) < empty),
        "n": random.poisson(3, ROWS),
        "word": random.choice(list(words), ROWS),
        "flag": random.random(ROWS) < 0.3,
        "tokens": [[1] * length for length in random.integers(0, 9, ROWS)],
        "blob": [b"x"] * ROWS,
    })  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_the_command_computes_statistics_on_request(tmp_path, asked, capsys):
    pq.write_table(table(), tmp_path / "rows.parquet")
    words = [
        "prepare",
        f"source={tmp_path / 'rows.parquet'}",
        f"to={tmp_path / 'store'}",
        "seed=0",
        "compression=none",
    ]
    words += ["features=n", *(["statistics="] if asked else []), "json="]
    assert data_command.main(words) == 0
    kept = read_statistics(json.loads(capsys.readouterr().out)["train_url"])
    assert (kept is not None) == asked
    if asked:
        assert kept["n"].rows == ROWS


def test_statistics_are_those_of_the_rows_however_they_are_cut(tmp_path):
    rows = table()
    for part in range(4):
        pq.write_table(
            rows.slice(part * 5000, 5000), tmp_path / f"{part}.parquet", row_group_size=700
        )
    found = statistics_of(str(tmp_path))
    assert found == statistics_of(rows) == Statistics.of_json(found.to_json())
    values = rows["x"].drop_null().to_numpy()
    x = found["x"]
    assert (x.kind, x.rows, x.missing) == ("number", ROWS, rows["x"].null_count)
    assert (x.mean, x.least, x.most) == (pytest.approx(values.mean()), values.min(), values.max())
    assert x.edges == pytest.approx(np.quantile(values, np.arange(1, 10) / 10), abs=5e-3)
    assert sum(x.counts) == len(values)
    assert max(x.counts) < 1.05 * min(x.counts)
    assert found["n"].edges == [1, 2, 3, 4, 5]
    assert found["word"].values == {
        word: rows["word"].to_pylist().count(word) for word in found["word"].values
    }
    assert (found["word"].distinct, found["flag"].distinct, found["blob"].kind) == (3, 2, "other")
    assert (found["tokens"].kind, found["tokens"].least, found["tokens"].most) == ("list", 0, 8)


def test_dates_times_and_decimals_are_numbers():
    days = pa.array([1, 2, None, 5], pa.int32())
    table = pa.table({
        "day": days.cast(pa.date32()), "at": days.cast(pa.int64()).cast(pa.timestamp("us", "UTC")),
        "price": days.cast(pa.decimal128(12, 2)),
        "word": pa.array(["b", None, "a", "b"]).dictionary_encode(),
    })  # fmt: skip
    found = statistics_of(table)
    for name in ("day", "at", "price"):
        one = found[name]
        assert (one.kind, one.missing, one.least, one.most, one.mean) == (
            "number",
            1,
            1.0,
            5.0,
            pytest.approx(8 / 3),
        )
    assert (found["word"].missing, found["word"].values) == (1, {"b": 2, "a": 1})


def test_changed_columns_drift_and_unchanged_ones_do_not(tmp_path):
    found = statistics_of(table())
    same = found.drift(table(seed=1))
    assert list(same)[-1] == "blob"  # of another kind: it has no index
    assert np.isnan(same["blob"].index)
    assert max(one.index for name, one in same.items() if name != "blob") < 0.01
    pq.write_table(table(seed=1, shift=1.0, words="aaabd", empty=0.4), tmp_path / "new.parquet")
    drifted = found.drift(str(tmp_path / "new.parquet"))
    assert list(drifted)[:2] == ["word", "x"]
    assert drifted["x"].index > 0.5
    assert drifted["x"].missing == pytest.approx(0.3, abs=0.02)
    assert drifted["word"].new == pytest.approx(0.2, abs=0.02)
    assert drifted["n"].index < 0.01
    # Shares of 1/2 and 1/2 that become 1/4 and 3/4: (1/4 - 1/2) ln(1/2) + (3/4 - 1/2) ln(3/2).
    halves, quarter = pa.table({"v": ["a", "b"] * 50}), pa.table({"v": ["a", "b", "b", "b"] * 25})
    assert statistics_of(halves).drift(quarter)["v"].index == pytest.approx(0.25 * np.log(3))


@pytest.mark.parametrize("rows", [(200_000, 2_000), (2_000, 200_000)])
def test_a_frequent_number_is_in_the_same_bin_of_small_and_large_data(rows):
    # Above 4096 different numbers, statistics tell cells of numbers apart; 1.1 is no bound of a
    # cell.
    def halves(seed, count):
        random = np.random.default_rng(seed)
        return pa.table(
            {"x": np.where(random.random(count) < 0.5, 1.1, random.uniform(0, 100, count))}
        )

    before, now = (halves(seed, count) for seed, count in enumerate(rows))
    found = statistics_of(before)
    assert found.drift(now)["x"].index < 0.02
    assert 1.1 <= found["x"].edges[0] < 1.11
    less = pa.table({"x": -halves(2, rows[0])["x"].to_numpy()})
    assert statistics_of(less).drift(pa.table({"x": -now["x"].to_numpy()}))["x"].index < 0.02


def test_columns_that_cannot_be_compared_have_no_index(monkeypatch):
    many = pa.table({"word": [str(row) for row in range(400)], "x": [1.0, 2.0] * 200})
    few = pa.table({"word": ["1", "2", "3", "4"] * 100, "x": [1.0, 2.0] * 200})
    monkeypatch.setattr("farandole.data.statistics._MAX_DISTINCT_VALUES", 200)
    # Only the new data has too many strings: all but 4 of its 400 are new.
    found = statistics_of(few).drift(many)
    assert list(found) == ["word", "x"]
    assert found["word"].new == pytest.approx(0.99)
    assert found["word"].index > 5
    # The statistics could not count their strings.
    found = statistics_of(many).drift(few)
    assert list(found) == ["x", "word"]
    assert (found["x"].index, found["word"].missing) == (0.0, 0.0)
    assert np.isnan(found["word"].index)
    none = few.slice(0, 0)
    for drifted in (statistics_of(none).drift(few), statistics_of(few).drift(none)):
        assert all(np.isnan(one.index) for one in drifted.values())


def test_they_are_kept_with_prepared_data(tmp_path, monkeypatch):
    rows = table().drop(["blob", "tokens"])
    wish = {
        "label_cols": ["flag"],
        "categories": ["word"],
        "fill": {"x": "mean"},
        "statistics": True,
    }
    made = prepare_data(rows, tmp_path, **wish).statistics
    assert made is not None
    assert made == statistics_of(rows)
    monkeypatch.setattr("farandole.data.statistics.accumulate_over_source", None)
    again = prepare_data(rows, tmp_path, **wish)
    assert again.reused
    assert again.statistics == made


def test_an_invalid_argument_names_the_column(tmp_path):
    found = statistics_of(table(), ["x", "word"])
    with pytest.raises(ValueError, match="the source has no column 'word': x, n"):
        found.drift(table().select(["x", "n"]))
    with pytest.raises(
        ValueError, match="column 'word' is a number now, in the statistics it is a value"
    ):
        found.drift(pa.table({"x": [1.0], "word": [1]}))
    with pytest.raises(ValueError, match="the source has no column 'age'"):
        statistics_of(table(), ["age"])
    with pytest.raises(ValueError, match="a stream can be read only once, so statistics=True"):
        prepare_data(pa.table({"x": [1]}).to_reader(), tmp_path, statistics=True)
    empty = statistics_of(pa.table({"x": pa.array([None, None], pa.float64())}))
    assert (empty["x"].missing, empty["x"].mean) == (2, None)
    assert empty.drift(pa.table({"x": [1.0]}))["x"].missing == -1.0


def test_a_fitted_model_compares_rows_with_those_it_was_trained_with(tmp_path):
    def rows(**changes):
        return table(**changes).append_column("y", pa.array(np.zeros(ROWS, np.float32)))

    wish = {
        "feature_cols": [["x", "n"]],
        "fill": {"x": "mean"},
        "epochs": 1,
        "batch_size": 4096,
        "statistics": True,
    }
    asked = estimator(tmp_path / "a", linear(), **wish)
    model = asked.fit(rows())
    assert model.getStatistics() == statistics_of(rows(), ["x", "n", "y"])
    assert max(one.index for one in model.drift(rows(seed=1)).values()) < 0.01
    drifted = model.drift(rows(seed=1, shift=1.0, empty=0.4).drop(["y", "blob"]))
    assert list(drifted) == ["x", "n"]  # rows that are to be predicted have no label
    assert drifted["x"].index > 0.5
    assert drifted["x"].missing == pytest.approx(0.3, abs=0.02)
    with pytest.raises(ValueError, match="the source has no column 'n'"):
        model.drift(rows().select(["x", "y"]))
    # Statistics are kept with the data, so a fit that does not ask for them finds them.
    found = estimator(
        tmp_path / "a", linear(), **wish | {"statistics": False, "run_id": "again"}
    ).fit(rows())
    assert found.getStatistics() == model.getStatistics()
    without = estimator(tmp_path / "b", linear(), **wish | {"statistics": False}).fit(rows())
    assert without.getStatistics() is None
    with pytest.raises(ValueError, match="fit with statistics=True, or pass it to prepare_data"):
        without.drift(rows())


def test_models_of_stored_data_have_the_statistics_of_its_rows(tmp_path):
    rows = table().append_column("y", pa.array(np.zeros(ROWS, np.float32)))
    wish = {"feature_cols": [["x", "n"]], "fill": {"x": "mean"}, "epochs": 1, "batch_size": 4096}
    expected = statistics_of(rows, ["x", "n", "y"])
    # Data that prepare_data has described.
    options = {"feature_cols": ["x", "n"], "label_cols": ["y"], "fill": {"x": "mean"}}
    data = prepare_data(rows, tmp_path / "told", **options, statistics=True)
    model = estimator(tmp_path / "told", linear(), **wish).fit_on_parquet(dataset_idx=data.index)
    assert model.getStatistics() == expected
    # Data that it has not described: its rows are not those of the source any more.
    data = prepare_data(rows, tmp_path / "plain", **options)
    plain = estimator(tmp_path / "plain", linear(), **wish, statistics=True)
    with pytest.raises(
        ValueError,
        match="was prepared without statistics: pass statistics=True to prepare_data, too",
    ):
        plain.fit_on_parquet(dataset_idx=data.index)
    # Data that anybody wrote.
    raw = tmp_path / "raw" / "intermediate_train_data"
    raw.mkdir(parents=True)
    pq.write_table(rows, raw / "part-0.parquet")
    model = estimator(tmp_path / "raw", linear(), **wish, statistics=True).fit_on_parquet()
    assert model.getStatistics() == expected
    assert [one.name for one in raw.iterdir()] == ["part-0.parquet"]
