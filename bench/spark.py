# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The estimators' lives on Spark next to their floors: what any such job must pay on this machine,
in the same run.

The floor of a fit is two processes that import the framework at once, Spark's own
`df.write.parquet` of the same frame, and one bare barrier job; a second fit finds its data prepared
and is measured without the write. The floor of a transform is Spark's `mapInArrow` that returns its
batches, on the same frame.

    python bench/spark.py [--rows 200000] [--rounds 3] [--peers] [--only torch|keras]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLUMNS, EPOCHS, BATCH = 20, 2, 1024
TRANSFORMED = 100_000
HOROVOD = {"first fit": 17.2, "second fit": 11.1, "transform": 19.4}
"""Seconds that Horovod 0.28.1 took, recorded once on a machine of two cores."""


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def import_twice(module: str) -> None:
    """Imports a module in two processes at once."""
    both = [subprocess.Popen([sys.executable, "-c", f"import {module}"]) for _ in range(2)]
    for one in both:
        one.wait()


def resident() -> float:
    """MiB that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def same(batches: Iterator[Any]) -> Iterator[Any]:
    """Returns what it gets."""
    yield from batches


def plain(store: str) -> dict[str, Any]:
    """Returns the parameters of both estimators."""
    return {
        "feature_cols": [[f"x{index}" for index in range(COLUMNS)]],
        "label_cols": ["y"],
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "verbose": 0,
        "random_seed": 1,
        "store": store,
    }


def torch_estimator(store: str, **params: Any) -> Any:
    """A plain regression by two layers."""
    import torch  # noqa: PLC0415 - workers need only what they are sent

    from farandole.spark.torch import TorchEstimator  # noqa: PLC0415

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    known = plain(store) | {
        "num_proc": 2,
        "model": model,
        "optimizer": optimizer,
        "loss": torch.nn.MSELoss(),
    }
    return TorchEstimator(
        **{name: value for name, value in (known | params).items() if value is not None}
    )


def keras_estimator(store: str) -> Any:
    """The same by Keras, on the backend it has here."""
    import keras  # noqa: PLC0415

    from farandole.spark.keras import KerasEstimator  # noqa: PLC0415

    layers = [
        keras.Input((COLUMNS,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(1),
    ]
    optimizer = keras.optimizers.SGD(0.01)
    return KerasEstimator(
        num_proc=2, model=keras.Sequential(layers), optimizer=optimizer, loss="mse", **plain(store)
    )


def distributor_fit(rows: int) -> None:
    """The same number of steps by pyspark's TorchDistributor and DDP over Gloo, on data that
    each rank makes up.
    """
    from pyspark.ml.torch.distributor import TorchDistributor  # noqa: PLC0415

    def train(steps: int) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo")
        layers = torch.nn.Sequential(
            torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        model = torch.nn.parallel.DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x, y = torch.randn(BATCH, COLUMNS), torch.randn(BATCH, 1)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        dist.destroy_process_group()

    TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(
        train, EPOCHS * -(-rows // (2 * BATCH))
    )


def floors(spark: Any, frame: Any, scratch: str, rounds: int, module: str) -> dict[str, float]:
    """Seconds of what a fit cannot do without."""

    def write() -> None:
        frame.write.mode("overwrite").parquet(f"{scratch}/floor")

    def bare() -> None:
        spark.range(0, 2, 1, 2).mapInArrow(same, "id long", barrier=True).collect()

    bare()
    return {
        f"import {module} twice": statistics.median(
            timed(lambda: import_twice(module)) for _ in range(rounds)
        ),
        "write.parquet": statistics.median(timed(write) for _ in range(rounds)),
        "bare job": statistics.median(timed(bare) for _ in range(rounds)),
    }


class Table:
    """Measured values, row by row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def floor(self, parts: dict[str, float]) -> None:
        """Notes what a floor is made of."""
        self.rows += [
            {"what": f"floor: {name}", "seconds": seconds} for name, seconds in parts.items()
        ]

    def row(
        self, name: str, seconds: float, floor: float, above: float, peer: float | None = None
    ) -> None:
        """Notes a measurement next to its floor, and how far beyond it may be."""
        told = {
            "seconds": seconds,
            "floor": floor,
            "beyond": seconds - floor,
            "allowed": above,
            "horovod": peer,
        }
        self.rows.append({"what": name} | told)


@dataclass
class Run:
    """One framework's measurements: a session with two slots, a frame that it holds, and the
    table so far.
    """

    spark: Any
    columns: list[Any]
    frame: Any
    scratch: str
    rounds: int
    floors: dict[str, float]
    table: Table = field(default_factory=Table)

    @property
    def first(self) -> float:
        """The floor of a first fit."""
        return sum(self.floors.values())

    @property
    def again(self) -> float:
        """The floor of a fit whose data is prepared."""
        return self.first - self.floors["write.parquet"]

    def fits(self, made: Any, of: str, above: tuple[float, float]) -> Any:
        """Measures a first and later fits; returns what the first one fitted."""
        fitted: list[Any] = []
        first = timed(lambda: fitted.append(made.fit(self.frame)))
        self.table.row(f"first fit{of}", first, self.first, above[0], HOROVOD.get(f"first fit{of}"))
        later = statistics.median(timed(lambda: made.fit(self.frame)) for _ in range(self.rounds))
        self.table.row(
            f"second fit{of}", later, self.again, above[1], HOROVOD.get(f"second fit{of}")
        )
        return fitted[0]


