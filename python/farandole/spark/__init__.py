# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Farandole on Spark: run a function on every task of a gang, or fit an estimator on a DataFrame.

Importing this package imports neither pyspark nor a framework. Functions that need them import them
when called.
"""

from farandole.runner.errors import FarandoleJobError
from farandole.spark import conf
from farandole.spark.runner import run, run_elastic
from farandole.spark.shim import plugin
from farandole.spark.torch_distributor import TorchDistributor

__all__ = ["FarandoleJobError", "TorchDistributor", "conf", "plugin", "run", "run_elastic"]
