# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints logs and hosts of executors, and what the links to their logs show."""

import json
import urllib.request

import cloudpickle
import epoch_reports
from epoch_reports import train
from plugged_session import plugged, until_rows

import farandole.spark

cloudpickle.register_pickle_by_value(epoch_reports)  # executors cannot import it
spark = plugged("local-cluster[2,1,1024]")
farandole.spark.run(train, args=(1,), num_proc=2)
found = until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended")
logs = {key: body for run, key, body in found if key.startswith("logs/")}
(ranks,) = [body["ranks"] for run, key, body in found if key == "ranks"]
shown = [
    urllib.request.urlopen(logs["logs/" + one["executor"]]["stderr"]).read().decode()
    for one in ranks
]
hosts = {key: body for run, key, body in found if key.startswith("host/")}
print(json.dumps([logs, hosts, [one["executor"] for one in ranks], shown]))
spark.stop()
