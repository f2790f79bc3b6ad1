# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What strangers can reach, what files of strangers can do, and what outlives losses."""

from __future__ import annotations

from tests.spark.conftest import spark

__all__ = ["spark"]
