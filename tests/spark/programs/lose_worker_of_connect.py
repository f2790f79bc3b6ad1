# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on a server of Spark Connect, and kills a worker."""

import os
import signal
import sys
import threading

import cloudpickle
import elastic_training
from elastic_steps import note, until
from elastic_training import train
from pyspark.sql import SparkSession

import farandole.spark

cloudpickle.register_pickle_by_value(elastic_training)  # executors cannot import it
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()


def disturb():
    until(2)
    pids = [int(entry.name.removeprefix("pid-")) for entry in note.glob("pid-*")]
    os.kill(pids[0], signal.SIGKILL)
    until(1)
    until(2)
    (note / "hold").unlink()


threading.Thread(target=disturb, daemon=True).start()
found = farandole.spark.run_elastic(
    train, (str(note), 10), num_proc=2, min_num_proc=1, stderr=sys.stderr
)
print(repr(found))
