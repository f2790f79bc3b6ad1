# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on three executors, of which Spark decommissions one."""

import os
import signal
import sys
import threading

import cloudpickle
import elastic_training
from driver_session import session
from elastic_steps import note, until
from elastic_training import train
from executor_kills import executors

import farandole.spark

cloudpickle.register_pickle_by_value(elastic_training)  # executors cannot import it
spark = session("local-cluster[3,1,1024]", executor_cores="1", decommission_enabled="true")


def disturb():
    until(3)
    os.kill(executors()[0], signal.SIGPWR)
    until(2)
    (note / "hold").unlink()


threading.Thread(target=disturb, daemon=True).start()
found = farandole.spark.run_elastic(
    train, (str(note), 10), num_proc=3, min_num_proc=2, stderr=sys.stderr
)
print(repr(found))
