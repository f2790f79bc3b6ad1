# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs one training and one failure, and prints all that the Training tab has."""

import contextlib
import json
import sys
import urllib.request

import cloudpickle
import epoch_reports
from epoch_reports import train
from plugged_session import answer, plugged, rows, timed, ui, until_rows

import farandole.spark

cloudpickle.register_pickle_by_value(epoch_reports)  # executors cannot import it
spark = plugged()
assert not [row for row in rows(spark) if row[0]], rows(spark)
train.__qualname__ = sys.argv[1]
pids = farandole.spark.run(train, args=(3,), num_proc=2, timeline="trace.json")


def fail():
    raise KeyError("no such layer")


with contextlib.suppress(farandole.spark.FarandoleJobError):
    farandole.spark.run(fail, num_proc=2)
found = until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "failed")
page = urllib.request.urlopen(ui(spark) + "/training/")
print(
    json.dumps(
        [
            pids,
            found,
            page.read().decode(),
            dict(page.headers),
            urllib.request.urlopen(ui(spark) + "/jobs/").read().decode(),
            urllib.request.urlopen(ui(spark) + "/training/rows").read().decode(),
            json.loads(urllib.request.urlopen(ui(spark) + "/metrics/json/").read())["gauges"],
            [
                answer(ui(spark) + "/training/timeline?run=" + run)
                for run in (timed(found), "of-nobody", "../trace.json")
            ],
        ]
    )
)
spark.stop()
