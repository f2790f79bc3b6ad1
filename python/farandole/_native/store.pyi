# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors

"""Stores. A store is a URL (a path, `file://`, `dbfs:/`, `hdfs://`, `s3://`, `gs://`,
`abfss://`, `az://`, `memory://`).
"""

from collections.abc import Callable
from typing import TypeAlias, final

_Item: TypeAlias = tuple[str, int, float | None, bool]
"""Name, bytes, seconds since the epoch when it was written, whether it is a directory."""

@final
class Store:
    """Files under one URL. Paths are relative to it, with `/` between parts; `""` is the URL
    itself.

    Missing files raise `FileNotFoundError`, refused ones `PermissionError`, an unknown scheme
    `ValueError`; every message names the whole path.
    """

    def __new__(cls, url: str) -> Store: ...
    @property
    def url(self) -> str:
        """The full URL, with a scheme: `file:///tmp/run`."""
    @property
    def local_path(self) -> str | None:
        """The same as a local path, when it is on this machine's file system."""
    def open_child(self, path: str) -> Store: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None:
        """Writes a file so that no reader sees half of it; makes directories as needed."""
    def copy(self, path: str, name: str) -> None:
        """Copies a file to another name in the store. Object stores copy it themselves."""
    def find_foreign_file(self, val: Store) -> str | None:
        """Returns the whole path of a file that no preparation wrote in this directory of training
        data or in `val`; `None` if both may be emptied.
        """
    def create_if_absent(self, path: str, data: bytes) -> bool:
        """Writes a small file unless there is one of this name; of many processes that try, one
        does.
        """
    def acquire_lease(self, lasts: float | None = None, job: str | None = None) -> str | None:
        """Takes a directory for this process alone: the lease's name, `None` if it is in use.

        Processes that cannot see this one believe the lease for `lasts` seconds after it was
        written or renewed, or for a week. A process of a `job` takes the lease of another process
        of the same job, even of a living one.
        """
    def mark_in_use(self, lasts: float | None = None) -> str | None:
        """Uses a directory beside others: the mark's name, `None` if it is taken. `lasts` as in
        `take`.
        """
    def renew_mark(self, mark: str) -> bool:
        """Writes a mark of this process again; false when it is gone, or another's."""
    def check_lease(self, lease: str) -> None:
        """Raises a `RuntimeError` that names the directory if this lease of it is gone."""
    def downgrade_lease(self, lease: str) -> str:
        """Makes the own lease a mark of use beside others; a lost one raises a `RuntimeError`."""
    def delete_content_keep_lease(self, lease: str) -> int:
        """Deletes the content of a directory that this process has taken, except marks and the sign
        of a preparation; returns the number of deleted files. Raises a `RuntimeError` if the lease
        is gone. Nothing is deleted through a symbolic link, the directory itself included.
        """
    def delete_content_and_lease(self, lease: str) -> int:
        """Deletes the content of a directory that this process has taken, and lets go of it;
        returns the number of deleted files. Files that another process has there by then stay.
        Raises errors like `delete_content_keep_lease`.
        """
    def is_free(self) -> bool:
        """Returns whether no living process uses or reserves the directory."""
    def remove_partial_uploads(self) -> None:
        """Deletes the remains of killed uploads directly in this directory; no other process may
        write here.
        """
    def exists(self, path: str = "") -> bool:
        """Returns whether there is a file of this name, or anything below it."""
    def read_range(self, path: str, start: int, end: int) -> bytes: ...
    def stat(self, path: str) -> _Item:
        """Returns the file or directory at a path; raises an error if there is none."""
    def list_directory(self, path: str = "") -> list[_Item]:
        """Files and directories directly in `path`, by name."""
    def sweep_stale_data(
        self, older_than: float | None = None, max_size: int | None = None
    ) -> tuple[list[tuple[str, int, int]], list[tuple[str, str]]]:
        """Deletes unused prepared data older than so many seconds, and the oldest until all has at
        most so many bytes.

        Returns:
            Relative path, files and bytes of each deleted directory; relative path and reason of
            each directory that was left because of files of others.
        """
    def size(self, path: str) -> int: ...
    def list(self, path: str = "") -> list[tuple[str, int]]:
        """Every file below `path`, as (relative path, bytes), sorted."""
    def delete(self, path: str, patience: float | None = None) -> None:
        """Deletes a file; a missing one is no error. Given up on after `patience` seconds."""
    def delete_all(self, path: str = "") -> int:
        """Deletes everything below `path`; returns how many files that were."""
    def check_writable(self) -> None:
        """Writes and deletes a small file; raises `PermissionError` or `OSError` naming the
        path.
        """

@final
class StoreLayout:
    """Names of data and runs below a store's prefix (see `farandole.stores.store`)."""

    def __new__(
        cls,
        prefix: str,
        *,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        checkpoint_filename: str | None = None,
    ) -> StoreLayout: ...
    @property
    def prefix(self) -> str: ...
    @property
    def checkpoint_filename(self) -> str: ...
    @property
    def logs_subdir(self) -> str: ...
    @property
    def runs_path(self) -> str: ...
    def train_data(self, idx: int | None = None) -> str: ...
    def val_data(self, idx: int | None = None) -> str: ...
    def test_data(self, idx: int | None = None) -> str: ...
    def run_path(self, run_id: str) -> str: ...
    def checkpoint_path(self, run_id: str) -> str:
        """URL of the checkpoint file: `<runs>/<run_id>/checkpoint`."""
    def logs_path(self, run_id: str) -> str: ...

def configure_options(prefix: str, options: dict[str, str]) -> None:
    """Opens stores at or below a URL with these options from now on, in this process. No value
    is ever shown.
    """

def configured_options(url: str) -> dict[str, str]:
    """Returns the options of a URL as they were set, including secrets."""

def register_credentials(name: str, function: Callable[[], dict[str, str]]) -> None:
    """Gives a function that returns credentials a name: the value of the storage option
    `credentials`. A name keeps its first function.
    """

def object_store_options(url: str) -> dict[str, str]:
    """Returns the options of a URL, by names that other readers of the same services know,
    including secrets.
    """

def full_path(path: str) -> str:
    """The path with its scheme; a bare path becomes absolute under `file://`."""

def localized_path(url: str) -> str:
    """The path without its scheme, as the file system behind it knows it."""
