# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Databricks' names for running a function on all ranks: `HorovodRunner` and its log functions.

Databricks' runtimes contained this package until version 16. Importing it imports neither pyspark
nor a framework.
"""

from sparkdl.horovod.runner_base import HorovodRunner

__all__ = ["HorovodRunner"]
