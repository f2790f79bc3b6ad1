# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files and directories that another user puts into shared places stop no job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.needs import skip_without
from tests.programs import program_path
from tests.started import environment, together

pytestmark = pytest.mark.timeout(120)

STRANGER = 65534
SHARED_MEMORY = Path("/dev/shm")
LOADS = """
import logging, os, sys
logging.basicConfig()
from farandole.data import ParquetLoader
loader = ParquetLoader(sys.argv[1], 100, inmemory_cache_all=True, shuffle=False)
for _ in range(2):
    print(sum(len(batch["x"]) for batch in loader))
print(*[name for name in os.listdir("/dev/shm") if name.startswith("farandole-cache-")])
"""
TAKES = program_path(__file__, "take_place")


def root_reason():
    return None if os.geteuid() == 0 else "needs root, to be another user"


def loaded(path):
    done = subprocess.run(
        [sys.executable, "-c", LOADS, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("how", ["locked", "link", "pipe"])
def test_a_file_in_the_place_of_the_cache_costs_only_the_cache(tmp_path, how):
    skip_without(root_reason())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": np.arange(1000.0)}), path)
    (*counts, names), said = loaded(path)
    assert counts == ["1000", "1000"]
    (name,) = names.split()
    assert "each epoch decodes them again" not in said
    words = [sys.executable, TAKES, SHARED_MEMORY / name, how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout.readline() == "taken\n"
        (*counts, _), said = loaded(path)
        assert counts == ["1000", "1000"]
        assert "each epoch decodes them again" in said
        taker.communicate(timeout=30)
    assert not (SHARED_MEMORY / name).exists()


def test_ranks_of_another_launcher_meet_where_a_stranger_has_taken_the_usual_directory(tmp_path):
    skip_without(root_reason())
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(mode=0o700)
    temporary.mkdir()
    taken = temporary / f"farandole-{os.getuid()}"
    taken.mkdir()
    os.chown(taken, STRANGER, STRANGER)
    places = {"HOME": str(home), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": ""}
    ranks = [
        places
        | {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_SIZE": "2",
        }
        for rank in range(2)
    ]
    ended = together([environment(variables) for variables in ranks])
    assert [one.place for one in ended] == [[rank, 2, rank, 2, 0, 1, 3] for rank in range(2)]
    assert list(taken.iterdir()) == []
