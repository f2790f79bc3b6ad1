# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The estimator's life on Spark next to its floors: what any such job must pay on this machine, in the same run.

The floor of a fit is two processes that import torch at once, Spark's own `df.write.parquet` of the same frame, and
one bare barrier job. The floor of a transform is Spark's `mapInArrow` that returns its batches, on the same frame.

    python bench/spark.py [--rows 200000] [--rounds 3] [--peers]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLUMNS, EPOCHS, BATCH = 20, 2, 1024
TRANSFORMED = 100_000
RESULTS = Path(__file__).parent / "results"
HOROVOD = {"first fit": 17.2, "second fit": 11.1, "transform": 19.4}
"""Seconds that Horovod 0.28.1 took, recorded once on a machine of two cores."""


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def import_twice() -> None:
    """Imports torch in two processes at once."""
    both = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
    for one in both:
        one.wait()


def resident() -> float:
    """MiB that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def same(batches: Iterator[Any]) -> Iterator[Any]:
    """Returns what it gets."""
    yield from batches


def network() -> Any:
    """Two layers."""
    import torch  # noqa: PLC0415 - workers need only what they are sent

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def estimator(store: str) -> Any:
    """A plain regression."""
    import torch  # noqa: PLC0415

    from farandole.spark.torch import TorchEstimator  # noqa: PLC0415

    model = network()
    return TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=[[f"x{index}" for index in range(COLUMNS)]],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        random_seed=1,
        store=store,
    )


def distributor_fit(rows: int) -> None:
    """The same number of steps by pyspark's TorchDistributor and DDP over Gloo, on data that each rank makes up."""
    from pyspark.ml.torch.distributor import TorchDistributor  # noqa: PLC0415

    def train(steps: int) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
        layers = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        model = torch.nn.parallel.DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = torch.randn(BATCH, COLUMNS), torch.randn(BATCH, 1)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        dist.destroy_process_group()

    TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, EPOCHS * -(-rows // (2 * BATCH)))


def floors(spark: Any, frame: Any, scratch: str, rounds: int) -> dict[str, float]:
    """Seconds of what a fit cannot do without."""

    def write() -> None:
        frame.write.mode("overwrite").parquet(f"{scratch}/floor")

    def bare() -> None:
        spark.range(0, 2, 1, 2).mapInArrow(same, "id long", barrier=True).collect()

    bare()
    return {
        "import torch twice": statistics.median(timed(import_twice) for _ in range(rounds)),
        "write.parquet": statistics.median(timed(write) for _ in range(rounds)),
        "bare job": statistics.median(timed(bare) for _ in range(rounds)),
    }


def measure(rows: int, rounds: int, peers: bool) -> list[dict[str, Any]]:
    """All rows of the table."""
    from pyspark.sql import SparkSession  # noqa: PLC0415
    from pyspark.sql import functions as sf  # noqa: PLC0415

    from farandole.spark.common.prepare import clear_training_cache  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    numbers = [sf.rand(index).alias(f"x{index}") for index in range(COLUMNS)]
    frame = spark.range(0, rows, 1, 4).select(*numbers, sf.rand(99).alias("y")).cache()
    frame.count()
    table: list[dict[str, Any]] = []

    def row(name: str, seconds: float, floor: float, above: float) -> None:
        table.append(
            {
                "what": name,
                "seconds": seconds,
                "floor": floor,
                "beyond": seconds - floor,
                "allowed": above,
                "horovod": HOROVOD.get(name),
            }
        )

    with tempfile.TemporaryDirectory() as scratch:
        parts = floors(spark, frame, scratch, rounds)
        for name, seconds in parts.items():
            table.append({"what": f"floor: {name}", "seconds": seconds})
        floor = sum(parts.values())
        before = resident()
        made = estimator(f"{scratch}/store")
        fits: list[Any] = []
        row("first fit", timed(lambda: fits.append(made.fit(frame))), floor, 3.0)
        row(
            "second fit",
            min(timed(lambda: made.fit(frame)) for _ in range(rounds)),
            floor - parts["write.parquet"],
            1.5,
        )
        model = fits[0]
        some = frame.limit(TRANSFORMED).repartition(2).cache()
        some.count()

        def forced(other: Any) -> Callable[[], None]:
            return lambda: other.write.format("noop").mode("overwrite").save()

        identity = forced(some.mapInArrow(same, some.schema))
        transform = forced(model.transform(some))
        identity()
        transform()
        row(
            "transform",
            statistics.median(timed(transform) for _ in range(rounds)),
            statistics.median(timed(identity) for _ in range(rounds)),
            1.5,
        )
        clear_training_cache()
        after_small = resident()
        large = spark.range(0, 20 * rows, 1, 8).select(*numbers, sf.rand(99).alias("y"))
        estimator(f"{scratch}/large").setEpochs(1).fit(large)
        table.append(
            {
                "what": "driver memory, MiB: start, after fits, after 20 x the rows",
                "mib": [before, after_small, resident()],
            }
        )
        if peers:
            table.append(
                {
                    "what": "TorchDistributor + DDP, as many steps, no data",
                    "seconds": timed(lambda: distributor_fit(rows)),
                }
            )
    spark.stop()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also pyspark's TorchDistributor")
    options = parser.parse_args()
    table = measure(options.rows, options.rounds, options.peers)
    print(f"{'what':58}{'s':>8}{'floor':>8}{'beyond':>8}{'at most':>8}{'Horovod':>9}")
    for one in table:
        if "mib" in one:
            print(f"{one['what']:58}" + "".join(f"{value:8.0f}" for value in one["mib"]))
            continue
        cells = [one["seconds"], one.get("floor"), one.get("beyond"), one.get("allowed"), one.get("horovod")]
        print(f"{one['what']:58}" + "".join(f"{value:8.2f}" if value is not None else " " * 8 for value in cells))
    RESULTS.mkdir(exist_ok=True)
    told = {"machine": platform.platform(), "cores": os.cpu_count(), "rows": options.rows, "table": table}
    (RESULTS / "spark.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
