# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Memory of a driver whose estimator fits more rows than fit in it: the same fit of few rows and of
many.

Executors are processes of their own, so that what the driver's Python and its JVM hold is the
driver's alone.

    python bench/spark_rows.py [--rows 100000000] [--few 1000000] [--partitions 64]

Prints rows per second of the preparation and of the training, and the most MiB that the driver's
two processes held.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from saved import save

if TYPE_CHECKING:
    from types import TracebackType

BATCH = 65_536


def resident(pid: int) -> float:
    """MiB that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Watch(threading.Thread):
    """The most that some processes hold meanwhile.

    Args:
        **pids: by name.
    """

    def __init__(self, **pids: int) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(pids, 0.0)
        self._pids = pids
        self._over = threading.Event()

    def run(self) -> None:
        """Looks every tenth of a second."""
        while not self._over.wait(0.1):
            self.most = {
                name: max(self.most[name], resident(pid)) for name, pid in self._pids.items()
            }

    def __enter__(self) -> Self:
        """Begins to look."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Looks no more."""
        self._over.set()
        self.join()


def session(scratch: str) -> Any:
    """A session with two executors of one core."""
    # Executors of a local cluster always work inside Spark's home, so it is a directory of links,
    # which is deleted with the rest.
    import pyspark  # noqa: PLC0415 - as above
    from pyspark.sql import SparkSession  # noqa: PLC0415 - after the environment is set

    home = Path(scratch) / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__path__[0]).iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(home)
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executor.memory", "1g")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", scratch)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def fitted(spark: Any, store: str, rows: int, partitions: int) -> dict[str, Any]:
    """Fits a line over so many rows of two columns; the history's entry, and seconds of all of
    it.
    """
    import torch  # noqa: PLC0415 - as above
    from pyspark.sql import functions as sf  # noqa: PLC0415 - as above

    from farandole.spark.common import SparkBackend  # noqa: PLC0415 - as above
    from farandole.spark.torch import TorchEstimator  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    x = (sf.col("id") % 1000 / 1000).cast("float")
    frame = spark.range(0, rows, 1, partitions).select(
        x.alias("x"), (2 * x + 1).cast("float").alias("y")
    )
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=1,
        partitions_per_process=partitions,
        verbose=0,
        backend=SparkBackend(2, verbose=0),
        store=store,
    )
    began = time.monotonic()
    (entry,) = estimator.fit(frame).getHistory()
    return {
        "rows": entry["rows"],
        "seconds": time.monotonic() - began,
        "training": entry["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--few", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=64)
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    scratch = tempfile.mkdtemp(prefix="farandole-rows-")
    table = []
    try:
        spark = session(scratch)
        jvm = spark.sparkContext._gateway.proc.pid  # noqa: SLF001 - pyspark has no other door
        fitted(spark, f"{scratch}/first", 100_000, 2)  # what is loaded once is loaded
        print(
            f"{'rows':>12} {'seconds':>8} {'training':>9} {'rows/s':>12} {'python MiB':>11} "
            f"{'jvm MiB':>8}"
        )
        for rows in (options.few, options.rows):
            with Watch(python=os.getpid(), jvm=jvm) as watch:
                told = fitted(spark, f"{scratch}/{rows}", rows, options.partitions)
            shutil.rmtree(f"{scratch}/{rows}")
            table.append(told | watch.most)
            speed = told["rows"] / told["seconds"]
            sizes = f"{watch.most['python']:>11.0f} {watch.most['jvm']:>8.0f}"
            print(
                f"{told['rows']:>12,} {told['seconds']:>8.1f} {told['training']:>9.1f} "
                f"{speed:>12,.0f} {sizes}"
            )
        spark.stop()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    save("spark_rows", {"table": table})


if __name__ == "__main__":
    main()
