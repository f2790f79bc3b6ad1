# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Kills an executor whose rank sleeps."""

import os
import sys
import threading
import time

from driver_session import session
from executor_kills import kill_one

import farandole.spark

folder = sys.argv[1]
spark = session("local-cluster[2,1,1024]", executor_cores="1")


def sleep():
    import os
    import time

    if len(os.listdir(folder)) >= 2:
        return "second time"
    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    time.sleep(600)
    return None


def kill():
    while len(os.listdir(folder)) < 2:
        time.sleep(0.02)
    kill_one()


threading.Thread(target=kill).start()
print(farandole.spark.run(sleep, num_proc=2))
spark.stop()
