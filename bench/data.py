# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Shuffled batches as torch tensors, next to pyarrow's plain scan of the same files in the same run.

    python bench/data.py [--rows 2000000] [--repeat 5]

Prints medians: rows per second of each, and the ratio to the scan (no shuffle, no tensors).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from farandole._native import prepare
from farandole.data import ParquetLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 1024
FILES = 8


def scalars(rows: int, seed: int) -> pa.Table:
    """20 float32 columns and a label."""
    random = np.random.default_rng(seed)
    columns = {f"c{number}": random.standard_normal(rows, dtype=np.float32) for number in range(20)}
    return pa.table({**columns, "label": random.integers(0, 10, rows)})


def vectors(rows: int, seed: int) -> pa.Table:
    """A list column of 784 float32 and a label."""
    random = np.random.default_rng(seed)
    values = pa.array(random.standard_normal(rows * 784, dtype=np.float32))
    offsets = pa.array(np.arange(0, rows * 784 + 1, 784, dtype=np.int32))
    return pa.table({"x": pa.ListArray.from_arrays(offsets, values), "label": random.integers(0, 10, rows)})


def prepared(tables: list[pa.Table], url: str, compression: str) -> None:
    """Writes the tables as one data set."""
    spec = json.dumps({"train": "train", "labels": ["label"], "compression": compression})
    parts = []
    for number, table in enumerate(tables):
        writer = prepare.PartitionWriter(url, spec, number, "a")
        for batch in table.to_batches(max_chunksize=10_000):
            writer.write(batch)
        parts.append(writer.finish())
    prepare.commit(url, spec, parts)


def scan(path: Path) -> int:
    """All record batches, as pyarrow reads them."""
    return sum(batch.num_rows for batch in ds.dataset(str(path), format="parquet").to_batches())


def batches(path: str, epochs: Iterator[int]) -> int:
    """One shuffled epoch as tensors."""
    loader = ParquetLoader(path, BATCH, framework="torch")
    loader.set_epoch(next(epochs))
    return sum(len(batch["label"]) for batch in loader)


def measure(cases: dict[str, Callable[[], int]], repeat: int) -> dict[str, float]:
    """Median seconds of each case; they take turns, after one round that warms caches."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeat + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(title: str, tables: list[pa.Table], repeat: int) -> None:
    """Prints one table of results."""
    rows = sum(table.num_rows for table in tables)
    with tempfile.TemporaryDirectory() as directory:
        foreign = Path(directory) / "foreign"
        foreign.mkdir()
        start = time.perf_counter()
        for number, table in enumerate(tables):
            pq.write_table(table, foreign / f"part-{number}.parquet")
        writing = {"write: pyarrow, snappy": time.perf_counter() - start}
        for compression in ("none", "snappy", "lz4"):
            start = time.perf_counter()
            prepared(tables, f"{directory}/{compression}", compression)
            writing[f"write: farandole, {compression}"] = time.perf_counter() - start
        epochs = iter(range(1_000_000))
        cases = {
            "scan: pyarrow": lambda: scan(foreign),
            "farandole, foreign files": lambda: batches(str(foreign), epochs),
        }
        for compression in ("none", "snappy", "lz4"):
            path = f"{directory}/{compression}/train"
            cases[f"farandole, prepared, {compression}"] = lambda path=path: batches(path, epochs)
        reading = measure(cases, repeat)
    print(f"\n{title}: {rows} rows in {len(tables)} files, batches of {BATCH}")
    for times, base in ((writing, "write: pyarrow, snappy"), (reading, "scan: pyarrow")):
        for name, seconds in times.items():
            speed = times[base] / seconds
            print(f"  {name:<32} {seconds * 1e3:9.1f} ms {rows / seconds / 1e6:8.2f} M rows/s {speed:7.2f} x")


def main() -> None:
    """Measures both shapes of data."""
    parser = argparse.ArgumentParser(description="Batches next to a plain scan.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    compare("20 float32 columns", [scalars(given.rows // FILES, seed) for seed in range(FILES)], given.repeat)
    wide = given.rows // 50
    compare("784 float32 a row", [vectors(wide // FILES, seed) for seed in range(FILES)], given.repeat)


if __name__ == "__main__":
    main()
