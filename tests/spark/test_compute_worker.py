# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Workers of tf.data's service in Spark's tasks, and a trainer elsewhere that they compute for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TRAINER = """
import sys

import tensorflow as tf
from farandole.tensorflow.data.compute_service import TfDataServiceConfig

config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True, timeout=200)
numbers = tf.data.Dataset.range(20).map(lambda number: number**2).send_to_data_service(config, 0, 1)
print(sorted(map(int, numbers)))
config.compute_client().shutdown()
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_tasks_compute_until_a_trainer_ends_them(tmp_path):
    config = tmp_path / "service.json"
    submit = (
        "--master local[2] --conf spark.ui.enabled=false --conf spark.driver.host=127.0.0.1 "
        "pyspark-shell"
    )
    env = {**os.environ, "PYSPARK_SUBMIT_ARGS": submit, "PYSPARK_PYTHON": sys.executable}
    env |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [
        sys.executable,
        "-m",
        "farandole.spark.tensorflow.compute_worker",
        str(config),
        "--timeout",
        "200",
    ]
    command += ["--open-to-the-network"]
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as workers:
        try:
            done = subprocess.run(
                [sys.executable, "-c", TRAINER, str(config)],
                env=env,
                capture_output=True,
                text=True,
                timeout=250,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == str([number**2 for number in range(20)])
            printed = workers.communicate(timeout=60)[0]
        finally:
            workers.kill()
    assert workers.returncode == 0, printed
    assert not config.exists()
