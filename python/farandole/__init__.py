# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Farandole: data-parallel training on Spark, on plain hosts and in notebooks.

Importing this module loads no framework and starts no thread; `farandole.torch` and `farandole.spark` load theirs.
"""

from farandole.common.exceptions import (
    FarandoleBugError,
    FarandoleEnvironmentError,
    FarandoleInternalError,
    HorovodInternalError,
)

__version__ = "0.1.0"

__all__ = [
    "FarandoleBugError",
    "FarandoleEnvironmentError",
    "FarandoleInternalError",
    "HorovodInternalError",
    "__version__",
]
