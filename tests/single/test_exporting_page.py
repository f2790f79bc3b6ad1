# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fitted model is used as the page about exporting shows, without Farandole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.single.training import estimator, line, linear, write
from tests.started import blocks

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "exporting.md"


def test_the_network_its_weights_and_the_checkpoint_of_a_run_load_in_plain_torch(
    tmp_path, monkeypatch
):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    fitted = estimator(tmp_path, linear(), epochs=1, run_id="r").fit_on_parquet()
    weight = fitted.getModel().weight.detach().clone()
    names = {"fitted": fitted, "store": str(tmp_path), "run_id": "r"}
    saving, loading, checkpoint = blocks(PAGE, "python")[:3]
    exec(saving, names)
    for block in (loading, checkpoint):
        names["network"] = linear(seed=7)
        exec(block, names)
        assert torch.equal(names["network"].weight, weight)
    safetensors.save_file(fitted.getModel().state_dict(), "model.safetensors")
    assert torch.equal(safetensors.load_file("model.safetensors")["weight"], weight)
