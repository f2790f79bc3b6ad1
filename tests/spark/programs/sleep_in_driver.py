# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs ranks that sleep with a child each."""

import sys

from driver_session import session

import farandole.spark

folder = sys.argv[1]
spark = session(sys.argv[2])


def sleep():
    import os
    import subprocess
    import time

    child = subprocess.Popen(["sleep", "600"])
    for pid in (child.pid, os.getpid()):
        os.close(os.open(os.path.join(folder, str(pid)), os.O_CREAT))
    time.sleep(600)


farandole.spark.run(sleep, num_proc=2)
