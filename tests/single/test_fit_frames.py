# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Estimators on rows that Spark does not hold, with `LocalBackend` and no JVM."""

import os
import subprocess
import sys

import pandas as pd
import pytest
import torch  # noqa: F401 - workers start warm where it is imported
from tests.programs import program_path

from farandole.data import prepare_data

pytestmark = pytest.mark.timeout(300)

SCRIPT = program_path(__file__, "fit_frames")


def test_an_estimator_fits_pandas_and_prepared_data_without_a_jvm(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "frame True",
        "parquet True 1",
        "jvm False",
        (
            "fit takes a Spark DataFrame, or a pyarrow, pandas or polars table, this is a "
            "builtins.list"
        ),
    ]


def test_a_frame_that_was_fitted_is_found_again(tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2.0], "y": [0.0, 1.0]})
    first = prepare_data(frame, tmp_path)
    assert prepare_data(frame.copy(), tmp_path).reused
    assert not prepare_data(frame.assign(a=[1.0, 3.0]), tmp_path).reused
    assert first.index == 0
