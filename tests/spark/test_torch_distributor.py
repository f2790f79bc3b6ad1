# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Loaders of frames in the processes of pyspark's `TorchDistributor`."""

from __future__ import annotations

import json
import sys

import pytest
from pyspark import cloudpickle
from pyspark.ml.torch.distributor import TorchDistributor

from farandole.data import frame_loader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# with Spark's own copy, as the distributor does
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 101


def train(loader, folder):
    """Writes the rows that a rank sees in two epochs, and returns the size of the world."""
    import torch

    torch.distributed.init_process_group("gloo")
    loader.follow_world()
    epochs = [[row for batch in loader for row in batch["id"].tolist()] for _ in range(2)]
    (folder / f"{loader.rank}.json").write_text(json.dumps(epochs))
    size = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    return size


def test_the_processes_of_a_torch_distributor_read_every_row_of_a_frame_once(spark, tmp_path):
    frame = spark.range(ROWS).selectExpr("id", "id / 4 as x").repartition(3)
    loader = frame_loader(frame, 10, ["id", "x"], cache=tmp_path / "cache", framework="torch")
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    assert distributor.run(train, loader, tmp_path) == 2
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        assert sorted(row for rank in ranks for row in rank[epoch]) == list(range(ROWS))
    assert all(len(rank[0]) >= ROWS // 2 for rank in ranks), "each has its share"
    assert ranks[0][0] != ranks[0][1], "each epoch has its own order"
