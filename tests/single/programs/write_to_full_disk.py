# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes checkpoints and prepares data on a disk that is too small for them."""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from farandole.data import prepare_data
from farandole.spark.common import Store

place = Path(sys.argv[1])
store = Store.create(str(place / "store"))
checkpoint = store.get_run_path("r") + "/checkpoint"
store.write_bytes(checkpoint, b"good")
for _ in range(2):
    try:
        store.write_text(checkpoint, "x" * (8 << 20))
    except OSError as error:
        print("checkpoint", error)
assert store.read(checkpoint) == b"good"
random = np.random.default_rng(0)
try:
    prepare_data(pa.table({f"c{n}": random.random(100_000) for n in range(10)}), store)
except OSError as error:
    print("data", error)
assert not [name for _, _, names in os.walk(place) for name in names if name == "_manifest.json"]
print(
    "left",
    sum(os.path.getsize(Path(at, name)) for at, _, names in os.walk(place) for name in names)
    < 1 << 20,
)
print("still", len(prepare_data(pa.table({"x": [1.0, 2.0]}), store).columns))
