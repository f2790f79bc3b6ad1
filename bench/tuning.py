# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Twenty trials over scikit-learn's digits, each a job of two ranks, by three searches.

    python bench/tuning.py [--trials 20] [--only optuna tune spark]

Prints seconds of each search, next to the same trials one after the other without warm workers:
those of Optuna and Ray Tune as functions on `LocalBackend`, those of Spark's `CrossValidator` as
fits of an estimator. The two of Spark have a process and a session each, because the second would
find a warm JVM. Their clocks start when the rows are in Spark's memory and the model and its
optimizer are made.
"""

# ruff: noqa: PLC0415 - each search loads what it needs

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch  # what a driver that trains has; its workers start warm for that
from saved import save
from sklearn.datasets import load_digits

from farandole.spark.common.backend import LocalBackend
from farandole.tuning import optimize, report

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2
EPOCHS = 5
FOLDS = 2

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = IMAGES.astype("float32") / 16
"""The digits travel with the function, because importing scikit-learn on each rank takes as long
as importing torch.
"""

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 starves beside whatever else runs
cloudpickle.register_pickle_by_value(sys.modules[__name__])
rows: dict[str, dict[str, float]] = {}
"""Seconds of a search and of its trials one after the other, cold."""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(given: dict[str, Any]) -> float:
    """Loss of a small network after some epochs over this rank's half of the digits."""
    import farandole.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    x = torch.from_numpy(IMAGES)[hvd.rank() :: hvd.size()]
    y = torch.from_numpy(LABELS)[hvd.rank() :: hvd.size()]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=given["lr"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss = torch.zeros(())
    for epoch in range(EPOCHS):
        for start in range(0, 896, 64):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(x[start : start + 64]), y[start : start + 64]
            )
            loss.backward()
            optimizer.step()
        report(epoch, loss=hvd.allreduce(loss.detach()).item())
    return hvd.allreduce(loss.detach()).item()


@contextlib.contextmanager
def timed(name: str, kind: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    rows.setdefault(name, {})[kind] = time.perf_counter() - started
    print(f"{name:<16} {kind:<8} {rows[name][kind]:>8.1f} s", flush=True)


def rates(trials: int) -> list[float]:
    return [round(float(rate), 4) for rate in np.geomspace(0.01, 1, trials)]


def one_by_one(trials: int) -> float:
    started = time.perf_counter()
    for rate in rates(trials):
        LocalBackend(RANKS, warm=False, verbose=0).run(train, ({"lr": rate},))
    return time.perf_counter() - started


def by_optuna(trials: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"lr": rates(trials)}))
    with timed("optuna", "search"):
        optimize(
            study,
            train,
            lambda trial: {"lr": trial.suggest_float("lr", 0.01, 1)},
            backend=LocalBackend(RANKS, verbose=0),
            n_trials=trials,
            slots=max(RANKS, len(os.sched_getaffinity(0))),
        )


def by_ray_tune(trials: int) -> None:
    import ray
    from farandole.ray.tune import trainable
    from ray import tune

    ray.init(
        address="local",
        num_cpus=RANKS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        with tempfile.TemporaryDirectory() as folder, timed("ray tune", "search"):
            found = tune.Tuner(
                trainable(train, RANKS),
                param_space={"lr": tune.grid_search(rates(trials))},
                tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
        assert not found.errors
    finally:
        ray.shutdown()


def by_cross_validator(trials: int) -> None:
    for kind in ("search", "one by one"):
        command = [sys.executable, __file__, "--trials", str(trials), "--spark", kind]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        rows.setdefault("cross validator", {})[kind] = float(done.stdout.split()[-1])
        print(
            f"{'cross validator':<16} {kind:<10} {rows['cross validator'][kind]:>8.1f} s",
            flush=True,
        )


def on_spark(trials: int, kind: str) -> float:
    """Seconds of a `CrossValidator`, or of its fits and evaluations one after the other, in a
    session of their own.
    """
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.linalg import Vectors
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
    from pyspark.sql import SparkSession

    from farandole.spark.common.backend import SparkBackend
    from farandole.spark.common.data.prepare import clear_training_cache
    from farandole.spark.common.store import LocalStore
    from farandole.spark.torch import TorchEstimator

    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        spark = (
            SparkSession.builder.master(f"local[{RANKS}]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", folder)
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        told = [
            (Vectors.dense(image), float(label))
            for image, label in zip(IMAGES, LABELS, strict=True)
        ]
        frame = spark.createDataFrame(told, ["features", "label"]).cache()
        frame.count()
        judge = RegressionEvaluator(labelCol="label", predictionCol="label__output")
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        estimator = TorchEstimator(
            backend=SparkBackend(RANKS, warm=None if kind == "search" else False, verbose=0),
            store=LocalStore(f"{folder}/store"),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=torch.nn.MSELoss(),
            feature_cols=["features"],
            label_cols=["label"],
            epochs=EPOCHS,
            random_seed=0,
            verbose=0,
        )
        sizes = [32 + 4 * number for number in range(trials // FOLDS)]
        validator = CrossValidator(
            estimator=estimator,
            estimatorParamMaps=ParamGridBuilder().addGrid(estimator.batch_size, sizes).build(),
            evaluator=judge,
            numFolds=FOLDS,
            seed=1,
            parallelism=2,
        )
        started = time.perf_counter()
        if kind == "search":
            validator.fit(frame)
        else:
            for fold, (part, rest) in enumerate(validator._kFold(frame)):  # noqa: SLF001 - the same folds
                for size in sizes:
                    clear_training_cache()
                    fitted = estimator.fit(part, {estimator.batch_size: size})
                    assert judge.evaluate(fitted.transform(rest)) > 0, fold
            # the search's last fit, of the best on all rows
            estimator.fit(frame, {estimator.batch_size: sizes[0]})
        took = time.perf_counter() - started
        spark.stop()
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--only",
        nargs="*",
        default=["optuna", "tune", "spark"],
        choices=["optuna", "tune", "spark"],
    )
    parser.add_argument("--spark", choices=["search", "one by one"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.spark is not None:
        print(on_spark(options.trials, options.spark))
        return
    if "optuna" in options.only:
        by_optuna(options.trials)
    if "tune" in options.only:
        by_ray_tune(options.trials)
    if {"optuna", "tune"} & set(options.only):
        alone = one_by_one(options.trials)
        for name in {"optuna", "ray tune"} & set(rows):
            rows[name]["one by one"] = alone
    if "spark" in options.only:
        by_cross_validator(options.trials)
    print(f"{'seconds':<16} {'search':>8} {'one by one':>11} {'share':>6}")
    for name, found in rows.items():
        found["share"] = found["search"] / found["one by one"]
        print(
            f"{name:<16} {found['search']:>8.1f} {found['one by one']:>11.1f} "
            f"{found['share']:>6.2f}",
            flush=True,
        )
    save("tuning", {"trials": options.trials, "rows": rows})


if __name__ == "__main__":
    main()
