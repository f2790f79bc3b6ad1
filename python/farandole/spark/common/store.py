# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The stores, under the name of Horovod's module. They are defined in `farandole.stores`."""

from farandole.stores.databricks import DBFSLocalStore
from farandole.stores.remote_store import RemoteStore
from farandole.stores.service_stores import HDFSStore, ObjectStore
from farandole.stores.store import AbstractFilesystemStore, FilesystemStore, LocalStore, Store
from farandole.stores.store_options import StorageOptions

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "ObjectStore",
    "RemoteStore",
    "StorageOptions",
    "Store",
]
