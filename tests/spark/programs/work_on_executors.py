# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Works and fits on two executors, and asks for too many slots."""

import os

import checked_work
import cloudpickle
from checked_fit import fit
from checked_work import check, work
from driver_session import session

import farandole.spark

cloudpickle.register_pickle_by_value(checked_work)  # executors cannot import it
spark = session("local-cluster[2,1,1024]")
check(2, 2)
fit(spark, os.getcwd() + "/store")
try:
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=2)
except Exception as error:
    print(type(error).__name__, error)
spark.stop()
