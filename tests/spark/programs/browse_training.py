# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs a training, and prints how Chromium shows it."""

import json
import os
import subprocess
import sys

import cloudpickle
import epoch_reports
from epoch_reports import train
from plugged_session import plugged, ui, until_rows

import farandole.spark

cloudpickle.register_pickle_by_value(epoch_reports)  # executors cannot import it
spark = plugged()
train.__qualname__ = sys.argv[1]
farandole.spark.run(train, args=(3,), num_proc=2)
until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended")
shown = subprocess.run(
    [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={os.getcwd()}/browser",
        "--virtual-time-budget=5000",
        "--dump-dom",
        ui(spark) + "/training/",
    ],
    check=True,
    capture_output=True,
    text=True,
    timeout=60,
)
print(json.dumps(shown.stdout))
