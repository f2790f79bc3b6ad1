# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Converts a DataFrame below a directory, prints how many directories are there, and ends."""

import os
import sys

from petastorm.spark import SparkDatasetConverter, make_spark_converter
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{sys.argv[1]}")
make_spark_converter(spark.range(3))
print(len(os.listdir(sys.argv[1])))
spark.stop()
