# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Shared parts of all estimators: backends, stores, parameters, data preparation.

Names are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.runner.backend import Backend, LocalBackend
    from farandole.spark.common.backend import SparkBackend
    from farandole.spark.common.runs.run_fingerprint_check import RunDiffersError
    from farandole.stores.databricks import DBFSLocalStore
    from farandole.stores.run_lease import RunInUseError
    from farandole.stores.service_stores import HDFSStore, ObjectStore
    from farandole.stores.store import AbstractFilesystemStore, FilesystemStore, LocalStore, Store

_MODULE_BY_NAME = {
    "Backend": "farandole.runner.backend",
    "LocalBackend": "farandole.runner.backend",
    "SparkBackend": "farandole.spark.common.backend",
    "AbstractFilesystemStore": "farandole.stores.store",
    "DBFSLocalStore": "farandole.stores.databricks",
    "FilesystemStore": "farandole.stores.store",
    "HDFSStore": "farandole.stores.service_stores",
    "LocalStore": "farandole.stores.store",
    "ObjectStore": "farandole.stores.service_stores",
    "Store": "farandole.stores.store",
    "RunDiffersError": "farandole.spark.common.runs.run_fingerprint_check",
    "RunInUseError": "farandole.stores.run_lease",
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
    "RunDiffersError",
    "RunInUseError",
    "SparkBackend",
    "Store",
]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
