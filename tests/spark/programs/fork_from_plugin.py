# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints the fork servers that executors had started before the first job, and after."""

import json
import os
import pathlib
import sys
import time

import cloudpickle
import tests.spark.test_warm_tasks as module
from plugged_session import plugged
from tests.spark.test_warm_tasks import begun

import farandole.spark

cloudpickle.register_pickle_by_value(module)
spark = plugged(sys.argv[1], farandole_warmWorkers="true")


def servers():
    locks = pathlib.Path(os.environ["TMPDIR"]).glob("farandole-*/warm-*.lock")
    return {lock.stem: int(lock.read_text().split()[0]) for lock in locks if lock.read_text()}


deadline = time.monotonic() + 60
while len(before := servers()) < int(sys.argv[2]):
    assert time.monotonic() < deadline, before
    time.sleep(0.1)
found = farandole.spark.run(begun, num_proc=2, warm=True)
print(json.dumps([before, servers(), found]))
spark.stop()
