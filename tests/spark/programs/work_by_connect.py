# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Works and fits on a server of Spark Connect, and asks for too many slots."""

import os

import checked_work
import cloudpickle
from checked_fit import fit
from checked_work import check, work
from pyspark.sql import SparkSession

import farandole.spark

cloudpickle.register_pickle_by_value(checked_work)  # executors cannot import it
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect")
check(2, 2)
fit(spark, os.getcwd() + "/store")
try:
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=3)
except Exception as error:
    print(type(error).__name__, error)
