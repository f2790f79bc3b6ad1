# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The name by which processes of one host know each other."""

from farandole.spark.common.util import host_hash

NAMESPACE_PATH = "/proc/self/ns"
"""Directory in which Linux lists the namespaces of a process."""

__all__ = ["NAMESPACE_PATH", "host_hash"]
