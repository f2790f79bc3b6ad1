# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""One run's paths in a store, as training processes have them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from farandole._native import store as native
from farandole.common.rank_progress import OWN_PROGRESS
from farandole.stores import checkpoint_signatures, durable_writes
from farandole.stores.run_lease import RunInUseError

if TYPE_CHECKING:
    from farandole.stores.store_options import StorageOptions

_log = logging.getLogger("farandole")


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
    run_key: bytes | None = field(default=None, repr=False)
    lease_name: str | None = None
    """File in the run's directory by which the fit's driver holds the run, if it does."""

    def read(self, name: str) -> bytes | None:
        """Returns a file of the run, or `None` where there is none.

        Args:
            name: path below the run's directory.
        """
        if self.run_path is None:
            return None
        return durable_writes.read_if_present(native.Store(self.run_path), name)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the run so that no reader sees half of it; does nothing if runs are not
        saved.

        Args:
            name: path below the run's directory.
            data: the whole content.

        Raises:
            RunInUseError: the fit has lost the run to another process.
        """
        if self.run_path is not None:
            run = native.Store(self.run_path)
            self._require_driver_lease(run)
            run.write(name, data)

    def write_part(self, directory: str, name: str, data: bytes) -> None:
        """Writes a part of a checkpoint so that it outlives a loss of power. The checkpoint
        contains the digest of the part.

        Args:
            directory: directory of the part below the run's directory.
            name: name of the file.
            data: the whole content.

        Raises:
            RunInUseError: the fit has lost the run to another process.
        """
        if self.run_path is not None:
            run = native.Store(self.run_path)
            self._require_driver_lease(run)
            durable_writes.write_durably(run.open_child(directory), name, data)

    def write_log(self, name: str, data: bytes) -> bool:
        """Writes a file that only shows what happened, such as a history. If the file cannot be
        written, a warning says so, and the training continues.

        Args:
            name: path below the run's directory.
            data: the whole content.

        Returns:
            Whether the file was written; true if runs are not saved.
        """
        try:
            self.write(name, data)
        except OSError as error:
            _log.warning("%s of the run cannot be written, the training continues: %s", name, error)
            return False
        return True

    def write_checkpoint(self, name: str, data: bytes) -> None:
        """Writes a file as `write` does, so that it outlives a loss of power; of the run's
        checkpoint two are kept.

        Args:
            name: path below the run's directory.
            data: the whole content.

        Raises:
            RunInUseError: the fit has lost the run to another process.
        """
        if self.run_path is not None:
            run = native.Store(self.run_path)
            self._require_driver_lease(run)
            self._write_signed_checkpoint(run, name, data, keeps=name == self.checkpoint_filename)
            OWN_PROGRESS.note_checkpoint()

    def read_checkpoint(self, name: str) -> bytes | None:
        """Returns a checkpoint of the run, or `None`; a damaged one is named in a warning and not
        used.

        Args:
            name: path below the run's directory.
        """
        if self.run_path is None:
            return None
        run = native.Store(self.run_path)
        return durable_writes.read_intact_checkpoint(run, name, partial(self._find_mismatch, run))

    def read_checkpoint_to_resume(self) -> bytes | None:
        """Returns the checkpoint that the run continues from, or `None` for a fresh run.

        Raises:
            OSError: a checkpoint cannot be read. It may exist, so this is no fresh run.
            ValueError: there are checkpoints, and none of them can be used.
        """
        if self.run_path is None:
            return None
        run = native.Store(self.run_path)
        name = self.checkpoint_filename
        return durable_writes.recover_last_checkpoint(
            run,
            name,
            partial(self._find_mismatch, run),
            partial(self._write_signed_checkpoint, run, name, keeps=False),
        )

    def _require_driver_lease(self, run: native.Store) -> None:
        """Raises an error if the driver's lease is gone. A driver that was stopped or cut off for
        long loses the run to another fit, and its workers, which may still run, must not overwrite
        that fit's files.
        """
        if self.lease_name is not None and not run.exists(self.lease_name):
            raise RunInUseError(
                f"the driver of this fit does not hold {self.run_path} any more: its lease "
                f"{self.lease_name} is gone, because the driver was stopped or cut off for long, "
                "or has ended. Another fit may train the run now: nothing is written"
            )

    def _write_signed_checkpoint(
        self, run: native.Store, name: str, data: bytes, *, keeps: bool
    ) -> None:
        with checkpoint_signatures.record_checkpoint_write(run, name, data, self.run_key):
            durable_writes.write_durably(run, name, data, keeps=keeps)

    def _find_mismatch(self, run: native.Store, name: str, data: bytes) -> str | None:
        return checkpoint_signatures.foreign_checkpoint_reason(run, name, data, self.run_key)
