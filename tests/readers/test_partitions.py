# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Values in names of directories and in the log of a table: one rule in all readers."""

import datetime as dt
import decimal
import itertools

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.single.training import Here

from farandole._native import reader
from farandole.data import ParquetLoader, frame_loader, prepare_data
from farandole.data.datasets import open_dataset
from farandole.spark.common.data.existing_data import ExistingDataPaths
from farandole.spark.torch import TorchEstimator

WORDS = [
    "1",
    "-2",
    "007",
    "1.5",
    "0x10",
    "1e3",
    "+5",
    "nan",
    "9007199254740993",
    "2A001",
    "10%3A30",
]
PAIRS = list(itertools.combinations(WORDS, 2))


def readers(path, store, columns, **options):
    """Yields each reader's name and its batch, sorted by the column `i`."""
    prepared = prepare_data(path, store, feature_cols=columns, reuse=False, **options)
    loaders = {
        "ParquetLoader": ParquetLoader(path, 99, columns, **options),
        "prepare_data": ParquetLoader(prepared.train_url, 99, columns),
        "frame_loader": frame_loader(str(path), 99, columns, **options),
    }
    for name, loader in loaders.items():
        (batch,) = loader
        order = np.argsort(batch["i"])
        yield name, {column: batch[column][order] for column in columns}


def hive_directory(home, values, inside=None):
    for row, value in enumerate(values):
        place = home / f"k={value}"
        place.mkdir(parents=True)
        columns = {"i": [row]} if inside is None else {"i": [row], "k": [inside[row]]}
        pq.write_table(pa.table(columns), place / "rows.parquet")
    return home


@pytest.mark.parametrize("pair", PAIRS, ids="_".join)
def test_readers_agree_about_any_two_directories(pair, tmp_path):
    place = hive_directory(tmp_path / "rows", pair)
    numbers = {"int64": int, "float64": float, "utf8": str}
    dtype = reader.partition_dtype(list(pair))
    for name, batch in readers(place, tmp_path / "store", ["i", "k"]):
        assert batch["k"].dtype == (object if dtype == "utf8" else dtype), name
        expected = [numbers[dtype](value.replace("%3A", ":")) for value in pair]
        assert batch["k"].tolist() == expected, name


