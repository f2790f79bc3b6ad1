# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Budgets follow the least limit of every cgroup above the process."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.needs import skip_without

from farandole.common.resource_limits import (
    available_memory_bytes,
    memory_limit_bytes,
    usable_cores,
)
from farandole.data import data_memory_budget
from farandole.runner.backend import _core_count

MIB = 1 << 20
TOTAL = 1 << 40
"""Bytes of memory of the described machine."""
NONE = 1 << 62
"""More than any limit."""
LIMIT = 120.0
"""Longest time for a child process, in seconds."""


class Machine:
    """A copy of the files by which the kernel shows memory, cores and cgroups."""

    def __init__(self, folder, *, available):
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {available >> 10} kB\n"
        )
        self.lines, self.mounts = [], ["1 0 0:1 / /proc rw - proc proc rw"]

    def hierarchy(self, version, controllers, path, root="/"):
        """Adds a hierarchy; returns the folders of the process's cgroup and of those above it."""
        name = f"v{version}-{controllers or 'unified'}"
        mount = self.groups / name
        number = 0 if version == 2 else len(self.lines) + 1
        self.lines.append(f"{number}:{controllers}:{path}")
        kind = "cgroup2" if version == 2 else "cgroup"
        self.mounts.append(f"2 1 0:2 {root} {mount} rw - {kind} cgroup rw,{controllers or 'x'}")
        inside = path.removeprefix(root.rstrip("/")).strip("/")
        folders = [mount]
        for part in inside.split("/") if inside else []:
            folders.append(folders[-1] / part)
        folders[-1].mkdir(parents=True)
        return folders[::-1]

    def finish(self):
        (self.proc / "self/cgroup").write_text("\n".join(self.lines) + "\n")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        return self.proc


SHAPES = list(
    itertools.product(
        [1, 2], ["/", "/a", "/a/b/c", "/pod/x"], [False, True], [None, "max", "limit"]
    )
)
"""Version, path of the cgroup, whether it is the root of the mount, and what its files say."""
PERIOD = 100_000


def write_memory(folder, draw, version, kind):
    """Writes the files of memory of a cgroup; returns the limit, and the bytes that are left."""
    limit, used, cached = (draw.randrange(1, 2048) * MIB for _ in range(3))
    high = limit + draw.randrange(-limit // 2, MIB)
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text(
            f"{limit if kind == 'limit' else 9223372036854771712}\n"
        )
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"total_inactive_file {cached}\n")
    else:
        for name, value in (("memory.max", limit), ("memory.high", high)) if kind else ():
            (folder / name).write_text(f"{value if kind == 'limit' else 'max'}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
        limit = min(limit, high)
    return (limit, limit - used + cached) if kind == "limit" else (NONE, NONE)


def write_cores(folder, draw, version, kind):
    """Writes the files of CPU time of a cgroup; returns the cores that it allows."""
    quota = draw.randrange(1, 9 * PERIOD)
    if version == 1:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota if kind == 'limit' else -1}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{PERIOD}\n")
    elif kind:
        (folder / "cpu.max").write_text(f"{quota if kind == 'limit' else 'max'} {PERIOD}\n")
    return math.ceil(quota / PERIOD) if kind == "limit" else NONE


@pytest.mark.parametrize("seed", range(3))
def test_the_least_limit_of_every_cgroup_counts(tmp_path, seed):
    draw = random.Random(seed)
    for at, case in enumerate(SHAPES):
        version, path, is_root, kind = case
        available = draw.randrange(64, 4096) * MIB
        machine = Machine(tmp_path / str(at), available=available)
        limits, left, cores = [TOTAL], [available], [len(os.sched_getaffinity(0))]
        for controllers in ("memory", "cpu,cpuacct") if version == 1 else ("",):
            for folder in machine.hierarchy(version, controllers, path, path if is_root else "/"):
                if "cpu" not in controllers:
                    limit, rest = write_memory(folder, draw, version, kind)
                    limits.append(limit)
                    left.append(rest)
                if controllers != "memory":
                    cores.append(write_cores(folder, draw, version, kind))
        proc = machine.finish()
        assert available_memory_bytes(proc) == max(0, min(left)), case
        assert memory_limit_bytes(proc) == min(limits), case
        assert usable_cores(proc) == max(1, min(cores)), case


