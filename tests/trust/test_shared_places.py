# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Directories that all users of a host share: while data is loaded, fitted and transformed, other
users can neither read nor enter anything that lies there.

The programs run with a umask of 0, so a file or directory that only the umask would protect is
found. A thread looks at the shared directories all the time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
WATCH = """
import os, pathlib, stat, sys, tempfile, threading, time
os.umask(0)
TEMPORARY, HOME = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
SHARED_MEMORY = pathlib.Path("/dev/shm")
before = set(os.listdir(SHARED_MEMORY))
seen, open_to_others, done = set(), set(), threading.Event()


def look():
    for folder in (TEMPORARY, SHARED_MEMORY):
        for entry in os.scandir(folder):
            # Other programs of this host use the shared memory, too.
            foreign = folder == SHARED_MEMORY and (
                entry.name in before or not entry.name.startswith(("farandole", "torch_", "psm_"))
            )
            # Torch itself makes the directory of its compiler's cache.
            foreign = foreign or entry.name.startswith("torchinductor_")
            if foreign:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            seen.add(entry.name)
            if found.st_mode & 0o077 and not stat.S_ISLNK(found.st_mode):
                open_to_others.add((entry.path, oct(found.st_mode)))


def watch():
    while not done.is_set():
        look()
        time.sleep(0.005)


assert tempfile.gettempdir() == str(TEMPORARY)
import numpy as np, pandas as pd
frame = pd.DataFrame({
    "x": np.linspace(0, 1, 256).astype("float32"), "y": np.zeros(256, "float32"),
    "tokens": [list(range(n % 5 + 1)) for n in range(256)],
})


def spark_session():
    from pyspark.sql import SparkSession
    return (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(HOME / "local"))
        .config("spark.sql.warehouse.dir", str(HOME / "warehouse"))
        .config("spark.driver.extraJavaOptions", f"-Djava.io.tmpdir={HOME} -XX:-UsePerfData")
        .getOrCreate())


def estimator(backend, **options):
    import torch
    from farandole.spark.common import LocalStore
    from farandole.spark.torch import TorchEstimator
    model = torch.nn.Linear(1, 1)
    return TorchEstimator(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(), feature_cols=["x"], label_cols=["y"], batch_size=32, epochs=1,
        verbose=0, store=LocalStore(str(HOME / "store")), backend=backend, **options)


def main():
{body}


if __name__ == "__main__":
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        main()
    finally:
        look()
        done.set()
        watcher.join()
    print(f"SEEN {len(seen)}")
    for one in sorted(open_to_others):
        print("OPEN", *one)
"""
PROGRAMS = {
    "frame_loader": """
from farandole.data import frame_loader
from farandole.data.ragged import Pad
loader = frame_loader(frame, 32, ["x", "y", "tokens"], ragged={"tokens": Pad()})
look()
assert sum(len(batch["x"]) for batch in loader) == 256
""",
    "frame_loader of Spark": """
from farandole.data import frame_loader
loader = frame_loader(spark_session().createDataFrame(frame[["x", "y"]]), 32)
look()
assert sum(len(batch["x"]) for batch in loader) == 256
""",
    "cached loader with processes": """
from farandole.data import ParquetLoader
frame[["x", "y"]].to_parquet(HOME / "rows.parquet")
loader = ParquetLoader(str(HOME / "rows.parquet"), 32, inmemory_cache_all=True,
    transformation_fn=transformed, transform_pool="process")
for _ in range(2):
    assert sum(len(batch["x"]) for batch in loader) == 256
    look()
""",
    "fit in local workers": """
from farandole.spark.common import LocalBackend
for warm in (False, True):
    estimator(LocalBackend(2, verbose=0, warm=warm), run_id=f"r{warm}").fit(frame[["x", "y"]])
""",
    "fit and transform on Spark": """
from farandole.spark.common import SparkBackend
rows = spark_session().createDataFrame(frame[["x", "y"]])
model = estimator(SparkBackend(1, verbose=0)).fit(rows)
assert model.transform(rows).count() == 256
model.write().save(str(HOME / "model"))
""",
    "query that spills": """
from farandole.data.inputs import sql
from farandole.data.prepare import prepare_data
from farandole.spark.common import LocalStore
sql.QUERY_MEMORY_BYTES = 24 << 20
many = pd.DataFrame({"x": np.random.default_rng(0).random(2_000_000), "y": np.zeros(2_000_000)})
many.to_parquet(HOME / "many.parquet", row_group_size=10_000)
with prepare_data(str(HOME / "many.parquet"), LocalStore(str(HOME / "q")), label_cols=["y"],
        sql="SELECT x, y FROM source ORDER BY x") as prepared:
    assert prepared.train_rows == 2_000_000
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_in_a_shared_place_is_open_to_other_users(tmp_path, name, monkeypatch):
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o1777)
    home.mkdir(mode=0o700)
    body = "".join(f"    {line}\n" for line in PROGRAMS[name].strip().splitlines())
    program = tmp_path / "program.py"
    transformed = "\n\ndef transformed(batch):\n    return batch\n\n\ndef main():"
    program.write_text(WATCH.replace("{body}", body).replace("\n\ndef main():", transformed))
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    done = subprocess.run(
        [sys.executable, str(program), str(shared), str(home)],
        capture_output=True, text=True, check=False, timeout=150, cwd=Path.cwd(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("OPEN")] == []
    (seen,) = [line for line in lines if line.startswith("SEEN")]
    assert int(seen.split()[1]) > 0, "something was there to be looked at"
