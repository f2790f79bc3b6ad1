# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits in float16 train what a plain loop trains that computes the same parts of each step.

Rounding to float16 depends on the rows that are computed together, and so does an overflow, after
which a step is skipped. So the plain loop computes the parts of all processes one after another.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.torch import TorchEstimator

GLOBAL_BATCH_ROWS = 12
EPOCHS = 2
LEARNING_RATE = 0.05


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train_plainly(x, y, size, passes, clip):
    """Returns the parameters, and whether a step was skipped."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu")
    first_scale = scaler.get_scale()
    pass_rows = GLOBAL_BATCH_ROWS // passes
    for _ in range(EPOCHS):
        for rows in torch.arange(len(x)).split(GLOBAL_BATCH_ROWS):
            optimizer.zero_grad()
            for batch in rows.split(pass_rows):
                for part in (batch[rank::size] for rank in range(size)):
                    if len(part):
                        with torch.autocast("cpu", torch.float16):
                            loss = (model(x[part]) - y[part]).square().sum() / len(rows)
                        scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return model, scaler.get_scale() < first_scale


@pytest.mark.parametrize(
    ("size", "passes", "rows", "clip"),
    [
        pytest.param(*spread, rows, clip, marks=() if rows == 25 and not clip else pytest.mark.slow)
        for spread in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
        for rows in (24, 25, 29)
        for clip in (None, 0.5)
    ],
)
def test_a_fit_in_float16_trains_what_a_loop_over_its_parts_trains(
    size, passes, rows, clip, gangs, tmp_path
):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 3)).astype("float32")
    y = 3 * draw.normal(size=rows).astype("float32")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": list(x), "y": y}), path)
    wanted, skips = train_plainly(
        torch.from_numpy(x), torch.from_numpy(y).reshape(-1, 1), size, passes, clip
    )
    assert skips, "no step overflows, so nothing shows that all processes skip it"
    model = network()
    fitted = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / size),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=GLOBAL_BATCH_ROWS // (size * passes),
        backward_passes_per_step=passes,
        gradient_clip_norm=clip,
        precision="fp16",
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        backend=gangs(size),
        store=str(tmp_path / "store"),
    ).fit_on_parquet(path=str(path))
    for one, other in zip(fitted.getModel().parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
