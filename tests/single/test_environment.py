# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What of a driver's environment goes into Spark's closure."""

from __future__ import annotations

import io

from farandole.spark import runner
from farandole.spark.common import SparkBackend
from farandole.spark.environment import handed_on


def test_what_trains_is_told_goes_and_secrets_and_all_else_stay():
    goes = {"OMP_NUM_THREADS": "2", "PATH": "/bin", "FARANDOLE_CYCLE_TIME": "1", "PYTHONPATH": "/x", "TZ": "UTC"}
    stays = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "DATABASE_URL": "postgres://me:s@db",
        "FARANDOLE_STORE_SECRET": "s",
        "HF_TOKEN": "s",
        "MY_OWN": "s",
        "TF_API_KEY": "s",
    }
    own = {"CUDA_VISIBLE_DEVICES": "0", "PYSPARK_GATEWAY_SECRET": "s"}
    assert handed_on(goes | stays | own) == (goes, sorted(stays))
    assert "TOKENIZERS_PARALLELISM" in handed_on({"TOKENIZERS_PARALLELISM": "false"})[0]


def test_the_closure_of_a_backend_holds_no_secret_and_what_stays_is_said(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    sent = {}
    monkeypatch.setattr(runner, "run_with", lambda *_, **told: sent.update(told) or [])
    said = io.StringIO()
    SparkBackend(1, verbose=2, stderr=said).run(print, env={"GIVEN": "1"})
    assert sent["env"]["OMP_NUM_THREADS"] == "3"
    assert sent["env"]["GIVEN"] == "1"
    assert "hunter2" not in repr(sent)
    assert "MY_PASSWORD" in said.getvalue()
    assert "hunter2" not in said.getvalue()
    said.truncate(0)
    SparkBackend(1, stderr=said).run(print)
    assert "MY_PASSWORD" not in said.getvalue()
    SparkBackend(1, env={"MY_PASSWORD": "asked for"}).run(print)
    assert sent["env"] == {"MY_PASSWORD": "asked for"}
