# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The name by which processes of one host know each other."""

from farandole.spark.common.util import host_hash

__all__ = ["host_hash"]
