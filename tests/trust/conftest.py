# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fixtures for tests of ports that strangers can reach, files of strangers, and data that
survives losses.
"""

from __future__ import annotations

from tests.spark.conftest import spark
from tests.storage.conftest import azure_options, gcs_options, hdfs, prefix, s3_options

__all__ = ["azure_options", "gcs_options", "hdfs", "prefix", "s3_options", "spark"]
