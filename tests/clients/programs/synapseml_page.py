# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The begin of a notebook: a session, a frame of texts, and a tiny checkpoint."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from synapseml_text import make_checkpoint

make_checkpoint(Path(sys.argv[1]) / "tiny")
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
df = spark.createDataFrame([("a good film", 1), ("the bad film", 0)] * 12, ["text", "label"])
