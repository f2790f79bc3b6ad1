# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Shared parts of all estimators: backends, stores, parameters, data preparation.

Names are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.spark.common.backend import Backend, LocalBackend, SparkBackend
    from farandole.spark.common.store import (
        AbstractFilesystemStore,
        DBFSLocalStore,
        FilesystemStore,
        HDFSStore,
        LocalStore,
        ObjectStore,
        Store,
    )

_HOMES = {
    "Backend": "backend",
    "LocalBackend": "backend",
    "SparkBackend": "backend",
    "AbstractFilesystemStore": "store",
    "DBFSLocalStore": "store",
    "FilesystemStore": "store",
    "HDFSStore": "store",
    "LocalStore": "store",
    "ObjectStore": "store",
    "Store": "store",
}

__all__ = [
    "AbstractFilesystemStore",
    "Backend",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalBackend",
    "LocalStore",
    "ObjectStore",
    "SparkBackend",
    "Store",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
