# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An epoch of Parquet as torch tensors, next to petastorm 0.13.1, which reads the same files in
turns.

    make .tools/petastorm/ready
    python bench/next_to_petastorm.py [--repeat 3] [--rows 40000]

`DataLoader` and `BatchedDataLoader` are petastorm's, over `make_batch_reader` with the options of a
converter: 4 workers, row groups in another order each time. The drop-in `farandole-petastorm` has
the same classes. `ParquetLoader` shuffles rows, which the others do not. Prints seconds of an
epoch, medians, and the ratio to petastorm's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from saved import save

ROOT = Path(__file__).parents[1]
BATCH = 1024
FILES = 8
WIDTH = 784
EPOCHS = 3
"""Epochs that a process measures, after one that is not counted."""
MAX_TRIES = 3 * EPOCHS


def write_files(folder: Path, rows: int) -> None:
    """Writes rows of a list of 784 float32 and a label, as Spark writes them for a converter:
    uncompressed.
    """
    random = np.random.default_rng(0)
    each = rows // FILES
    for number in range(FILES):
        values = pa.array(random.standard_normal(each * WIDTH, dtype=np.float32))
        offsets = pa.array(np.arange(0, each * WIDTH + 1, WIDTH, dtype=np.int32))
        lists = pa.ListArray.from_arrays(offsets, values)
        table = pa.table({"x": lists, "label": random.integers(0, 10, each)})
        pq.write_table(table, folder / f"part-{number}.parquet", compression="none")


def read_epoch(kind: str, folder: str) -> int:
    """Returns the number of rows of an epoch, with the packages of this process."""
    if kind == "ParquetLoader":
        from farandole.data import ParquetLoader  # noqa: PLC0415 - petastorm's process has none

        return sum(len(batch["label"]) for batch in ParquetLoader(folder, BATCH, framework="torch"))
    from petastorm import make_batch_reader, pytorch  # noqa: PLC0415 - the parent measures none

    reader = make_batch_reader(f"file://{folder}", num_epochs=1, workers_count=4)
    with getattr(pytorch, kind)(reader, batch_size=BATCH) as loader:
        return sum(len(batch["label"]) for batch in loader)


def measure_epochs(kind: str, folder: str, rows: int) -> None:
    """Prints the seconds of some epochs.

    Threads of petastorm sometimes end an epoch before its last row. Such an epoch does not count.
    """
    seconds = []
    for _ in range(MAX_TRIES):
        start = time.perf_counter()
        if read_epoch(kind, folder) == rows:
            seconds.append(time.perf_counter() - start)
        if len(seconds) == EPOCHS + 1:
            break
    assert len(seconds) == EPOCHS + 1, f"{kind} read too few rows, again and again"
    print(json.dumps(seconds[1:]))


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="processes of each kind")
    parser.add_argument("--rows", type=int, default=40_000, help="rows, in eight files")
    peer = ROOT / ".tools" / "petastorm" / "bin" / "python"
    parser.add_argument("--petastorm", default=str(peer), help="the interpreter with petastorm")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure_epochs(*given.measure, given.rows)
        return
    kinds = {
        ("petastorm", "DataLoader"): given.petastorm,
        ("drop-in", "DataLoader"): sys.executable,
        ("petastorm", "BatchedDataLoader"): given.petastorm,
        ("drop-in", "BatchedDataLoader"): sys.executable,
        ("farandole", "ParquetLoader"): sys.executable,
    }
    seconds: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), given.rows)
        for _ in range(given.repeat):
            for kind, python in kinds.items():
                words = [python, __file__, "--rows", str(given.rows), "--measure", kind[1], folder]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise SystemExit(done.stderr)
                seconds[kind] += json.loads(done.stdout.splitlines()[-1])
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    results = {}
    print(f"{'an epoch as tensors':<36} {'seconds':>8} {'ratio':>7}")
    for kind, median in medians.items():
        loader = "DataLoader" if kind[1] == "ParquetLoader" else kind[1]
        ratio = median / medians["petastorm", loader]
        results[", ".join(kind)] = {"seconds": median, "ratio": ratio, "runs": seconds[kind]}
        print(f"{', '.join(kind):<36} {median:>8.3f} {ratio:>7.2f}", flush=True)
    save("petastorm", {"rows": given.rows, "epochs": results})


if __name__ == "__main__":
    main()