class WordModel(torch.nn.Module):
    """One number for each word."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 1)

    def forward(self, words):
        return self.table(words[:, 0])


@pytest.mark.parametrize(
    ("types", "words"), [(None, ["1"]), ({"k": "string"}, ["01", "1"]), ({"k": "int16"}, ["1"])]
)
def test_fit_on_parquet_takes_types_of_directories(types, words, tmp_path):
    place = hive_directory(tmp_path / "rows", ["01", "1"])
    model = WordModel()
    estimator = TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda output, label: ((output - label) ** 2).mean(), feature_cols=["k"],
        label_cols=["i"], batch_size=2, epochs=1, verbose=0, backend=Here(),
        store=str(tmp_path / "store"), categories=["k"],
    )  # fmt: skip
    fitted = estimator.fit_on_parquet(path=str(place), val_path=str(place), types=types)
    assert sorted(map(str, fitted.getCategories()["k"])) == words
    with pytest.raises(ValueError, match="types needs path"):
        estimator.fit_on_parquet(types={"k": "string"})
    if types is not None:
        paths = ExistingDataPaths.from_paths(str(place), None, None, types)
        dtypes = {one.name: one.dtype for one in open_dataset(str(place), paths.types).columns}
        assert dtypes["k"] == {"string": "utf8"}.get(types["k"], types["k"])


def test_types_of_directories_can_be_given(tmp_path):
    place = hive_directory(tmp_path / "rows", ["01001", "01002"])
    for name, batch in readers(place, tmp_path / "store", ["i", "k"], types={"k": "string"}):
        assert batch["k"].tolist() == ["01001", "01002"], name
    for name, batch in readers(place, tmp_path / "store", ["i", "k"], types={"k": "int16"}):
        assert (batch["k"].dtype, batch["k"].tolist()) == ("int16", [1001, 1002]), name
    bad = hive_directory(tmp_path / "bad", ["1", "x"])
    for read in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"column '?k'? is .*k=x/rows\.parquet"):
            read(str(bad), 9, ["i", "k"], types={"k": "int16"})
    for read in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"\bi\b.*names of directories"):
            read(str(bad), 9, ["i", "k"], types={"i": "int16"})


@pytest.mark.parametrize("inside", [[2023, 2024], [7, 8], ["a", "b"]], ids=str)
def test_the_directory_decides_a_column_that_is_in_the_files_too(inside, tmp_path):
    place = hive_directory(tmp_path / "rows", ["2023", "2024"], inside)
    for name, batch in readers(place, tmp_path / "store", ["i", "k"]):
        assert batch["k"].tolist() == [2023, 2024], name
    for name, batch in readers(place, tmp_path / "store", ["i"]):
        assert batch["i"].tolist() == [0, 1], name


def test_nulls_and_hidden_names_of_directories_are_the_same_in_all_readers(tmp_path):
    rows = tmp_path / "rows"
    for number, name in enumerate(("_k=7", "_k=__HIVE_DEFAULT_PARTITION__", "_old", ".k=8")):
        (rows / name).mkdir(parents=True)
        pq.write_table(pa.table({"i": [number]}), rows / name / "rows.parquet")
    for name, batch in readers(rows, tmp_path / "store", ["i", "_k"], fill={"_k": -1}):
        assert (batch["i"].tolist(), batch["_k"].tolist()) == ([0, 1], [7, -1]), name


def test_a_column_of_some_directories_and_other_files_is_refused(tmp_path):
    place = hive_directory(tmp_path / "rows", ["2023"])
    pq.write_table(pa.table({"i": [5], "k": [2025]}), place / "other.parquet")
    for read in (ParquetLoader, frame_loader):
        with pytest.raises(ValueError, match=r"column '?k'? is in .*other\.parquet"):
            read(str(place), 9, ["i", "k"])


DELTA_PARTITIONS = {
    "string": (pa.string(), ["01001", "01002"], ["01001", "01002"]),
    "int8": (pa.int8(), [-1, 2], [-1, 2]),
    "long": (pa.int64(), [2**53 + 1, 2], [2**53 + 1, 2]),
    "bool": (pa.bool_(), [True, False], [True, False]),
    "float": (pa.float32(), [0.1, 1.5], np.float32([0.1, 1.5]).tolist()),
    "date": (pa.date32(), [dt.date(1969, 12, 31), dt.date(2024, 2, 29)], [-1, 19782]),
    "decimal": (
        pa.decimal128(18, 2), [decimal.Decimal("1.25"), decimal.Decimal("9999999999999999.99")],
        [1.25, 9999999999999999.99],
    ),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC), dt.datetime(1960, 1, 1, tzinfo=dt.UTC)],
        [1704110400000000, -315619200000000],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DELTA_PARTITIONS)
def test_partitions_of_a_delta_table_have_the_types_of_its_schema(kind, tmp_path):
    arrow, values, expected = DELTA_PARTITIONS[kind]
    rows = pa.table({"i": [0, 1], "k": pa.array(values, arrow)})
    path = str(tmp_path / "table")
    deltalake.write_deltalake(path, rows, partition_by=["k"])
    found = dict(readers(path, tmp_path / "store", ["i", "k"]))
    dtypes = {name: batch["k"].dtype for name, batch in found.items()}
    assert len(set(dtypes.values())) == 1, dtypes
    for name, batch in found.items():
        assert batch["k"].tolist() == expected, name


def test_nulls_of_a_delta_partition_are_filled(tmp_path):
    rows = pa.table({"i": [0, 1], "k": pa.array([None, 5], pa.int32())})
    path = str(tmp_path / "table")
    deltalake.write_deltalake(path, rows, partition_by=["k"])
    (batch,) = ParquetLoader(path, 9, ["i", "k"], fill={"k": -1})
    assert batch["k"][np.argsort(batch["i"])].tolist() == [-1, 5]
    prepared = prepare_data(path, tmp_path / "store", feature_cols=["i", "k"], fill={"k": -1})
    (batch,) = ParquetLoader(prepared.train_url, 9)
    assert batch["k"][np.argsort(batch["i"])].tolist() == [-1, 5]
