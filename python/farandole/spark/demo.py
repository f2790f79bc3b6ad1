# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The function of `farandole demo`: a first fit with the installed packages, on data that it
generates.

With a Java it trains on Spark `local[2]`, otherwise on two processes of this host. `TorchEstimator`
does both. `examples/spark_torch_digits.py` has nearly the same estimator as a script to read and
change, with `transform` and a saved model. The command cannot run that file, because it must work
without a checkout.
"""

# ruff: noqa: T201 - the demo prints its results

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from pyspark.sql import SparkSession

_EXTRA_BY_MODULE: Final = {
    "torch": "torch",
    "pyspark": "spark",
    "pyarrow": "spark",
    "pandas": "spark",
}
"""Modules, and the extra that installs each."""
_ROW_COUNT: Final = 2000
_CLASS_COUNT: Final = 10
_PIXEL_COUNT: Final = 64
_NOISE_DEVIATION: Final = 2.0
"""Standard deviation of the noise on the pixels. The distance between two classes is about 11."""


def main(arguments: Sequence[str]) -> int:
    """Trains, and prints the history, the paths of the run and how to see it in the browser.

    Args:
        arguments: The path of the store, then `local` if Spark shall not be started.

    Returns:
        The exit status; 1 if a package is missing, with a message that names the extras that
        install it.
    """
    missing = [name for name in _EXTRA_BY_MODULE if find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(_EXTRA_BY_MODULE[name] for name in missing))
        print(
            f"farandole: the demo needs {', '.join(missing)}: pip install 'farandole[{extras}]'",
            file=sys.stderr,
        )
        return 1
    store, local = arguments[0], "local" in arguments[1:] or not _has_java()
    _train_and_report(store, local=local)
    command = (
        "farandole"
        if shutil.which("farandole")
        else f"{os.path.relpath(sys.executable)} -m farandole"
    )
    print(f"see the run in the browser: {command} ui {shlex.quote(store)}")
    return 0


def _has_java() -> bool:
    """Returns whether Spark can be started here."""
    home = os.environ.get("JAVA_HOME")  # where it is set, Spark looks nowhere else
    return shutil.which(f"{home}/bin/java" if home else "java") is not None


def _generate_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures of 8 by 8 pixels, each the picture of its class with noise, and their classes.
    Always the same.
    """
    import numpy as np  # noqa: PLC0415 - `main` checks the installed packages first

    random = np.random.default_rng(1)
    classes = random.integers(_CLASS_COUNT, size=_ROW_COUNT)
    pictures = random.normal(size=(_CLASS_COUNT, _PIXEL_COUNT))
    return (
        pictures[classes] + random.normal(scale=_NOISE_DEVIATION, size=(_ROW_COUNT, _PIXEL_COUNT))
    ).astype(np.float32), classes


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns the share of rows whose largest output belongs to their class.

    Args:
        output: One number for each class, by row.
        label: The class of each row.
    """
    return (output.argmax(dim=1) == label).float().mean()


def _start_local_spark() -> SparkSession | None:
    """Returns a session of Spark on this host with two slots; `None`, with a message, if Spark
    cannot start.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config(
        "spark.ui.showConsoleProgress", "false"
    )
    try:
        session = builder.getOrCreate()
    except Exception as error:  # noqa: BLE001 - an old Java, for example; the first fit needs no Spark
        print(f"farandole: Spark did not start: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    session.sparkContext.setLogLevel("ERROR")
    return session


def _train_and_report(path: str, *, local: bool) -> None:
    """Fits a network with two processes, and prints the result."""
    import pyarrow as pa  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from farandole.spark.common import LocalBackend  # noqa: PLC0415
    from farandole.spark.torch import TorchEstimator  # noqa: PLC0415

    features, classes = _generate_digits()
    session = None if local else _start_local_spark()
    local = session is None
    if session is None:
        print("training on two processes of this host, without Spark", flush=True)
        flat = pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), _PIXEL_COUNT)
        frame = pa.table({"features": flat, "label": classes})
    else:
        print(f"training on Spark {session.version}, local[2]", flush=True)
        rows = list(zip(features.tolist(), classes.tolist(), strict=True))
        frame = session.createDataFrame(rows, "features array<float>, label long")
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(_PIXEL_COUNT, 128), torch.nn.ReLU(), torch.nn.Linear(128, _CLASS_COUNT)
    )
    fitted = TorchEstimator(
        num_proc=None if local else 2,
        backend=LocalBackend(2) if local else None,
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.001),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[accuracy],
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.2,
        batch_size=32,
        epochs=10,
        random_seed=1,
        store=path,
    ).fit(frame)
    print(fitted.history_frame().to_string(index=False))
    for name, location in fitted.getPaths().items():
        print(f"{name:16}{location}")
    if session is not None:
        session.stop()
