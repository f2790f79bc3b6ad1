# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""All frameworks fit by one template, which has one backend."""

import io
import sys

import pytest
from tests.single.training import Here, estimator, line, linear, write

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalStore
from farandole.spark.common import estimator as template
from farandole.spark.keras import KerasEstimator
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator

HOOKS = (
    "_create_framework_job",
    "get_model_class",
    "_framework_fingerprint_parts",
    "_loss_output_form",
)
STEPS = (
    "fit",
    "_fit",
    "_fit_table",
    "_fit_on_parquet",
    "_open_fit_resources",
    "_train",
    "_run_job_with_retries",
)


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator, KerasEstimator])
def test_a_framework_has_all_hooks_and_no_step_of_its_own(kind):
    base = template.FarandoleEstimator
    assert [name for name in HOOKS if getattr(kind, name) is getattr(base, name)] == []
    assert [name for name in STEPS if getattr(kind, name) is not getattr(base, name)] == []
    assert kind._flavor in ("pytorch", "keras")


class FailingOnce(Here):
    """A backend whose first job fails."""

    asked = 0

    def through(self, store):  # noqa: ARG002
        self.asked += 1
        return self

    def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):  # noqa: ARG002
        if not self.runs:
            self.runs += 1
            raise FarandoleJobError("a worker is lost")
        return super().run(fn, args, kwargs)


def test_a_fit_has_one_backend_and_restarts_on_it(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    backend = FailingOnce()
    options = {"epochs": 1, "backend": backend, "on_failure": "restart", "verbose": 0}
    fitted = estimator(tmp_path, linear(), **options).fit_on_parquet()
    assert len(fitted.getHistory()) == 1
    assert (backend.asked, backend.runs) == (1, 2)


def test_a_backend_writes_to_the_stream_that_a_progress_bar_has_put_in_place(monkeypatch):
    estimated = KerasEstimator(num_proc=1, verbose=2, store=LocalStore("unused"))
    backend = estimated._get_or_create_backend()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    backend._kwargs["stdout"].write("a line of a worker")
    assert sys.stdout.getvalue() == "a line of a worker"
