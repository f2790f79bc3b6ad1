# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Variables of the driver that reach workers on Spark."""

from __future__ import annotations

import pytest

from farandole.runner.forwarded_variables import split_forwarded_variables
from farandole.spark import runner
from farandole.spark.common import SparkBackend

TAKEN = {
    "FARANDOLE_LOG": "debug",
    "HOROVOD_FUSION_THRESHOLD": "1",
    "KERAS_BACKEND": "torch",
    "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "2",
    "AWS_REGION": "here",
    "LC_ALL": "C.UTF-8",
}
LEFT = {
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_ACCESS_KEY_ID": "i",
    "FARANDOLE_SERVICE_TOKEN": "t",
    "GITHUB_TOKEN": "t",
    "HF_TOKEN": "t",
    "KERAS_MIRROR": "https://user:hidden@host/",
    "PATH": "/bin",
    "PGPASSWORD": "p",
    "WANDB_API_KEY": "w",
}


def test_settings_travel_and_secrets_and_the_rest_do_not():
    taken, left = split_forwarded_variables(
        {**TAKEN, **LEFT, "CUDA_VISIBLE_DEVICES": "3"}, (), ("CUDA_VISIBLE_DEVICES",)
    )
    assert taken == TAKEN
    assert left == sorted(LEFT)


def test_a_variable_that_the_user_names_travels_whatever_it_is():
    taken, left = split_forwarded_variables({**TAKEN, **LEFT}, ["WANDB_*", "HF_TOKEN"], ())
    assert taken == {**TAKEN, "WANDB_API_KEY": "w", "HF_TOKEN": "t"}
    assert "GITHUB_TOKEN" in left


@pytest.mark.parametrize("verbose", [1, 2])
def test_omitted_variables_are_named_without_their_values(monkeypatch, capsys, verbose):
    sent = []
    monkeypatch.setattr(runner, "run", lambda *_, env, **__: sent.append(env) or [None])
    monkeypatch.setenv("MY_SECRET", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    SparkBackend(1, verbose=verbose).run(print)
    assert "MY_SECRET" not in sent[0]
    assert "CUDA_VISIBLE_DEVICES" not in sent[0]
    assert sent[0]["NCCL_DEBUG"] == "INFO"
    told = capsys.readouterr().err
    assert ("MY_SECRET" in told) is (verbose == 2)
    assert "hidden" not in told


def test_an_environment_of_the_users_own_travels_whole(monkeypatch):
    sent = []
    monkeypatch.setattr(runner, "run", lambda *_, env, **__: sent.append(env) or [None])
    SparkBackend(1, env={"MY_SECRET": "mine"}).run(print, env={"MORE": "more"})
    assert sent == [{"MY_SECRET": "mine", "MORE": "more"}]
    with pytest.raises(TypeError, match="pass_env is a list"):
        SparkBackend(1, pass_env="WANDB_*")
