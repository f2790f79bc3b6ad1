# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Kills executors, and waits until their fork servers are gone."""

import os
import pathlib
import signal
import time

import cloudpickle
import tests.spark.test_warm_tasks as module
from driver_session import session
from tests.spark.test_warm_tasks import begun, is_gone

import farandole.spark

cloudpickle.register_pickle_by_value(module)
spark = session("local-cluster[2,1,1024]", executor_cores="1")
first = farandole.spark.run(begun, num_proc=2, warm=True)
second = farandole.spark.run(begun, num_proc=2, warm=True)
assert all(had for had, _, _ in first + second), (first, second)
owners, servers = ({line[place] for line in first + second} for place in (1, 2))
assert len(owners) == len(servers) == 2, (first, second)
for owner in owners:
    assert b"CoarseGrainedExecutorBackend" in pathlib.Path(f"/proc/{owner}/cmdline").read_bytes()
    os.kill(owner, signal.SIGKILL)
deadline = time.monotonic() + 30
while not all(map(is_gone, servers)):
    assert time.monotonic() < deadline, servers
    time.sleep(0.05)
print("gone")
spark.stop()
