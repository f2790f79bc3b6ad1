# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Shuffled batches as torch tensors, next to pyarrow's plain scan of the same files in the same
run.

    python bench/data.py [--rows 2000000] [--repeat 5] [--images 1000]

Prints medians: rows per second of each, and the ratio to the scan (no shuffle, no tensors) or to
pyarrow's dataset writer, with the least that is asked for; then how well rows are mixed, how long
plans and first batches of many files take, how much memory ten million rows of CSV take while they
are prepared, and how fast image files become tensors, next to torchvision. Without torchvision, the
row of images says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import csv
from saved import save

from farandole._native import prepare
from farandole.data import Pad, ParquetLoader, prepare_data

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 1024
FILES = 8
MISSING = 0.05
"""Share of the values that are null among words and numbers."""


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
    return pa.table(
        {"x": pa.ListArray.from_arrays(offsets, values), "label": random.integers(0, 10, rows)}
    )


def prepared(tables: list[pa.Table], url: str, compression: str) -> None:
    """Writes the tables as one data set."""
    spec = json.dumps({"train": "train", "labels": ["label"], "compression": compression})
    parts = []
    for number, table in enumerate(tables):
        writer = prepare.PartitionWriter(url, spec, number, "a")
        for batch in table.to_batches(max_chunksize=10_000):
            writer.write(batch)
        parts.append(writer.finish())
    prepare.commit_partitions(url, spec, parts)


def scan(path: Path) -> int:
    """All record batches, as pyarrow reads them."""
    return sum(batch.num_rows for batch in ds.dataset(str(path), format="parquet").to_batches())


def batches(loader: ParquetLoader) -> int:
    """The next shuffled epoch as tensors."""
    return sum(len(batch["label"]) for batch in loader)


def first_epoch(path: Path) -> int:
    """An epoch of an unused loader."""
    return batches(ParquetLoader(path, BATCH, framework="torch"))


def fresh(case: str, path: Path, repeat: int) -> float:
    """Median seconds of a case of this module, the first thing that a new process does once all
    is imported.
    """
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import data, torch; from pathlib "
        "import Path\n"
        f"start = time.perf_counter(); data.{case}(Path(sys.argv[2])); print(time.perf_counter() "
        "- start)"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(path)]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in range(repeat)
    ]
    return statistics.median(float(run) for run in runs)


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


def write_dataset(tables: list[pa.Table], path: Path) -> int:
    """All tables, as pyarrow's dataset writer writes them, compressed."""
    shutil.rmtree(path, ignore_errors=True)
    options = ds.ParquetFileFormat().make_write_options(compression="snappy")
    ds.write_dataset(tables, path, format="parquet", file_options=options, schema=tables[0].schema)
    return 0


def write_prepared(tables: list[pa.Table], path: Path, compression: str) -> int:
    """All tables, as one prepared data set."""
    shutil.rmtree(path, ignore_errors=True)
    prepared(tables, str(path), compression)
    return 0


