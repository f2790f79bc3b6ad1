# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Data modules of the Lightning estimator, under Horovod's names.

`PetastormDataModule` is the native reader: Petastorm is not needed. `NVTabularDataModule` raises
with the reason.
"""

from farandole.spark.common.datamodule import DataModule, NVTabularDataModule, ParquetDataModule

PetastormDataModule = ParquetDataModule
"""Another name of `ParquetDataModule`, which is the native reader."""

__all__ = ["DataModule", "NVTabularDataModule", "ParquetDataModule", "PetastormDataModule"]
