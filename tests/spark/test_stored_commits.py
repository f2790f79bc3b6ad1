# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits of elastic states on Spark, where only the driver has the secret that seals them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import cloudpickle
import pytest

import farandole.spark
from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalStore
from farandole.stores import checkpoint_signatures

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("spark")]
# Workers import no test.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SECRET = "hunter2"


def commits(folder, until):
    """Returns where a job of two ranks continues from the store, and the variables in which a
    worker has the secret.
    """
    import os

    import farandole.numpy as hvd
    from farandole.common import elastic

    hvd.init()
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    state.save_to(folder, "job")

    def loop(state):
        begun = state.step
        while state.step < until:
            state.step += 1
            state.commit()
        return begun, [name for name, value in os.environ.items() if SECRET in value]

    return elastic.run_fn(loop, elastic.leave_and_join)(state)


@pytest.mark.parametrize("run", [farandole.spark.run, farandole.spark.run_elastic])
def test_commits_are_sealed_by_the_secret_of_the_driver(tmp_path, monkeypatch, run):
    run = functools.partial(run, num_proc=2, verbose=0)
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, SECRET)
    mine = str(tmp_path / "mine")
    assert run(commits, (mine, 2)) == [(0, [])] * 2
    entries = json.loads(
        (Path(mine) / "runs/job" / checkpoint_signatures.MARKER_FILENAME).read_text()
    )["checkpoints"]["checkpoint"]
    assert all("seal" in one for one in entries)
    assert LocalStore(mine).to_remote("job").read_checkpoint_to_resume() is not None, (
        "the seal is that of the driver's secret"
    )
    assert run(commits, (mine, 4)) == [(2, [])] * 2


@pytest.mark.parametrize("run", [farandole.spark.run, farandole.spark.run_elastic])
def test_commits_without_the_seal_of_the_drivers_secret_are_refused(tmp_path, monkeypatch, run):
    run = functools.partial(run, num_proc=2, verbose=0)
    monkeypatch.delenv(checkpoint_signatures.SECRET_VARIABLE, raising=False)
    assert run(commits, (str(tmp_path), 3)) == [(0, [])] * 2
    monkeypatch.setenv(checkpoint_signatures.SECRET_VARIABLE, SECRET)
    with pytest.raises(FarandoleJobError, match="no usable checkpoint"):
        run(commits, (str(tmp_path), 5))
