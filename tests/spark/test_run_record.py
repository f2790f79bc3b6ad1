# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Records that a real fit leaves for the run viewer, and the page that shows them."""

from __future__ import annotations

import json
import re
import urllib.request

import pyarrow as pa
import pytest
import torch

import farandole.spark
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator


def estimator(tmp_path, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    return TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], backend=LocalBackend(2, verbose=0),
        store=LocalStore(str(tmp_path)),
        run_id="mine", batch_size=4, epochs=2, verbose=0, random_seed=1, **more,
    )  # fmt: skip


def rows():
    return pa.table(
        {"x": [number / 64 for number in range(64)], "y": [number / 32 for number in range(64)]}
    )


def test_a_fit_is_recorded_and_shown(tmp_path, capfd):
    def talk(state):
        print("epoch", state.epoch, "of rank", state.rank)

    model = estimator(tmp_path, callbacks=[talk]).fit(rows(), ui=True)
    link = re.search(r"at (http://127\.0\.0\.1:\S+)", capfd.readouterr().err)
    assert link is not None
    told = json.loads((tmp_path / "runs/mine/_record.json").read_text())
    assert (told["state"], told["what"], told["model"], told["size"]) == (
        "ended",
        "TorchEstimator",
        "Sequential",
        2,
    )
    assert (told["epochs"], told["done"], told["parameters"]["batch_size"]) == (2, 2, 4)
    assert told["data"]["training rows"] == 64
    assert told["environment"]["torch"] == torch.__version__
    assert [(one["rank"], one["pid"] > 0) for one in told["ranks"]] == [(0, True), (1, True)]
    assert all(one["step_seconds"] > 0 for one in told["ranks"])
    assert told["best"]["value"] == min(entry["train"]["loss"] for entry in model.getHistory())
    for rank in range(2):
        printed = (tmp_path / f"runs/mine/output/rank.{rank}/stdout").read_text()
        assert printed == f"epoch 0 of rank {rank}\nepoch 1 of rank {rank}\n"
    with urllib.request.urlopen(
        f"{link[1]}api/output?run=0/mine&file=output/rank.1/stdout", timeout=10
    ) as answer:
        assert b"of rank 1" in answer.read()
    with urllib.request.urlopen(f"{link[1]}api/runs", timeout=10) as answer:
        (run,) = json.load(answer)["runs"]
    assert (run["name"], run["state"], run["done"]) == ("mine", "ended", 2)
    with model.show() as viewer:
        assert viewer.url.endswith("#/run/0%2Fmine")
        assert viewer.url.startswith(link[1])
        with urllib.request.urlopen(f"{link[1]}api/curves?run=0/mine", timeout=10) as answer:
            curves = json.load(answer)["runs"][0]["curves"]
    assert [one["x"] for one in curves if one["name"] == "loss" and one["of"] == "epoch"] == [
        [1.0, 2.0]
    ]


def test_a_failed_fit_says_why_in_its_record(tmp_path):
    def fail(_state):
        raise RuntimeError("no more disk")

    with pytest.raises(Exception, match="no more disk"):
        estimator(tmp_path, callbacks=[fail]).fit(rows())
    told = json.loads((tmp_path / "runs/mine/_record.json").read_text())
    assert told["state"] == "failed"
    assert "no more disk" in told["reason"]


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_function_on_spark_is_recorded_and_shown(spark, tmp_path, capfd, elastic):
    def train():
        import farandole.numpy as hvd
        from farandole.spark.task import report

        hvd.init()
        if hvd.rank() == 0:
            report(
                {"kind": "epoch", "entry": {"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}}}
            )
        return hvd.rank()

    run = farandole.spark.run_elastic if elastic else farandole.spark.run
    assert sorted(run(train, num_proc=2, ui=tmp_path, timeline=True)) == [0, 1]
    said = capfd.readouterr().err
    assert re.search(r"the run is at http://127\.0\.0\.1:\S+/#/run/0%2F\S*train-", said), said
    assert "the timeline of all ranks is timeline.json of the run" in said
    (directory,) = (tmp_path / "runs").iterdir()
    told = json.loads((directory / "_record.json").read_text())
    assert (told["state"], told["size"]) == ("ended", 2)
    assert told["what"] == ("run_elastic" if elastic else "run")
    assert [(one["rank"], one["pid"] > 0) for one in told["ranks"]] == [(0, True), (1, True)]
    history = [
        json.loads(line) for line in (directory / "logs/history.jsonl").read_text().splitlines()
    ]
    assert [entry["train"]["loss"] for entry in history] == [0.5]
    assert json.loads((directory / "timeline.json").read_text())["traceEvents"]
