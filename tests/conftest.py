# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures of all tests."""

import signal

import pytest

# A shell starts what it puts into the background deaf to Ctrl-C, and every child inherits that; the
# tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow, whose runs are files of the test. It forgets store and experiment afterwards: they
    are global, and the next test has other files.
    """
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    # a database would need packages of its own
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # it loads a logged model once more, to list packages
    monkeypatch.setenv("MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT", "1")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", None)
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    mlflow.set_experiment("farandole")
    return mlflow
