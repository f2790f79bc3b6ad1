# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators that train on Parquet at paths outside of their store."""

from __future__ import annotations

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import estimator, line, linear, write

from farandole.data import ParquetLoader, prepare_data
from farandole.spark.common import LocalBackend
from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def rows(tmp_path):
    """A tree of files: `rows/year=2023/part-0.parquet` with 48 rows, and so on; another one has
    rows to validate.
    """
    for seed, year in enumerate((2023, 2024)):
        x, y = line(96, seed)
        for part in range(2):
            folder = tmp_path / "rows" / f"year={year}"
            write(folder, x=x[part::2], y=y[part::2])
            (folder / "part-0.parquet").rename(folder / f"file-{part}.parquet")
    x, y = line(32, 5)
    write(tmp_path / "held" / "out", x=x, y=y)
    return tmp_path / "rows"


def fit(store, path, val_path=None, **params):
    model = params.pop("model", None) or linear()
    model = estimator(store, model, **{"epochs": 1} | params).fit_on_parquet(
        path=path, val_path=val_path
    )
    return model.getHistory()[-1]


def test_a_file_a_pattern_a_directory_and_a_list_are_trained_on(tmp_path, rows, monkeypatch):
    def trained(path, **params):
        return fit(tmp_path / "store", path, **params)["rows"]

    assert trained(rows / "year=2023" / "file-1.parquet") == 48
    assert trained(str(rows)) == 192
    assert trained(rows.as_uri()) == 192
    assert trained(f"{rows}/*/file-0.parquet") == 96
    model = torch.nn.Linear(3, 1)
    wide = {
        "feature_cols": [["x", "year"]],
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-9),
    }
    assert trained([rows / "year=2024", f"{rows}/year=2023/file-*.parquet"], **wide) == 192
    monkeypatch.chdir(tmp_path)
    assert trained("rows/year=2024/*.parquet") == 96
    assert not (tmp_path / "store" / "intermediate_train_data").exists(), "no copy is made"


def test_validation_rows_have_paths_of_their_own(tmp_path, rows):
    history = fit(
        tmp_path / "store",
        str(rows),
        f"{tmp_path}/held/*/*.parquet",
        epochs=8,
        backend=LocalBackend(2),
    )
    assert history["rows"] == 192
    assert history["validation"]["loss"] < 1, (
        "it learns the line, of other rows than those that it validates"
    )
    other = fit(tmp_path / "store", str(rows))
    assert other.get("validation") is None


def test_a_delta_table_and_prepared_data_are_trained_on_where_they_are(tmp_path):
    x, y = line()
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "y": y})
    columns = {"feature_cols": [["a", "b"]]}
    deltalake.write_deltalake(str(tmp_path / "delta"), table)
    deltalake.write_deltalake(str(tmp_path / "delta"), table, mode="append")
    deltalake.DeltaTable(str(tmp_path / "delta")).delete("y > 0")
    left = 2 * int((y <= 0).sum())
    assert fit(tmp_path / "store", str(tmp_path / "delta"), **columns)["rows"] == left
    with prepare_data(
        table, tmp_path / "other", feature_cols=["a", "b"], label_cols=["y"], validation=0.25
    ) as data:
        history = fit(tmp_path / "store", data.train_url, data.val_url, **columns)
    assert history["rows"] == data.train_rows
    assert history["validation"] is not None


def test_prepared_data_is_given_as_one_directory(tmp_path, rows):
    table = pa.table({"kind": ["a", "b", "c"] * 16, "y": np.linspace(0, 1, 48)})
    known = {"feature_cols": ["kind"], "label_cols": ["y"]}
    model = torch.nn.Sequential(torch.nn.Embedding(5, 1), torch.nn.Flatten())
    train = {
        **known,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-9),
        "epochs": 1,
    }
    made = estimator(tmp_path / "store", **train)
    with prepare_data(table, tmp_path / "other", **known, categories=["kind"]) as data:
        place = tmp_path / "other" / f"intermediate_train_data.{data.index}"
        fitted = made.fit_on_parquet(path=[place], val_path=[place])
        assert fitted.getCategories() == {"kind": ["a", "b", "c"]}
        wrong = (
            f"{place}/*.parquet", f"{tmp_path}/other/*/*.parquet", f"{tmp_path}/**/*.parquet",
            [place, rows],
            [tmp_path / "other", rows], [f"{place}/*.parquet"], str(next(place.glob("*.parquet"))),
        )  # fmt: skip
        for path in wrong:
            with pytest.raises(
                ValueError, match=f"Farandole prepared the data in .*{place.name}.* as the path"
            ):
                made.fit_on_parquet(path=path)
            with pytest.raises(ValueError, match="Farandole prepared the data"):
                ParquetLoader(path, 1)
        (place / "_manifest.json").rename(place / "_preparation.json")
        with pytest.raises(ValueError, match="Farandole prepared the data"):
            made.fit_on_parquet(path=f"{place}/*.parquet")
        assert fit(tmp_path / "store", f"{tmp_path}/r*s/*/*-0.parquet")["rows"] == 96, (
            "others beside it are read"
        )


def test_files_at_paths_are_encoded_and_described(tmp_path):
    x, y = line()
    for part in range(2):
        age = [None if row % 3 == 0 else row / 48 for row in range(48)]
        table = pa.table({"a": x[part::2, 0], "age": age, "y": y[part::2]})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    wish = {
        "feature_cols": [["a", "age"]],
        "fill": {"age": "mean"},
        "statistics": True,
        "epochs": 1,
    }
    for path in ([tmp_path / "0.parquet", tmp_path / "1.parquet"], f"{tmp_path}/*.parquet"):
        model = estimator(tmp_path / "store", linear(), **wish).fit_on_parquet(
            path=path, val_path=path
        )
        known = [row / 48 for row in range(48) if row % 3]
        assert model.getFill()["age"] == pytest.approx(np.mean(known))
        assert model.getStatistics().columns["age"].missing == 32
        assert model.getHistory()[-1]["rows"] == 96


def test_a_run_does_not_continue_with_rows_of_another_path(tmp_path, rows):
    model = linear()
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "run_id": "r",
    }

    def train(path, epochs):
        return (
            estimator(tmp_path / "store", **known | {"epochs": epochs})
            .fit_on_parquet(path=path)
            .getHistory()
        )

    train(rows / "year=2023", 1)
    assert len(train(rows / "year=2023", 2)) == 2
    with pytest.raises(RunDiffersError, match="training data"):
        train(rows / "year=2024", 3)


def test_paths_that_lead_nowhere_or_contradict_each_other_are_refused(tmp_path, rows):
    made = estimator(tmp_path / "store", linear())
    with pytest.raises(ValueError, match="val_path needs path"):
        made.fit_on_parquet(val_path=str(rows))
    with pytest.raises(ValueError, match="storage_options needs path"):
        made.fit_on_parquet(storage_options={"region": "us-east-1"})
    with pytest.raises(ValueError, match="at most one of path and dataset_idx"):
        made.fit_on_parquet(dataset_idx=1, path=str(rows))
    with pytest.raises(ValueError, match="path is an empty list"):
        made.fit_on_parquet(path=[])
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        made.fit_on_parquet(path=f"{rows}/*.parquet")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made.fit_on_parquet(path=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"columns? .*age"):
        estimator(tmp_path / "store", linear(), feature_cols=["age"]).fit_on_parquet(path=str(rows))
