# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What strangers can reach, and what files of strangers can do."""

from __future__ import annotations

from tests.spark.conftest import keras_backend, spark

__all__ = ["keras_backend", "spark"]
