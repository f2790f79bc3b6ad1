# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on Parquet that is already there, with local processes: no Spark session, no JVM."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import load_digits

from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

with tempfile.TemporaryDirectory() as directory:
    digits = load_digits()
    images = pa.FixedSizeListArray.from_arrays(
        pa.array((digits.data / 16).ravel(), pa.float32()), 64
    )
    Path(directory, "digits").mkdir()
    pq.write_table(
        pa.table({"features": images, "label": digits.target}), f"{directory}/digits/part-0.parquet"
    )

    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model = TorchEstimator(
        backend=LocalBackend(2),
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.001),
        loss=torch.nn.CrossEntropyLoss(),
        metrics=[lambda output, label: (output.argmax(dim=1) == label).float().mean()],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=32,
        epochs=10,
        store=LocalStore(directory, train_path=f"{directory}/digits"),
    ).fit_on_parquet()
    print(model.history_frame().to_string(index=False))
