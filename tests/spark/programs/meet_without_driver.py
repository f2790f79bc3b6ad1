# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs gangs whose driver cannot be dialled, with and without a store."""

import io
import os

import checked_work
import cloudpickle
from checked_work import fail, work
from pyspark.sql import SparkSession

import farandole.spark

cloudpickle.register_pickle_by_value(checked_work)  # executors cannot import it
spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
folder = os.getcwd()


def train(offset):
    import os
    import time

    from farandole.spark.task import report

    print("hello from", os.environ["RANK"])
    report({"step": 1})
    # The driver receives it while this still works.
    deadline = time.monotonic() + 30
    while not os.path.exists(folder + "/report_noted"):
        assert time.monotonic() < deadline, "the driver hears nothing"
        time.sleep(0.05)
    return work(offset)[:3]


def note_report(rank, record):
    assert record == {"step": 1}
    open(folder + "/report_noted", "w").close()


out = io.StringIO()
options = {"num_proc": 2, "store": folder + "/store", "stdout": out, "start_timeout": 20}
print("met", farandole.spark.run(train, (1,), on_progress=note_report, **options))
assert sorted(out.getvalue().splitlines()) == [
    f"[{rank}]<stdout>:hello from {rank}" for rank in range(2)
]
print("alone", farandole.spark.run(lambda: 7, num_proc=2, start_timeout=20))
try:
    farandole.spark.run(fail, num_proc=2)
except farandole.spark.FarandoleJobError as error:
    print("raised", type(error.__cause__).__name__, error.rank)
print("left", [name for _, _, names in os.walk(folder + "/store") for name in names])
