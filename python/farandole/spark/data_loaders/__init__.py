# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's loaders for your own data modules. PyTorch is imported when a loader is used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.spark.data_loaders.pytorch_data_loaders import (
        PytorchAsyncDataLoader,
        PytorchDataLoader,
    )

__all__ = ["PytorchAsyncDataLoader", "PytorchDataLoader"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.pytorch_data_loaders"), name)
