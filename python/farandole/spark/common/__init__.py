# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What estimators of every framework share: backends, stores, parameters, data preparation.

Names are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.spark.common.backend import Backend, LocalBackend, SparkBackend
    from farandole.spark.common.store import FilesystemStore, LocalStore, Store

_HOMES = {
    "Backend": "backend",
    "LocalBackend": "backend",
    "SparkBackend": "backend",
    "FilesystemStore": "store",
    "LocalStore": "store",
    "Store": "store",
}

__all__ = ["Backend", "FilesystemStore", "LocalBackend", "LocalStore", "SparkBackend", "Store"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