@contextmanager
def running(rows: int, rounds: int, module: str) -> Iterator[Run]:
    """A run whose floors are measured, with a frame of so many rows."""
    from pyspark.sql import SparkSession  # noqa: PLC0415
    from pyspark.sql import functions as sf  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    columns = [
        *(sf.rand(index).alias(f"x{index}") for index in range(COLUMNS)),
        sf.rand(99).alias("y"),
    ]
    frame = spark.range(0, rows, 1, 4).select(*columns).cache()
    frame.count()
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(
            spark, columns, frame, scratch, rounds, floors(spark, frame, scratch, rounds, module)
        )
        run.table.floor(run.floors)
        yield run
    spark.stop()


def measure_torch(rows: int, rounds: int, peers: bool) -> list[dict[str, Any]]:
    """PyTorch's rows of the table."""
    from farandole.spark.common import SparkBackend  # noqa: PLC0415
    from farandole.spark.common.data.prepare import clear_training_cache  # noqa: PLC0415

    with running(rows, rounds, "torch") as run:
        frame, table, scratch = run.frame, run.table, run.scratch
        before = resident()
        fitted = run.fits(torch_estimator(f"{scratch}/store"), "", (3.0, 1.5))
        warm = torch_estimator(
            f"{scratch}/store", num_proc=None, backend=SparkBackend(2, warm=True, verbose=0)
        )
        table.row(
            "first fit with warm workers, on prepared data",
            timed(lambda: warm.fit(frame)),
            run.again,
            3.0,
        )
        second = statistics.median(timed(lambda: warm.fit(frame)) for _ in range(rounds))
        table.row("second fit with warm workers", second, run.again, 0.0, HOROVOD["second fit"])
        some = frame.limit(TRANSFORMED).repartition(2).cache()
        some.count()

        def forced(other: Any) -> Callable[[], None]:
            return lambda: other.write.format("noop").mode("overwrite").save()

        identity = forced(some.mapInArrow(same, some.schema))
        transform = forced(fitted.transform(some))
        identity()
        transform()
        least = statistics.median(timed(identity) for _ in range(rounds))
        found = statistics.median(timed(transform) for _ in range(rounds))
        table.row("transform", found, least, 1.5, HOROVOD["transform"])
        clear_training_cache()
        after_small = resident()
        large = run.spark.range(0, 20 * rows, 1, 8).select(*run.columns)
        torch_estimator(f"{scratch}/large").setEpochs(1).fit(large)
        what = "driver memory, MiB: start, after fits, after 20 x the rows"
        table.rows.append({"what": what, "mib": [before, after_small, resident()]})
        if peers:
            seconds = timed(lambda: distributor_fit(rows))
            table.rows.append(
                {"what": "TorchDistributor + DDP, as many steps, no data", "seconds": seconds}
            )
    return table.rows


def measure_keras(rows: int, rounds: int, _peers: bool) -> list[dict[str, Any]]:
    """Keras's rows of the table."""
    with running(rows, rounds, "tensorflow") as run:
        run.fits(keras_estimator(f"{run.scratch}/store"), " of Keras", (5.0, 5.0))
    return run.table.rows


def shown(table: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    print(f"{'what':58}{'s':>8}{'floor':>8}{'beyond':>8}{'at most':>8}{'Horovod':>9}")
    for one in table:
        if "mib" in one:
            print(f"{one['what']:58}" + "".join(f"{value:8.0f}" for value in one["mib"]))
            continue
        cells = [
            one["seconds"],
            one.get("floor"),
            one.get("beyond"),
            one.get("allowed"),
            one.get("horovod"),
        ]
        print(
            f"{one['what']:58}"
            + "".join(f"{value:8.2f}" if value is not None else " " * 8 for value in cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also pyspark's TorchDistributor")
    parser.add_argument("--only", choices=("torch", "keras"), help="one framework")
    options = parser.parse_args()
    if options.only is None:
        # A process each: TensorFlow and torch's compiler do not go together in one.
        for name in ("torch", "keras"):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name], check=True)
        return
    if options.only == "keras":
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    measure = {"torch": measure_torch, "keras": measure_keras}[options.only]
    table = measure(options.rows, options.rounds, options.peers)
    shown(table)
    save(
        "spark" if options.only == "torch" else "spark_keras",
        {"rows": options.rows, "table": table},
    )


if __name__ == "__main__":
    main()
