# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The code of the pages preparing-data.md and reading-data.md runs, with the names that a reader
has defined before.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.pages import blocks_of

PREPARING = {
    0: """
import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from farandole.spark.common import LocalBackend, Store
from farandole.spark.torch import TorchEstimator

rng = np.random.default_rng(0)
income = rng.uniform(0, 100, 200)
rows = {"age": rng.integers(20, 80, 200), "income": income, "port": ["S", "C"] * 100,
    "bought": income / 100}
pa.csv.write_csv(pa.table(rows), "2024-01.csv")
network = torch.nn.Bilinear(1, 1, 1)
estimator = TorchEstimator(
    model=network, optimizer=torch.optim.SGD(network.parameters(), lr=1e-6),
    loss=torch.nn.MSELoss(), epochs=1,
    feature_cols=["age", "income"], label_cols=["bought"], validation="split",
    input_shapes=[[-1, 1], [-1, 1]],
    store=Store.create("farandole"), backend=LocalBackend(1), batch_size=32, verbose=0,
)
""",
    1: """
import pathlib
import pyarrow.parquet

pathlib.Path("rows").mkdir()
made = {"id": range(200), "a": rng.random(200), "b": rng.random(200), "y": rng.integers(-1, 2, 200)}
pa.parquet.write_table(pa.table(made), "rows/part-0.parquet")
names = pa.table({"id": range(0, 200, 2), "w": rng.random(100)})
""",
    2: """
pa.csv.write_csv(
    pa.table({
        "sex": ["male", "female"] * 100, "port": ["S", "C", "Q", "S"] * 50,
        "age": [28.0, None, 20.0, 40.0] * 50, "fare": [32.0, 8.0] * 100,
        "survived": ["no", "yes"] * 100,
    }),
    "passengers.csv",
)
""",
    3: """
assert data.categories == {"sex": ["female", "male"], "port": ["C", "Q", "S"],
    "survived": ["no", "yes"]}
assert data.fill["port"] == "S"
table = pa.table({"tokens": [[1] * (1 + row % 90) for row in range(200)],
    "kind": [row % 2 for row in range(200)]})
lengths = set()
""",
    4: """
    lengths.add(batch["tokens"].shape[1])
assert lengths == {128}
pa.csv.write_csv(pa.table(rows), "tomorrow.csv")
""",
}

READING = {
    0: """
import io
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from farandole.data import Pad, SqlExpressions, StreamLoader, prepare_data

def write(name, **columns):
    pq.write_table(pa.table(columns), f"{name}.parquet", row_group_size=256)
    return f"{name}.parquet"

number = np.arange(4096)
train = write("train", features=number.astype("float32"), label=number % 2)
""",
    2: """
        assert set(batch) == {"features", "label"}
prepared = pa.table({"tokens": [[1] * (1 + row % 9) for row in range(512)], "label": [row % 2 for row in range(512)]})
path = prepare_data(prepared, "store", label_cols=["label"], ragged={"tokens": Pad()}).train_url
web, books = write("web", x=number), write("books", x=number)
""",  # noqa: E501
    4: """
assert {batch["x"].shape for batch in loader} == {(64,)}

class Topic:
    def read(self, offset):
        return range(offset, 1 << 20)

topic = Topic()

def to_record_batch(message):
    return pa.record_batch({"x": [float(message)], "y": [message]})
""",
    5: """
assert next(iter(loader))["y"].shape == (256,)
path = write("numbers", x=number.astype("float32"), label=number % 2)
""",
    6: """
assert max(batch["x"].max() for batch in loader) == np.float32(4095 / 255)
path = write("texts", text=[f"row {row}" for row in range(512)], label=number[:512] % 2)

def tokenizer(texts):
    return np.array([[len(text), 1] for text in texts])
""",
    7: """
assert next(iter(loader))["tokens"].shape == (256, 2)
path = write("ages", age=number.astype("float64"), label=number % 2)
""",
    8: """
assert sum(len(batch["age"]) for batch in loader) == 4095
import PIL.Image

def photo(row):
    held = io.BytesIO()
    PIL.Image.new("RGB", (300, 280), (row % 256, 0, 0)).save(held, "PNG")
    return held.getvalue()

path = write("photos", photo=[photo(row) for row in range(64)], label=number[:64] % 2)
""",
    9: """
assert next(iter(loader))["photo"].shape == (64, 3, 224, 224)
""",
}

PLACES = {
    '"/raw/2024-*.csv"': '"2024-*.csv"',
    '"/raw/*.csv"': '"2024-*.csv"',
    "/raw/": "",
    '"s3://bucket/farandole"': '"farandole"',
    '"/data/farandole"': '"farandole"',
    '"s3://bucket/train"': "train",
}
"""Names in the pages, and their values here."""


@pytest.mark.parametrize(
    ("page", "before"), [("preparing-data.md", PREPARING), ("reading-data.md", READING)]
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, before, tmp_path):
    blocks = [block for block in blocks_of(f"docs/user-guide/{page}") if block.kind == "python"]
    pieces = [
        piece
        for block in blocks
        if block.why_not is None
        for piece in (before.get(block.number, ""), block.text)
    ]
    script = "\n".join([*pieces, before.get(len(blocks), "")])
    for place, here in PLACES.items():
        script = script.replace(place, here)
    (tmp_path / "page.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
