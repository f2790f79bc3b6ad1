# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Saving over what is there: a failure at any step leaves one whole object, the old one or the new one."""

from __future__ import annotations

import json

import pytest
import torch

from farandole.spark.common import saved
from farandole.spark.torch import TorchModel

pytestmark = pytest.mark.timeout(600)
STEPS = ("write_data", "write_metadata", "keep_only")


def model(value: float) -> TorchModel:
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.weight, value)
    return TorchModel(model=module, feature_columns=["x"], label_columns=["y"])


def weight(path: str) -> float:
    return TorchModel.read().model(torch.nn.Linear(1, 1)).load(path).getModel().weight.item()


class PowerLossError(Exception):
    pass


@pytest.mark.parametrize("by", ["_BySpark", "_ByStore"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_while_overwriting_leaves_a_whole_model(spark, tmp_path, monkeypatch, by, step, when):
    path = f"{tmp_path}/model" if by == "_BySpark" else f"memory://saved-{step}-{when}/model"
    files = getattr(saved, by)
    model(1.0).write().save(path)
    done = getattr(files, step)

    def fail(self, *given):
        if when == "after":
            done(self, *given)
        raise PowerLossError

    for old, new in ((1.0, 2.0), (None, 3.0), (None, 4.0)):
        before = weight(path) if old is None else old
        with monkeypatch.context() as patched:
            patched.setattr(files, step, fail)
            with pytest.raises(PowerLossError):
                model(new).write().overwrite().save(path)
        is_new = step == "keep_only" or (step, when) == ("write_metadata", "after")
        assert weight(path) == (new if is_new else before)
    model(5.0).write().overwrite().save(path)
    assert weight(path) == 5.0


@pytest.mark.parametrize("home", ["file", "memory"])
def test_metadata_lost_while_it_was_replaced_is_taken_from_the_data(spark, tmp_path, monkeypatch, home):
    path = f"{tmp_path}/model" if home == "file" else "memory://saved-metadata/model"
    model(1.0).write().save(path)
    files = saved._BySpark if home == "file" else saved._ByStore

    def lost(self, text):
        if home == "file":
            hadoop, where = self._hadoop("metadata")
            hadoop.delete(where, True)
        else:
            self._store.delete_all("metadata")
        raise PowerLossError

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_metadata", lost)
        with pytest.raises(PowerLossError):
            model(2.0).write().overwrite().save(path)
    assert weight(path) == 2.0
    model(3.0).write().overwrite().save(path)
    assert weight(path) == 3.0


def test_a_model_of_the_layout_before_is_read_and_replaced(spark, tmp_path):
    path = f"{tmp_path}/model"
    model(1.0).write().save(path)
    told = json.loads(spark.read.text(f"{path}/metadata").first()[0])
    assert told.pop("farandoleData") == "data"
    spark.createDataFrame([(json.dumps(told),)], "value string").write.mode("overwrite").text(f"{path}/metadata")
    rows = spark.read.parquet(f"{path}/data").where("part != 'farandole.metadata'").collect()
    spark.createDataFrame(rows, saved._DATA).write.mode("overwrite").parquet(f"{path}/data")
    assert weight(path) == 1.0
    model(2.0).write().overwrite().save(path)
    assert weight(path) == 2.0
    assert sorted(one.name for one in (tmp_path / "model").iterdir()) == ["data-2", "metadata"]
