# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains on four executors, kills two and waits for new ones."""

import json
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
spark = session("local-cluster[4,1,1024]", executor_cores="1", **json.loads(sys.argv[1]))


def disturb():
    until(4)
    before = executors()
    for process in before[:2]:
        os.kill(process, signal.SIGKILL)
    until(2)
    until(4)
    (note / "hold").unlink()


threading.Thread(target=disturb, daemon=True).start()
found = farandole.spark.run_elastic(
    train, (str(note), 10), num_proc=4, min_num_proc=2, stderr=sys.stderr
)
print(repr(found))
