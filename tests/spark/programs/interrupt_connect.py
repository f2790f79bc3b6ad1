# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Interrupts all that its session of Spark Connect runs."""

import os
import sys
import threading

from pyspark.sql import SparkSession

import farandole.spark

folder = sys.argv[1]


def sleep():
    import os
    import time

    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    time.sleep(600)


def cancel():
    import time

    while len(os.listdir(folder)) < 2:
        time.sleep(0.05)
    spark.interruptAll()


spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
threading.Thread(target=cancel).start()
try:
    farandole.spark.run(sleep, num_proc=2)
except farandole.spark.FarandoleJobError as error:
    print("told:", error.reason)
