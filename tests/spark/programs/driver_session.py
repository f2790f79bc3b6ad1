# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The session of a driver."""

import os
import sys  # noqa: F401 - for drivers whose text follows this one

from pyspark.sql import SparkSession

import farandole.spark  # noqa: F401


def session(master, **settings):
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config(
        "spark.local.dir", os.getcwd()
    )
    builder = builder.config("spark.driver.host", "127.0.0.1").config(
        "spark.driver.bindAddress", "127.0.0.1"
    )
    builder = builder.config("spark.executor.memory", "512m").config(
        "spark.sql.shuffle.partitions", "2"
    )
    for name, value in settings.items():
        builder = builder.config("spark." + name.replace("_", "."), value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
