# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Petastorm's names for Farandole: readers of Parquet, loaders for torch and TensorFlow, and the
converter of Spark DataFrames.

A notebook that imports petastorm runs unchanged. `docs/moving.md` lists the differences.
"""

from farandole import __version__ as __farandole_version__
from petastorm.errors import NoDataAvailableError
from petastorm.reader import make_batch_reader, make_reader
from petastorm.transform import TransformSpec

__version__ = "0.13.1"
"""The petastorm whose names these are. `__farandole_version__` is the version of Farandole."""

__all__ = [
    "NoDataAvailableError",
    "TransformSpec",
    "__farandole_version__",
    "__version__",
    "make_batch_reader",
    "make_reader",
]