@pytest.mark.parametrize("damage", ["", "\0", "x:y", "0::/../..", "4:memory:/gone\n0::"])
def test_files_that_say_nothing_limit_nothing(tmp_path, damage):
    machine = Machine(tmp_path, available=64 * MIB)
    machine.hierarchy(2, "", "/a")
    proc = machine.finish()
    (proc / "self/cgroup").write_text(damage)
    assert available_memory_bytes(proc) == 64 * MIB
    (proc / "self/mountinfo").write_text(damage)
    (proc / "meminfo").write_text(damage)
    assert min(available_memory_bytes(proc), memory_limit_bytes(proc)) > 1 << 50
    assert usable_cores(proc) == len(os.sched_getaffinity(0))


def test_no_module_counts_cores_or_memory_by_itself():
    package = Path(data_memory_budget.__file__).parents[1]
    found = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "len(os.sched_getaffinity" in file.read_text() or "virtual_memory" in file.read_text()
    ]
    assert found == ["common/resource_limits.py"]
    assert 1 <= _core_count() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("limit", "budget"), [(64 * MIB, 128 * MIB), (800 * MIB, 200 * MIB), (1 << 40, 512 * MIB)]
)
def test_the_budget_of_a_reader_follows_the_memory(monkeypatch, limit, budget):
    monkeypatch.setattr(data_memory_budget, "memory_limit_bytes", lambda: limit)
    assert data_memory_budget.default_byte_budget() == budget


class FewColumns:
    """A data set of 640 MiB when it is decoded."""

    rows = 10 * MIB
    columns = (type("Field", (), {"name": "x", "dtype": "float64", "shape": (8,)})(),)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_decoded_data_goes_to_shared_memory_only_within_the_limits(monkeypatch, caplog, kind):
    monkeypatch.setattr(data_memory_budget, "_file_system_kind", lambda _: kind)
    usage = shutil.disk_usage("/")._replace(free=1 << 40)
    monkeypatch.setattr(data_memory_budget.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda: 1 << 40)
    assert data_memory_budget.choose_cache_directory(FewColumns(), None) == "/dev/shm"
    monkeypatch.setattr(data_memory_budget, "available_memory_bytes", lambda: 400 * MIB)
    with caplog.at_level(logging.WARNING):
        found = data_memory_budget.choose_cache_directory(FewColumns(), None)
    assert found == (None if kind == "tmpfs" else data_memory_budget.tempfile.gettempdir())
    assert "0.4 GiB of /dev/shm are free within the limits" in caplog.text


LOADS = """
import logging, os, sys
logging.basicConfig()
with open(sys.argv[2], "w") as tasks:
    tasks.write(str(os.getpid()))
from farandole.data import ParquetLoader
loader = ParquetLoader(sys.argv[1], 4096, inmemory_cache_all=True, shuffle=False)
rows = 0
for _ in range(2):
    rows += sum(len(batch["x"]) for batch in loader)
print(rows)
"""


def memory_controller():
    """The folder of this process's cgroup that limits memory, and the name of its limit; `None` if
    this process cannot make one.
    """
    if os.geteuid() != 0:
        return None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
    root = Path("/sys/fs/cgroup")
    if "memory" in (root / "cgroup.subtree_control").read_text().split():
        return root, "memory.max"
    return None


def test_a_loader_in_a_small_container_keeps_less_and_is_not_killed(tmp_path):
    found = memory_controller()
    skip_without(None if found else "needs root and a cgroup whose memory can be limited")
    above, name = found
    rows = 100_000
    # 400 MB when it is decoded, and small in the file.
    schema = pa.schema({"x": pa.list_(pa.float32(), 1000)})
    with pq.ParquetWriter(tmp_path / "rows.parquet", schema) as writer:
        for part in range(10):
            values = pa.array(np.full(rows // 10 * 1000, part, np.float32))
            column = pa.FixedSizeListArray.from_arrays(values, 1000)
            writer.write_table(pa.table({"x": column}, schema=schema))
    group = above / f"farandole-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(330 * MIB))
        words = [sys.executable, "-c", LOADS, tmp_path / "rows.parquet", group / "cgroup.procs"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{2 * rows}\n"
        assert "within the limits of this process's cgroups" in done.stderr
    finally:
        group.rmdir()
