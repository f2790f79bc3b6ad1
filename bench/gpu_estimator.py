# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An estimator whose GPU takes a million rows a second: what the reader feeds it, next to rows that
lie on the GPU.

The model holds the GPU for three quarters of the time that a batch has at that rate, so a reader
with that rate keeps the GPU waiting for less than the rest of the time. On a CPU it holds nothing,
which shows that the measurement works.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

if TYPE_CHECKING:
    from collections.abc import Callable

GOAL = 1_000_000
"""Rows a second."""
COLUMNS, BATCH, FILES, EPOCHS = 20, 8192, 8, 3
BUSY = 0.75
"""Share of a batch's time that the model itself takes."""


def write(folder: Path, rows: int) -> None:
    """Parquet of 20 floats a row and a label."""
    folder.mkdir()
    random = np.random.default_rng(3)
    for number in range(FILES):
        count = rows // FILES
        names = [*(f"x{index}" for index in range(COLUMNS)), "y"]
        table = pa.table({name: random.standard_normal(count, dtype=np.float32) for name in names})
        pq.write_table(table, folder / f"part-{number}.parquet")


def cycles_of(seconds: float) -> int:
    """Returns the number of GPU cycles in a duration."""
    told = 100_000_000
    times: list[float] = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(told)  # noqa: SLF001
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return int(told * seconds / min(times))


def busy_model(cycles: int) -> torch.nn.Module:
    """Two layers, and so many cycles of a GPU that do nothing. Of a class that workers get with
    it.
    """

    class Busy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(COLUMNS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if rows.is_cuda:
                torch.cuda._sleep(cycles)  # noqa: SLF001
            return self.layers(rows)

    return Busy()


def resident(model: torch.nn.Module, device: str, steps: int) -> float:
    """Rows a second of torch's own loop over one batch that lies on the device."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows, labels = torch.randn(BATCH, COLUMNS, device=device), torch.randn(BATCH, 1, device=device)
    settle: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(rows), labels).backward()
            optimizer.step()
        settle()
        return time.perf_counter() - began

    run(3)
    return steps * BATCH / run(steps)


def measure(device: str, rows: int) -> dict[str, Any]:
    """Rows a second of a fit after its first epoch, and of torch without a reader."""
    model = busy_model(cycles_of(BUSY * BATCH / GOAL) if device == "cuda" else 0)
    with tempfile.TemporaryDirectory(prefix="farandole-gpu-check-") as folder:
        write(Path(folder, "rows"), rows)
        estimator = TorchEstimator(
            backend=LocalBackend(1),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=torch.nn.MSELoss(),
            feature_cols=[[f"x{index}" for index in range(COLUMNS)]],
            label_cols=["y"],
            batch_size=BATCH,
            epochs=EPOCHS,
            use_gpu=device == "cuda",
            verbose=0,
            random_seed=1,
            store=LocalStore(folder, train_path=f"{folder}/rows"),
        )
        history = estimator.fit_on_parquet().getHistory()
    speeds = [entry["rows"] / entry["seconds"] for entry in history[1:]]
    steps = max(10, rows // BATCH // 4)
    return {
        "fed": statistics.median(speeds),
        "resident": resident(model, device, steps),
        "epochs": len(history),
    }