def quality(title: str, orders: dict[str, list[np.ndarray]], batch: int = BATCH) -> None:
    """Prints how well rows are mixed, in numbers that are 1 for a full shuffle.

    The distance of neighbours is that of two rows that follow each other, in rows of the files; the
    spread of batches is the standard deviation of the mean row number of a batch: below 1, batches
    are more even than chance makes them. The share of blocks is how many of 64 equal parts of the
    data a batch has rows of.
    """
    print(f"\n{title}: how well rows are mixed, next to a full shuffle")
    for name, batches in orders.items():
        rows = np.concatenate(batches)
        count = len(rows)
        distance = np.abs(np.diff(rows)).mean() / ((count + 1) / 3)
        means = np.array([part.mean() for part in batches if len(part) == batch])
        spread = means.std() / (count / np.sqrt(12 * batch))
        parts = np.mean(
            [
                len(np.unique(part * 64 // (rows.max() + 1)))
                for part in batches
                if len(part) == batch
            ]
        )
        told = (
            f"distance of neighbours {distance:6.3f}   spread of batches {spread:6.3f}   parts in "
            f"a batch {parts:5.1f}"
        )
        print(f"  {name:<32} {told}")


def mixed(tables: list[pa.Table], directory: Path) -> None:
    """Prints how well rows are mixed that lie in order in the files."""
    rows = sum(table.num_rows for table in tables)
    numbered, start = [], 0
    for table in tables:
        numbered.append(
            pa.table({"row": np.arange(start, start + table.num_rows), "c0": table["c0"]})
        )
        start += table.num_rows
    foreign = directory / "numbered"
    foreign.mkdir()
    for number, table in enumerate(numbered):
        pq.write_table(table, foreign / f"part-{number}.parquet", row_group_size=len(table) // 8)
    write_prepared(numbered, directory / "numbered-prepared", "none")

    def read(path: Path, *, shuffle: bool) -> list[np.ndarray]:
        loader = ParquetLoader(path, BATCH, columns=["row"], shuffle=shuffle, tail="drop_last")
        return [batch["row"] for batch in loader]

    full = np.random.default_rng(0).permutation(rows)
    quality(
        f"{rows} rows in {len(tables)} files",
        {
            "file order": read(foreign, shuffle=False),
            "farandole, foreign files": read(foreign, shuffle=True),
            "farandole, prepared": read(directory / "numbered-prepared" / "train", shuffle=True),
            "full shuffle": [full[at : at + BATCH] for at in range(0, rows - BATCH + 1, BATCH)],
        },
    )


def first_batches(directory: Path) -> None:
    """Prints how long plans and first batches of many files take; the files are links to one."""
    one = directory / "one.parquet"
    pq.write_table(
        pa.table({f"c{number}": np.zeros(1000, np.float32) for number in range(20)}), one
    )
    print("\nmany files of 1000 rows")
    for files in (100, 1000, 10_000):
        many = directory / f"many-{files}"
        many.mkdir()
        for number in range(files):
            (many / f"part-{number:05}.parquet").hardlink_to(one)
        start = time.perf_counter()
        loader = ParquetLoader(many, BATCH, framework="torch")
        plan = time.perf_counter() - start
        firsts = []
        for _ in range(5):
            start = time.perf_counter()
            epoch = iter(loader)
            next(epoch)
            firsts.append(time.perf_counter() - start)
            epoch.close()
        first = statistics.median(firsts)
        print(
            f"  {files:6} files: plan {plan * 1e3:8.1f} ms, then the first batch "
            f"{first * 1e3:8.2f} ms"
        )


PREPARE = """
import re, sys, time
from pathlib import Path
from farandole.data import prepare_data
start = time.perf_counter()
done = prepare_data(sys.argv[1], sys.argv[2], label_cols=["y"], validation=0.1)
seconds = time.perf_counter() - start
memory = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
print(done.train_rows + done.val_rows, seconds, memory)
"""


def from_csv(directory: Path, rows: int) -> dict[str, float]:
    """Prints how long preparing CSV takes a process of its own, and its memory at most."""
    path, piece = directory / "rows.csv", rows // 20
    random = np.random.default_rng(0)
    columns = {f"c{number}": random.random(piece, dtype=np.float32).round(4) for number in range(8)}
    table = pa.table({"id": np.arange(piece), **columns, "y": np.arange(piece) % 2})
    with csv.CSVWriter(path, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)
    command = [sys.executable, "-c", PREPARE, str(path), str(directory / "from-csv")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count, seconds, memory = map(float, told.split())
    print(
        f"\n{count:.0f} rows of CSV, {path.stat().st_size / 2**20:.0f} MiB, prepared without Spark"
    )
    print(
        f"  {seconds:.1f} s, {count / seconds / 1e6:.2f} M rows/s, {memory:.0f} MiB at most "
        "(allowed: 1024)"
    )
    return {"rows": count, "seconds": seconds, "mebibytes": memory}


LEAST = {
    "20 float32 columns": {"farandole, foreign files": 0.6, "write: farandole, snappy": 1.5},
    "784 float32 a row": {
        "farandole, foreign files": 0.6,
        "farandole, prepared, none": 1.5,
        "write: farandole, snappy": 1.5,
    },
}
"""Least speed that is demanded, as a multiple of pyarrow's scan or writer."""


def compare(title: str, tables: list[pa.Table], repeat: int) -> dict[str, dict[str, float]]:
    """Prints one table of results."""
    rows = sum(table.num_rows for table in tables)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        foreign = directory / "foreign"
        foreign.mkdir()
        for number, table in enumerate(tables):
            pq.write_table(table, foreign / f"part-{number}.parquet")
        writers = {"write: pyarrow, snappy": lambda: write_dataset(tables, directory / "theirs")}
        for compression in ("none", "snappy", "lz4"):
            path = directory / compression
            case = partial(write_prepared, tables, path, compression)
            writers[f"write: farandole, {compression}"] = case
        writing = measure(writers, repeat)

        def loader(path: Path, *, keep: bool = False) -> Callable[[], int]:
            return partial(
                batches, ParquetLoader(path, BATCH, framework="torch", inmemory_cache_all=keep)
            )

        cases = {
            "scan: pyarrow": partial(scan, foreign),
            "farandole, foreign files": loader(foreign),
            "the same, first epoch": partial(first_epoch, foreign),
            "farandole, kept in memory": loader(foreign, keep=True),
        }
        for compression in ("none", "snappy", "lz4"):
            cases[f"farandole, prepared, {compression}"] = loader(directory / compression / "train")
        reading = measure(cases, repeat)
        alone = {
            "scan: pyarrow, new process": fresh("scan", foreign, repeat),
            "farandole, foreign, new process": fresh("first_epoch", foreign, repeat),
        }
    print(f"\n{title}: {rows} rows in {len(tables)} files, batches of {BATCH}")
    bases = (
        (writing, "write: pyarrow, snappy"),
        (reading, "scan: pyarrow"),
        (alone, "scan: pyarrow, new process"),
    )
    for times, base in bases:
        for case, seconds in times.items():
            speed = times[base] / seconds
            results[case] = {"seconds": seconds, "rows_per_second": rows / seconds, "ratio": speed}
            asked = f"   at least {LEAST[title][case]} x" if case in LEAST[title] else ""
            told = (
                f"{seconds * 1e3:9.1f} ms {rows / seconds / 1e6:8.2f} M rows/s {speed:7.2f} "
                f"x{asked}"
            )
            print(f"  {case:<32} {told}")
    return results


def sequences(rows: int, seed: int) -> pa.Table:
    """Lists of 0 to 511 int32 tokens and a label."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 512, rows)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    tokens = random.integers(1, 30_000, offsets[-1], dtype=np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    return pa.table({"tokens": lists, "label": random.integers(0, 10, rows)})


def words(rows: int, seed: int) -> pa.Table:
    """Four columns of words, of which some are missing, four of numbers, and a label."""
    random = np.random.default_rng(seed)
    known = pa.array([f"word-{number}" for number in range(1000)])
    drawn = [
        pa.array(random.integers(0, 1000, rows), mask=random.random(rows) < MISSING)
        for _ in range(4)
    ]
    columns = {f"w{number}": known.take(indices) for number, indices in enumerate(drawn)}
    for number in range(4):
        columns[f"n{number}"] = pa.array(
            random.standard_normal(rows), mask=random.random(rows) < MISSING
        )
    return pa.table({**columns, "label": random.integers(0, 10, rows)})


def encoded(
    title: str, tables: list[pa.Table], repeat: int, least: float, **options: Any
) -> dict[str, dict[str, float]]:
    """Prints what encoded rows cost: lists that are padded, words that are indices."""
    rows = sum(table.num_rows for table in tables)
    with tempfile.TemporaryDirectory() as name:
        foreign = Path(name, "foreign")
        foreign.mkdir()
        for number, table in enumerate(tables):
            pq.write_table(table, foreign / f"part-{number}.parquet")
        start = time.perf_counter()
        data = prepare_data(foreign, Path(name, "store"), label_cols=["label"], **options)
        preparing = time.perf_counter() - start
        cases = {
            "scan: pyarrow": partial(scan, foreign),
            "farandole, encoded": partial(
                batches, ParquetLoader(data.train_url, BATCH, framework="torch")
            ),
        }
        reading = measure(cases, repeat)
    print(
        f"\n{title}: {rows} rows in {len(tables)} files, batches of {BATCH}; prepared in "
        f"{preparing:.2f} s"
    )
    results = {"prepare": {"seconds": preparing, "rows_per_second": rows / preparing, "ratio": 0.0}}
    for case, seconds in reading.items():
        speed = reading["scan: pyarrow"] / seconds
        results[case] = {"seconds": seconds, "rows_per_second": rows / seconds, "ratio": speed}
        asked = f"   at least {least} x" if case.startswith("farandole") else ""
        print(
            f"  {case:<32} {seconds * 1e3:9.1f} ms {rows / seconds / 1e6:8.2f} M rows/s "
            f"{speed:7.2f} x{asked}"
        )
    return results


def photographs(count: int, repeat: int) -> dict[str, Any]:
    """Prints how fast JPEG files become tensors, next to torchvision, as `bench/images.py`
    measures it.
    """
    title = f"\n{count} photographs of 500 x 375 as float32 of 3 x 224 x 224"
    try:
        import images  # noqa: PLC0415 - it needs Pillow
        import torchvision  # noqa: F401, PLC0415 - images imports it later
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("PIL", "torchvision"):
            raise
        told = f"not measured, {error.name} is not installed: pip install torchvision pillow"
        print(f"{title}\n  {told}")
        return {"not measured": told}
    threads = images.torch.get_num_threads()
    images.torch.set_num_threads(1)  # both sides have threads of their own
    try:
        how, steps = images.resized()
        times = images.compare(images.photographs(count, "jpeg"), how, steps, repeat)
    finally:
        images.torch.set_num_threads(threads)
    print(f"{title}, {images.THREADS} threads")
    results = {}
    for case, (seconds, _) in times.items():
        speed = times["torchvision"][0] / seconds
        results[case] = {"seconds": seconds, "rows_per_second": count / seconds, "ratio": speed}
        asked = "   at least 1.0 x" if case == "farandole" else ""
        print(
            f"  {case:<32} {seconds * 1e3:9.1f} ms {count / seconds:8.0f} images/s {speed:7.2f} "
            f"x{asked}"
        )
    return results


def main() -> None:
    """Measures all shapes of data."""
    parser = argparse.ArgumentParser(description="Batches next to a plain scan.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--csv-rows", type=int, default=10_000_000)
    parser.add_argument("--images", type=int, default=1000)
    given = parser.parse_args()
    flat = [scalars(given.rows // FILES, seed) for seed in range(FILES)]
    results: dict[str, dict[str, Any]] = {
        "scalars": compare("20 float32 columns", flat, given.repeat)
    }
    wide = given.rows // 50
    results["vectors"] = compare(
        "784 float32 a row", [vectors(wide // FILES, seed) for seed in range(FILES)], given.repeat
    )
    lists = [sequences(given.rows // 10 // FILES, seed) for seed in range(FILES)]
    results["ragged"] = encoded(
        "lists of up to 511 int32",
        lists,
        given.repeat,
        0.6,
        ragged={"tokens": Pad(max_length=512, buckets=8)},
    )
    texts = [words(given.rows // 2 // FILES, seed) for seed in range(FILES)]
    results["words"] = encoded(
        "4 words and 4 numbers, with holes", texts, given.repeat, 0.6,
        categories=["w0", "w1", "w2", "w3"], fill="mean",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        mixed(flat, Path(directory))
        first_batches(Path(directory))
        results["csv"] = from_csv(Path(directory), given.csv_rows)
    results["images"] = photographs(given.images, given.repeat)
    save("data", {"rows": given.rows, "repeat": given.repeat, **results})


if __name__ == "__main__":
    main()
