# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One run's paths in a store, as training processes have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole._native import store as native
from farandole.spark.common import durable

if TYPE_CHECKING:
    from farandole.spark.common.store import StorageOptions


@dataclass(frozen=True)
class RemoteStore:
    """The paths of one run, as plain values that travel to training processes."""

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str | None
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    storage_options: StorageOptions

    def read(self, name: str) -> bytes | None:
        """A file of the run, or `None` where there is none.

        Args:
            name: path below the run's directory.
        """
        if self.run_path is None:
            return None
        run = native.Store(self.run_path)
        return run.read(name) if run.exists(name) else None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the run so that nobody ever sees half of it; nothing happens when runs are not saved.

        Args:
            name: path below the run's directory.
            data: the whole content.
        """
        if self.run_path is not None:
            native.Store(self.run_path).write(name, data)

    def write_checkpoint(self, name: str, data: bytes) -> None:
        """Writes a file as `write` does, so that it outlives a loss of power; of the run's checkpoint two are kept.

        Args:
            name: path below the run's directory.
            data: the whole content.
        """
        if self.run_path is not None:
            durable.write(native.Store(self.run_path), name, data, keeps=name == self.checkpoint_filename)

    def read_checkpoint(self, name: str) -> bytes | None:
        """A checkpoint of the run, or `None` where there is none; a damaged one is named in a warning and not used.

        Args:
            name: path below the run's directory.
        """
        return None if self.run_path is None else durable.read(native.Store(self.run_path), name)

    def resume(self) -> bytes | None:
        """The checkpoint that the run goes on from, or `None` for a fresh run.

        Raises:
            ValueError: there are checkpoints, and all of them are damaged.
        """
        return None if self.run_path is None else durable.resume(native.Store(self.run_path), self.checkpoint_filename)
