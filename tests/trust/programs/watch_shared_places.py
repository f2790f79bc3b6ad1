# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Uses data with a umask of 0, while a thread looks for what is open to others in shared places."""

import os
import pathlib
import stat
import sys
import tempfile
import threading
import time

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
import numpy as np
import pandas as pd

frame = pd.DataFrame(
    {
        "x": np.linspace(0, 1, 256).astype("float32"),
        "y": np.zeros(256, "float32"),
        "tokens": [list(range(n % 5 + 1)) for n in range(256)],
    }
)


def spark_session():
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(HOME / "local"))
        .config("spark.sql.warehouse.dir", str(HOME / "warehouse"))
        .config("spark.driver.extraJavaOptions", f"-Djava.io.tmpdir={HOME} -XX:-UsePerfData")
        .getOrCreate()
    )


def estimator(backend, **options):
    import torch

    from farandole.spark.common import LocalStore
    from farandole.spark.torch import TorchEstimator

    model = torch.nn.Linear(1, 1)
    return TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=32,
        epochs=1,
        verbose=0,
        store=LocalStore(str(HOME / "store")),
        backend=backend,
        **options,
    )


def transformed(batch):
    return batch


def load_frame():
    from farandole.data import frame_loader
    from farandole.data.ragged import Pad

    loader = frame_loader(frame, 32, ["x", "y", "tokens"], ragged={"tokens": Pad()})
    look()
    assert sum(len(batch["x"]) for batch in loader) == 256


def load_frame_of_spark():
    from farandole.data import frame_loader

    loader = frame_loader(spark_session().createDataFrame(frame[["x", "y"]]), 32)
    look()
    assert sum(len(batch["x"]) for batch in loader) == 256


def load_in_processes():
    from farandole.data import ParquetLoader

    frame[["x", "y"]].to_parquet(HOME / "rows.parquet")
    loader = ParquetLoader(
        str(HOME / "rows.parquet"),
        32,
        inmemory_cache_all=True,
        transformation_fn=transformed,
        transform_pool="process",
    )
    for _ in range(2):
        assert sum(len(batch["x"]) for batch in loader) == 256
        look()


def fit_in_local_workers():
    from farandole.spark.common import LocalBackend

    for warm in (False, True):
        estimator(LocalBackend(2, verbose=0, warm=warm), run_id=f"r{warm}").fit(frame[["x", "y"]])


def fit_on_spark():
    from farandole.spark.common import SparkBackend

    rows = spark_session().createDataFrame(frame[["x", "y"]])
    model = estimator(SparkBackend(1, verbose=0)).fit(rows)
    assert model.transform(rows).count() == 256
    model.write().save(str(HOME / "model"))


def spill_query():
    from farandole.data.inputs import sql
    from farandole.data.prepare import prepare_data
    from farandole.spark.common import LocalStore

    sql.QUERY_MEMORY_BYTES = 24 << 20
    many = pd.DataFrame({"x": np.random.default_rng(0).random(2_000_000), "y": np.zeros(2_000_000)})
    many.to_parquet(HOME / "many.parquet", row_group_size=10_000)
    with prepare_data(
        str(HOME / "many.parquet"),
        LocalStore(str(HOME / "q")),
        label_cols=["y"],
        sql="SELECT x, y FROM source ORDER BY x",
    ) as prepared:
        assert prepared.train_rows == 2_000_000


USES = {
    "frame_loader": load_frame,
    "frame_loader of Spark": load_frame_of_spark,
    "cached loader with processes": load_in_processes,
    "fit in local workers": fit_in_local_workers,
    "fit and transform on Spark": fit_on_spark,
    "query that spills": spill_query,
}


if __name__ == "__main__":
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        USES[sys.argv[3]]()
    finally:
        look()
        done.set()
        watcher.join()
    print(f"SEEN {len(seen)}")
    for one in sorted(open_to_others):
        print("OPEN", *one)
