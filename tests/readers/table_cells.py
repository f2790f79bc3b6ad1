# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rows that each reader has of a table, compared with the rows that its engine reads."""

from __future__ import annotations

import math
import pickle
import tempfile
from typing import Any

import numpy as np

from farandole.data import ParquetLoader, frame_loader, open_table, prepare_data
from farandole.data.datasets import open_dataset, write_dataset_link
from farandole.stores.store import Store

FILL = -7
BATCH_SIZE = 7


def read_native(path: Any, columns: list[str], fill: dict[str, float], **options: Any) -> list:
    loader = ParquetLoader(path, BATCH_SIZE, columns, fill=fill, **options)
    return batch_rows(list(loader), columns)


def read_two_ranks(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    """Both ranks have the same number of steps, and each row once."""
    batches = []
    for rank in range(2):
        loader = ParquetLoader(path, BATCH_SIZE, columns, fill=fill, rank=rank, size=2)
        mine = list(loader)
        batches.append(mine)
    assert len(batches[0]) == len(batches[1])
    return batch_rows(batches[0] + batches[1], columns)


def read_resumed(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    """The rest of an epoch comes from a pickled loader of another batch size."""
    loader = ParquetLoader(path, BATCH_SIZE, columns, fill=fill)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2:
            break
    state = loader.state_dict()
    other = pickle.loads(pickle.dumps(ParquetLoader(path, 5, columns, fill=fill)))
    other.load_state_dict(state)
    rest = list(other) if state["rows"] < loader.dataset.rows and not state["epoch"] else []
    return batch_rows(batches + rest, columns)


def read_cached(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    """The second epoch comes from memory."""
    loader = ParquetLoader(path, BATCH_SIZE, columns, fill=fill, inmemory_cache_all=True)
    first, second = (batch_rows(list(loader), columns) for _ in range(2))
    assert first == second
    return second


def read_linked(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    """As the workers of `fit_on_parquet(path=...)` read."""
    with tempfile.TemporaryDirectory() as home:
        store: Any = Store.create(home)
        url = write_dataset_link(store, open_dataset(path))
        return read_native(url, columns, fill)


def read_prepared(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    with tempfile.TemporaryDirectory() as store:
        made = prepare_data(path, store, feature_cols=columns, fill=fill)
        return batch_rows(list(ParquetLoader(made.train_url, BATCH_SIZE, columns)), columns)


def read_frame(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    return batch_rows(list(frame_loader(path, BATCH_SIZE, columns, fill=fill)), columns)


def read_version(path: Any, columns: list[str], fill: dict[str, float]) -> list:
    return read_native(open_table(path), columns, fill, shuffle=False)


READERS = {
    "ParquetLoader": read_native,
    "two ranks": read_two_ranks,
    "resume": read_resumed,
    "cached": read_cached,
    "fit_on_parquet": read_linked,
    "prepare_data": read_prepared,
    "frame_loader": read_frame,
    "open_table": read_version,
}


def batch_rows(batches: list[dict[str, Any]], columns: list[str]) -> list:
    """Returns rows as tuples, in an order of their own."""
    rows = []
    for batch in batches:
        values = [np.asarray(batch[name]).tolist() for name in columns]
        rows += zip(*values, strict=True)
    return sorted(map(plain_row, rows), key=repr)


def plain_row(row: Any) -> tuple:
    return tuple(
        tuple(map(float, one))
        if isinstance(one, list | tuple)
        else one
        if isinstance(one, str)
        else float(one)
        for one in row
    )


def numeric_columns(
    columns: list[str], rows: list[list[Any]]
) -> tuple[list[str], dict[str, float]]:
    """Returns the columns that a batch can hold, and the fill of those with nulls."""
    kept, fill = [], {}
    for index, name in enumerate(columns):
        values = [row[index] for row in rows]
        lists = any(isinstance(one, list) for one in values)
        texts = any(isinstance(one, str) for one in values)
        if any(one is None for one in values):
            if lists or texts or name in ("w", "c"):
                continue
            fill[name] = FILL
        kept.append(name)
    return kept, fill


def expected_rows(columns: list[str], rows: list[list[Any]], chosen: list[str]) -> list:
    places = [columns.index(name) for name in chosen]
    filled = [[FILL if row[at] is None else row[at] for at in places] for row in rows]
    assert not any(isinstance(one, float) and math.isnan(one) for row in filled for one in row)
    return sorted(map(plain_row, filled), key=repr)


def judge_table(name: str, told: dict[str, Any]) -> list[str]:
    """Returns the faults of all readers of a table."""
    chosen, fill = numeric_columns(told["columns"], told["rows"])
    expected = expected_rows(told["columns"], told["rows"], chosen)
    faults = []
    for reader, read in READERS.items():
        try:
            found = read(told["path"], chosen, fill)
        except Exception as error:  # noqa: BLE001 - judged here
            faults.append(f"{name}-{reader}: {type(error).__name__}: {error}")
            continue
        if found != expected:
            odd = [one for one in found if one not in expected][:3]
            lost = [one for one in expected if one not in found][:3]
            faults.append(
                f"{name}-{reader}: {len(found)} rows instead of {len(expected)}, {odd} instead of "
                f"{lost}"
            )
    return faults
