# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory: budgets that hold, and decoded data that the processes of a host share."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.programs import program_path

from farandole._native import prepare
from farandole.data import ParquetLoader, data_memory_budget

MIB = 1 << 20
BESIDES = 40 * MIB
"""Additional memory of the interpreter, thread stacks and buffers of files."""

MEASURE = program_path(__file__, "measure_loader")


def written(directory, tables):
    spec = json.dumps({"train": "train"})
    parts = []
    for number, table in enumerate(tables):
        writer = prepare.PartitionWriter(str(directory), spec, number, "a")
        for batch in table.to_batches(max_chunksize=5000):
            writer.write(batch)
        parts.append(writer.finish())
    prepare.commit_partitions(str(directory), spec, parts)
    return directory / "train"


def wide(rows, width):
    values = pa.array(np.arange(rows * width, dtype=np.float32))
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(values, width), "id": np.arange(rows)})


def least(path, batch_size):
    """The smallest budget that works, as the refusal of a smaller one names it."""
    with pytest.raises(ValueError, match="the least that works is") as refused:
        list(ParquetLoader(path, batch_size, byte_budget=1000))
    return int(re.search(r"least that works is (\d+)", str(refused.value))[1])


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(("rows", "width", "batch_size"), [(50_000, 784, 512), (500, 100_000, 16)])
def test_a_budget_holds_for_data_many_times_as_large(tmp_path, foreign, rows, width, batch_size):
    if foreign:
        path = tmp_path
        for number in range(2):
            table = wide(rows // 2, width)
            options = {"row_group_size": rows // 64, "use_dictionary": False, "compression": "none"}
            pq.write_table(table.cast(listed(table.schema)), path / f"{number}.parquet", **options)
    else:
        path = written(tmp_path, [wide(rows // 2, width), wide(rows // 2, width)])
    needed = least(path, batch_size)
    budget = max(needed, 48 * MIB)
    assert budget < rows * width * 4 * 0.95, "the data is larger"
    command = [sys.executable, MEASURE, path, batch_size, budget]
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True, timeout=120
    )
    seen, grown = map(int, result.stdout.split())
    assert seen == rows
    assert grown <= budget + BESIDES, f"{grown / MIB:.0f} MiB with a budget of {budget / MIB:.0f}"


def listed(schema):
    """The same with lists of any length, as others write vectors."""
    return pa.schema([("x", pa.list_(pa.float32())), ("id", schema.field("id").type)])


def test_a_budget_never_changes_the_order(tmp_path):
    path = written(tmp_path, [wide(4000, 100)])
    needed = least(path, 32)
    orders = [
        [batch["id"].tolist() for batch in ParquetLoader(path, 32, byte_budget=budget)]
        for budget in (needed, 2 * needed, 512 * MIB)
    ]
    assert orders[0] == orders[1] == orders[2]


def test_a_row_larger_than_the_budget_is_refused_with_what_it_takes(tmp_path):
    path = written(tmp_path, [wide(4, 2 * MIB)])
    with pytest.raises(
        ValueError, match=r"the least that works is \d+: \d+ for rows .* \d+ for batches"
    ):
        list(ParquetLoader(path, 1, byte_budget=4 * MIB))
    needed = least(path, 1)
    assert sum(len(batch["id"]) for batch in ParquetLoader(path, 1, byte_budget=needed)) == 4


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Prepared data, and the directory where decoded data is kept."""
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr(data_memory_budget, "_SHARED_MEMORY_PATH", directory)
    path = written(tmp_path / "data", [wide(256 * 8, 10)])
    return path, directory


def ids(loader):
    return [row for batch in loader for row in batch["id"].tolist()]


def test_later_epochs_come_from_memory_in_the_order_they_would_have_had(shared):
    path, directory = shared
    plain = ParquetLoader(path, 100)
    expected = [ids(plain) for _ in range(3)]
    loader = ParquetLoader(path, 100, inmemory_cache_all=True)
    assert ids(loader) == expected[0]
    for file in Path(path).glob("*.parquet"):
        file.unlink()
    assert [ids(loader) for _ in range(2)] == expected[1:]
    (kept,) = directory.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_processes_of_a_host_share_what_one_of_them_decoded(shared):
    path, directory = shared
    loader = ParquetLoader(path, 100, inmemory_cache_all=True)
    rows = ids(loader)
    for file in Path(path).glob("*.parquet"):
        file.unlink()
    program = f"""
from pathlib import Path
from farandole.data import ParquetLoader, data_memory_budget
data_memory_budget._SHARED_MEMORY_PATH = Path({str(directory)!r})
loader = ParquetLoader({str(path)!r}, 100, inmemory_cache_all=True)
print(sum(row for batch in loader for row in batch["id"].tolist()))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) == sum(rows)
    assert len(list(directory.iterdir())) == 1, "this process still uses it"
    del loader
    assert list(directory.iterdir()) == []


def test_files_of_a_killed_process_are_deleted(shared):
    path, directory = shared
    program = f"""
import os, signal
from pathlib import Path
from farandole.data import ParquetLoader, data_memory_budget
data_memory_budget._SHARED_MEMORY_PATH = Path({str(directory)!r})
loader = ParquetLoader({str(path)!r}, 100, inmemory_cache_all=True)
next(iter(loader))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert len(list(directory.iterdir())) == 1
    other = ParquetLoader(path, 100, columns=["id"], inmemory_cache_all=True)
    assert len(ids(other)) == 2048
    del other
    assert list(directory.iterdir()) == []


def test_data_that_does_not_fit_is_decoded_again(shared, caplog, monkeypatch):
    path, _ = shared
    usage = data_memory_budget.shutil.disk_usage("/")
    monkeypatch.setattr(data_memory_budget.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with caplog.at_level("WARNING"):
        loader = ParquetLoader(path, 100, inmemory_cache_all=True)
    assert "inmemory_cache_all" in caplog.text
    assert sorted(ids(loader)) == sorted(ids(loader))
