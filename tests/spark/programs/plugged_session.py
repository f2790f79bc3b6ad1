# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver with the plugin of Spark, and the rows of its Training tab."""

import json
import os
import time
import urllib.error
import urllib.request

from pyspark.sql import SparkSession

import farandole.spark


def plugged(master="local[2]", **settings):
    builder = SparkSession.builder.master(master).appName("plugged").config("spark.ui.port", "0")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config(
        "spark.local.dir", os.getcwd()
    )
    builder = builder.config("spark.driver.host", "127.0.0.1").config(
        "spark.driver.bindAddress", "127.0.0.1"
    )
    builder = builder.config("spark.executor.memory", "512m").config(
        "spark.sql.shuffle.partitions", "2"
    )
    builder = builder.config("spark.eventLog.enabled", "true").config(
        "spark.eventLog.dir", f"file://{os.getcwd()}/events"
    )
    builder = builder.config("spark.eventLog.compress", "false").config(
        "spark.eventLog.rolling.enabled", "false"
    )
    for name, value in settings.items():
        builder = builder.config("spark." + name.replace("_", "."), value)
    os.makedirs("events", exist_ok=True)
    spark = farandole.spark.plugin(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def ui(spark):
    return "http://127.0.0.1:" + spark.sparkContext.uiWebUrl.rpartition(":")[2]


def rows(spark):
    told = json.loads(urllib.request.urlopen(ui(spark) + "/training/rows").read())
    return [(run, key, json.loads(body)) for run, key, body in told["rows"]]


def answer(url):
    try:
        with urllib.request.urlopen(url) as told:
            return told.status, told.headers["Content-Disposition"], told.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, None, error.read().decode()


def timed(found):
    return next(run for run, key, body in found if key == "run" and "timeline" in body)


def until_rows(spark, fits, limit=20):
    deadline = time.monotonic() + limit
    while True:
        found = rows(spark)
        if any(fits(*row) for row in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
