# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Validation rows chosen by classes, groups and times, without Spark."""

from __future__ import annotations

import datetime as dt
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import ParquetLoader, prepare_data
from farandole.data.validation_splits import row_hashes

pytestmark = pytest.mark.timeout(120)


def table(rows=1000):
    random = np.random.default_rng(0)
    kind = ["rare" if row < 3 else "usual" if row % 10 else "other" for row in range(rows)]
    day = [
        dt.date(2024, 1, 1) + dt.timedelta(days=int(one)) for one in random.integers(0, 100, rows)
    ]
    return pa.table(
        {
            "id": range(rows),
            "kind": kind,
            "user": random.integers(0, 50, rows),
            "day": day,
            "x": random.random(rows),
        }
    )


def ids(url):
    loader = ParquetLoader(url, 10_000, ["id"], shuffle=False)
    return sorted(next(iter(loader))["id"].tolist())


def split(rows, home, **options):
    options = {"feature_cols": ["id", "x"], "validation": 0.2, "seed": 1} | options
    found = prepare_data(rows, home, **options)
    train, val = ids(found.train_url), ids(found.val_url)
    assert sorted(train + val) == list(range(1000))
    return train, val


def test_each_class_gives_its_share_and_a_rare_one_gives_a_row(tmp_path):
    rows = table()
    _, val = split(rows, tmp_path / "one", validation_stratify="kind")
    counts, held = Counter(rows["kind"].to_pylist()), Counter(rows["kind"].take(val).to_pylist())
    assert held == {name: max(1, round(0.2 * count)) for name, count in counts.items()}
    # The same rows, cut into other files, give the same sides; another seed gives others.
    (tmp_path / "files").mkdir()
    for number, start in enumerate(range(0, 1000, 130)):
        pq.write_table(rows.slice(start, 130), tmp_path / "files" / f"{9 - number}.parquet")
    _, again = split(str(tmp_path / "files"), tmp_path / "two", validation_stratify="kind")
    assert again == val
    _, other = split(rows, tmp_path / "three", validation_stratify="kind", seed=2)
    assert other != val


def test_large_classes_give_about_their_share(tmp_path, monkeypatch):
    monkeypatch.setattr("farandole.data.validation_splits._MAX_KEPT_HASHES", 20)
    rows = table()
    _, val = split(rows, tmp_path, validation_stratify="kind")
    held = Counter(rows["kind"].take(val).to_pylist())
    assert 120 <= held["usual"] <= 240
    assert held["rare"] == 1


def test_groups_stay_together(tmp_path):
    rows = table()
    train, val = split(rows, tmp_path / "one", validation_group="user")
    users = rows["user"].to_pylist()
    assert {users[one] for one in train}.isdisjoint({users[one] for one in val})
    assert 50 <= len(val) <= 400
    # A share that is too small for any group holds one out.
    _, least = split(rows, tmp_path / "two", validation_group="user", validation=0.0001)
    assert len({users[one] for one in least}) == 1


@pytest.mark.parametrize("column", ["day", "x"])
def test_the_latest_rows_are_held_out(tmp_path, column):
    rows = table()
    train, val = split(rows, tmp_path, validation_time=column)
    times = rows[column].to_pylist()
    assert max(times[one] for one in train) < min(times[one] for one in val)
    assert 150 <= len(val) <= 200


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"validation_group": "user", "validation_time": "day"},
            "at most one of validation_stratify, validation_gr",
        ),
        (
            {"validation_group": "user", "validation": None},
            "validation must be a number above 0: None",
        ),
        (
            {"validation_group": "none"},
            "validation_group names a column that the rows do not have: 'none'",
        ),
        ({"validation_group": "same"}, "column 'same' has one group, so none can be held out"),
        (
            {"validation_time": "same"},
            "column 'same' has one time, so no rows are later than others",
        ),
        ({"validation_stratify": "id"}, "column 'id' has more than 10 classes to hold rows out of"),
        (
            {"validation_time": "holes"},
            "column 'holes' has nulls in 1 rows, so these rows cannot be ordered",
        ),
    ],
)
def test_rows_that_cannot_be_split_are_refused(tmp_path, monkeypatch, options, told):
    monkeypatch.setattr("farandole.data.validation_splits._MAX_CLASSES", 10)
    rows = (
        table()
        .append_column("same", pa.array([1] * 1000))
        .append_column("holes", pa.array([None, *range(999)]))
    )
    with pytest.raises(ValueError, match=told):
        prepare_data(rows, tmp_path, **{"feature_cols": ["id", "x"], "validation": 0.2} | options)


def test_a_hash_depends_on_the_values_of_a_row_alone():
    vector = pa.array([[1.0, 2.0], [], None, [2.0, 1.0], [1.0, 2.0]])
    struct = pa.StructArray.from_arrays([vector, pa.array(["a", "b", None, "a", "a"])], ["v", "t"])
    batch = pa.RecordBatch.from_arrays(
        [vector, struct, pa.array([1, 2, None, 1, 1])], ["v", "s", "n"]
    )
    whole = row_hashes(batch, ["v", "s", "n"], 7)
    assert whole[0] == whole[4]
    assert len(set(whole.tolist())) == 4
    parts = [row_hashes(batch.slice(row, 1), ["v", "s", "n"], 7)[0] for row in range(5)]
    assert parts == whole.tolist()
