# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Works and fits on a standalone cluster, also with a profile of resources."""

import os

import checked_work
import cloudpickle
from checked_fit import fit
from checked_work import check, work
from driver_session import session
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

import farandole.spark

cloudpickle.register_pickle_by_value(checked_work)  # executors cannot import it
spark = session(os.environ["MASTER_URL"], executor_cores="2", task_cpus="1")
check(2, 2)
fit(spark, os.getcwd() + "/store")
profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
try:
    # Two executors of two cores hold two tasks of two cores, and not a third.
    def size():
        return __import__("os").environ["WORLD_SIZE"]

    def elastic_size():
        import farandole.numpy as hvd

        hvd.init()
        return hvd.size()

    print("sizes", farandole.spark.run(size, num_proc=2, resource_profile=profile))
    print(
        "elastic", farandole.spark.run_elastic(elastic_size, num_proc=2, resource_profile=profile)
    )
    farandole.spark.run(work, args=(1,), num_proc=3, start_timeout=3, resource_profile=profile)
except Exception as error:
    print(type(error).__name__, error)
spark.stop()
