# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stores: the places of prepared data, checkpoints and logs.

A store is a URL and a layout below it:

    <prefix>/intermediate_train_data[.<idx>]    prepared rows; also ..._val_data and ..._test_data
    <prefix>/runs/<run_id>/checkpoint           the last complete checkpoint; the one before is
                                                checkpoint.previous
    <prefix>/runs/<run_id>/_run.json            which contents of checkpoints the run's jobs have
                                                written
    <prefix>/runs/<run_id>/_fingerprint.json    which data, model and parameters the run was started
                                                with
    <prefix>/runs/<run_id>/logs/                history and logs

The native store reads and writes all bytes, so the driver, Spark's executors and training processes
agree on every path. Credentials come from `storage_options`, or else from each provider's standard
environment variables and files. Options are sent with the store to executors and training
processes; the environment is not.
"""

from __future__ import annotations

import contextlib
import logging
import re
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole._native import store as native
from farandole.common import scratch_directories
from farandole.common.argument_checks import check_byte_count
from farandole.stores import checkpoint_signatures, durable_writes, run_names
from farandole.stores.filesystem import StoreFileSystem
from farandole.stores.remote_store import RemoteStore
from farandole.stores.store_options import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_log = logging.getLogger("farandole")
_URL_SECRET_PATTERN = re.compile(r"://[^/@]*:[^/@]*@|[?&](sig|X-Amz-Signature)=")
_PATH_ARGUMENTS = ("prefix_path", "train_path", "val_path", "test_path", "runs_path")
_ARGUMENTS_AFTER_PREFIX = (
    *_PATH_ARGUMENTS[1:],
    "save_runs",
    "storage_options",
    "checkpoint_filename",
)
_SCHEME_PATTERN = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?=/)")


class Store:
    """The interface of a store for estimators. `Store.create` returns the right one for a URL."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Returns the store for a path or URL.

        Args:
            prefix_path: `/data/farandole`, `file:///data/farandole`, `dbfs:/farandole`,
                `/Volumes/main/x`, `uc://catalog.schema.volume/farandole`,
                `hdfs://node:8020/farandole`, `s3://bucket/farandole`, `gs://...`, `abfss://...`,
                `az://...`, `memory://...`.
            *args: handed to the store's class.
            **kwargs: handed to the store's class.

        Raises:
            ValueError: the URL's scheme is not supported; or no token for Unity Catalog.
            OSError: Unity Catalog refuses a request, or does not answer.
        """
        from farandole.stores.databricks import DBFSLocalStore  # noqa: PLC0415 - they derive from this class
        from farandole.stores.service_stores import HDFSStore, ObjectStore  # noqa: PLC0415

        kind = url_scheme(prefix_path)
        if kind in HDFSStore.SCHEMES:
            return HDFSStore(prefix_path, *args, **kwargs)
        if kind in ObjectStore.SCHEMES:
            return ObjectStore(prefix_path, *args, **kwargs)
        if kind == "uc" or DBFSLocalStore.matches(prefix_path):
            from farandole.stores.unity_volumes import VolumePath, open_volume_store  # noqa: PLC0415

            where = VolumePath.parse(prefix_path)
            if where is not None:
                if len(args) > len(_ARGUMENTS_AFTER_PREFIX):
                    max_count = len(_ARGUMENTS_AFTER_PREFIX) + 1
                    raise TypeError(f"a store takes at most {max_count} arguments")
                given: dict[str, Any] = dict(zip(_ARGUMENTS_AFTER_PREFIX, args, strict=False))
                return open_volume_store(where, **given, **kwargs)
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    def is_parquet_dataset(self, path: str) -> bool:
        """Returns whether there is a data set at `path`: prepared data, or a directory of
        Parquet files.
        """
        raise NotImplementedError

    def get_parquet_dataset(self, path: str) -> Any:
        """Returns the Parquet files at `path` as a `pyarrow.dataset.Dataset`."""
        raise NotImplementedError

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Returns the path of prepared training rows."""
        raise NotImplementedError

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Returns the path of prepared validation rows."""
        raise NotImplementedError

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Returns the path of prepared test rows."""
        raise NotImplementedError

    def saving_runs(self) -> bool:
        """Returns whether checkpoints and logs are kept."""
        raise NotImplementedError

    def get_runs_path(self) -> str:
        """Returns the directory of all runs."""
        raise NotImplementedError

    def get_run_path(self, run_id: str) -> str:
        """Returns the directory of one run."""
        raise NotImplementedError

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Returns the directory of the run's checkpoint, or `None` when runs are not saved."""
        raise NotImplementedError

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns every file of the run that ends in `suffix`, sorted."""
        raise NotImplementedError

    def get_logs_path(self, run_id: str) -> str | None:
        """Returns the directory of the run's logs, or `None` when runs are not saved."""
        raise NotImplementedError

    def get_checkpoint_filename(self) -> str:
        """Returns the checkpoint's name in its directory."""
        raise NotImplementedError

    def get_logs_subdir(self) -> str:
        """Returns the name of the logs' directory in the directory of a run."""
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        """Returns whether there is a file or a directory at `path`."""
        raise NotImplementedError

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        raise NotImplementedError

    def write_text(self, path: str, text: str) -> None:
        """Writes a text file as a whole: readers never see a part of it."""
        raise NotImplementedError

    def get_local_output_dir_fn(
        self, run_id: str
    ) -> Callable[[], contextlib.AbstractContextManager[str]]:
        """Returns a function that opens a temporary local directory for the run's files."""
        raise NotImplementedError

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies the content of a local directory to the directory of the
        run.
        """
        raise NotImplementedError

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> RemoteStore:
        """Returns the paths of one run, as values that are sent to training processes."""
        raise NotImplementedError


class AbstractFilesystemStore(Store):
    """A store with the layout that this module describes.

    Args:
        prefix_path: the directory of everything for which no path is given below.
        train_path: training data, instead of `<prefix>/intermediate_train_data`.
        val_path: validation data, instead of `<prefix>/intermediate_val_data`.
        test_path: test data, instead of `<prefix>/intermediate_test_data`.
        runs_path: runs, instead of `<prefix>/runs`.
        save_runs: whether checkpoints and logs are kept.
        storage_options: credentials and endpoints, by the names of fsspec's file systems (`key`,
            `secret`, `endpoint_url`, `account_key`, ...) or of the providers' environment variables
            in lower case. They are never shown; they travel with the store. Without them the
            providers' standard variables are used.
        checkpoint_filename: the checkpoint's name, instead of `checkpoint`.

    Raises:
        ValueError: a path this store cannot serve, or an option the backend does not know; the
            message names it.
    """

    CHECKPOINT: str | None = None

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        given = [
            path
            for path in (prefix_path, train_path, val_path, test_path, runs_path)
            if path is not None
        ]
        for path in given:
            if url_scheme(path) != "file" and _URL_SECRET_PATTERN.search(path):
                raise ValueError(
                    "a URL may not carry a password or a signature: pass storage_options"
                )
            self.check_path(path)
        self._prefix_path = self.get_full_path(prefix_path)
        self._options = StorageOptions(
            tuple(self.get_full_path(path) for path in given), storage_options
        )
        checkpoint_filename = checkpoint_filename or self.CHECKPOINT
        if checkpoint_filename is not None:
            run_names.check_checkpoint_filename(checkpoint_filename)
        self._save_runs = save_runs
        self._store_layout = native.StoreLayout(
            self._prefix_path,
            train_path=None if train_path is None else self.get_full_path(train_path),
            val_path=None if val_path is None else self.get_full_path(val_path),
            test_path=None if test_path is None else self.get_full_path(test_path),
            runs_path=None if runs_path is None else self.get_full_path(runs_path),
            checkpoint_filename=checkpoint_filename,
        )
        self._options.check()
        self._arguments = {
            "prefix_path": prefix_path,
            "train_path": train_path,
            "val_path": val_path,
            "test_path": test_path,
            "runs_path": runs_path,
            "save_runs": save_runs,
            "storage_options": storage_options,
            "checkpoint_filename": checkpoint_filename,
        }

    @property
    def prefix_path(self) -> str:
        """The URL of the store. Its storage options are put in force, so that the URL can be
        opened.
        """
        self._options.apply_to_process()
        return self._prefix_path

    @property
    def _layout(self) -> native.StoreLayout:
        """The paths of the store. Its storage options are put in force, because the caller opens a
        path.
        """
        self._options.apply_to_process()
        return self._store_layout

    def _open(self, url: str) -> native.Store:
        """Opens a path or URL with the storage options in force."""
        self._options.apply_to_process()
        return native.Store(url)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by the constructor's arguments."""
        return _rebuild_store, (type(self), self._arguments)

    def plain(self) -> dict[str, Any]:
        """Returns the arguments that make a store of the same places: no options, no user, no
        credentials.
        """
        paths = {
            name: self._arguments[name]
            for name in _PATH_ARGUMENTS
            if self._arguments[name] is not None
        }
        whole = {name: self.get_full_path(path) for name, path in paths.items()}
        return whole | {
            "save_runs": self._save_runs,
            "checkpoint_filename": self._arguments["checkpoint_filename"],
        }

    def has_options(self) -> bool:
        """Returns whether there are options that `plain` leaves out."""
        return bool(self._options)

    @property
    def storage_options(self) -> StorageOptions:
        """The options that are sent to other processes which open this store's paths by URL."""
        self._options.apply_to_process()
        return self._options

    @property
    def fs(self) -> StoreFileSystem:
        """An fsspec file system over this store; paths are URLs, or local paths where the store
        is local.
        """
        return StoreFileSystem(storage=self.storage_options)

    def gc(
        self, older_than: timedelta | float | None = None, *, max_size: int | None = None
    ) -> list[str]:
        """Deletes prepared data below the prefix that is old, or too much, and that no process
        uses.

        Runs, checkpoints, test data and files of others are never touched. A directory of training
        or validation data with a file that no preparation wrote is left, and a warning names it.

        Args:
            older_than: age of a data set's newest file, as a timedelta or in seconds.
            max_size: bytes of prepared data that may stay. The oldest data goes until the rest,
                data in use included, is no larger. Data of any age may go, and a
                `ParquetLoader` does not show that it uses data.

        Returns:
            The deleted directories, relative to the prefix.

        Raises:
            ValueError: neither an age nor a size, or one below 0.
            TypeError: an age or a size of another type.
        """
        if older_than is None and max_size is None:
            raise ValueError("gc needs a limit: pass older_than=, max_size= or both")
        age = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
        if age is not None and (isinstance(age, bool) or not isinstance(age, Real)):
            raise TypeError(f"older_than must be a timedelta or seconds: {older_than!r}")
        if age is not None and not age >= 0:
            raise ValueError(f"older_than must be at least 0: {older_than!r}")
        seconds = None if age is None else float(age)
        size = None if max_size is None else check_byte_count("max_size", max_size)
        gone, skipped = native.Store(self.prefix_path).sweep_stale_data(seconds, size)
        for path, reason in skipped:
            _log.warning("gc leaves %s/%s: %s", self.prefix_path, path, reason)
        return [path for path, _, _ in gone]

    def __repr__(self) -> str:
        """Shows the prefix."""
        return f"{type(self).__name__}({self._prefix_path!r})"

    def check_path(self, path: str) -> None:
        """Raises an error for a path that this store cannot serve.

        Args:
            path: a path or URL.

        Raises:
            ValueError: naming the path.
        """
        raise NotImplementedError

    def get_full_path(self, path: str) -> str:
        """Returns the path with its scheme; a bare path becomes absolute."""
        return native.full_path(path)

    def get_localized_path(self, path: str) -> str:
        """Returns the path without its scheme."""
        return native.localized_path(path)

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Returns `get_full_path` as a function that can be sent to executors."""
        return native.full_path

    def check_writable(self) -> None:
        """Writes and deletes a small file.

        Raises:
            OSError: nothing can be written there; the message names the path.
        """
        self._open(self.prefix_path).check_writable()

    def is_parquet_dataset(self, path: str) -> bool:
        """Like `Store.is_parquet_dataset`."""
        files = self._open(self.get_full_path(path)).list()
        return any(name.endswith(".parquet") for name, _ in files)

    def get_parquet_dataset(self, path: str) -> Any:
        """Returns the Parquet files at `path` as a `pyarrow.dataset.Dataset`."""
        import pyarrow.dataset as arrow  # noqa: PLC0415 - stores are used where pyarrow is not

        url = self.get_full_path(path)
        files = [f"{url}/{name}" for name, _ in self._open(url).list() if name.endswith(".parquet")]
        return arrow.dataset(files, filesystem=self.fs, format="parquet")

    def get_data_metadata_path(self, path: str) -> str:
        """Returns the file that describes the prepared data at `path`."""
        return f"{self.get_full_path(path).rstrip('/')}/_manifest.json"

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Like `Store.get_train_data_path`."""
        return self._layout.train_data(idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Like `Store.get_val_data_path`."""
        return self._layout.val_data(idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Like `Store.get_test_data_path`."""
        return self._layout.test_data(idx)

    def saving_runs(self) -> bool:
        """Like `Store.saving_runs`."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Like `Store.get_runs_path`."""
        return self._layout.runs_path

    def get_run_path(self, run_id: str) -> str:
        """Like `Store.get_run_path`.

        Raises:
            ValueError: the name is reserved, or does not name a directory below the runs.
        """
        run_names.check_run_id(run_id)
        return self._layout.run_path(run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Like `Store.get_checkpoint_path`."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns every file of the run that ends in `suffix`, sorted.

        Args:
            run_id: name of the run.
            suffix: end of the files' names.
        """
        run = self.get_run_path(run_id)
        return [f"{run}/{name}" for name, _ in self._open(run).list() if name.endswith(suffix)]

    def get_logs_path(self, run_id: str) -> str | None:
        """Like `Store.get_logs_path`."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}" if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        """Like `Store.get_checkpoint_filename`."""
        return self._layout.checkpoint_filename

    def get_logs_subdir(self) -> str:
        """Like `Store.get_logs_subdir`."""
        return self._layout.logs_subdir

    def exists(self, path: str) -> bool:
        """Like `Store.exists`."""
        return self._open(self.get_full_path(path)).exists()

    def read(self, path: str) -> bytes:
        """Like `Store.read`."""
        directory, name = self._split_path(path)
        return self._open(directory).read(name)

    def write_text(self, path: str, text: str) -> None:
        """Like `Store.write_text`."""
        self.write_bytes(path, text.encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Writes a file as a whole: readers never see a part of it.

        Args:
            path: path or URL of the file.
            data: the whole content.
        """
        directory, name = self._split_path(path)
        self._open(directory).write(name, data)

    def get_local_output_dir_fn(
        self, run_id: str
    ) -> Callable[[], contextlib.AbstractContextManager[str]]:
        """A function that opens a temporary local directory for the run's files.

        Args:
            run_id: name of the run; not used, as no two processes get the same directory.
        """
        del run_id

        @contextlib.contextmanager
        def local_output_dir() -> Iterator[str]:
            with scratch_directories.temporary_directory() as directory:
                yield str(directory)

        return local_output_dir

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies the content of a local directory to the directory of the
        run.

        Args:
            run_id: name of the run.
        """
        run = self.get_run_path(run_id)

        def copy_directory(local_dir: str) -> None:
            target = self._open(run)
            for path in sorted(Path(local_dir).rglob("*")):
                if durable_writes.is_present_file(path):
                    target.write(path.relative_to(local_dir).as_posix(), path.read_bytes())

        return copy_directory

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> RemoteStore:
        """Like `Store.to_remote`."""
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self._save_runs,
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id) if self._save_runs else None,
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            storage_options=self._options,
            run_key=checkpoint_signatures.run_signing_key(run_id),
        )

    def _split_path(self, path: str) -> tuple[str, str]:
        directory, _, name = self.get_full_path(path).rpartition("/")
        return directory, name


class FilesystemStore(AbstractFilesystemStore):
    """A store on a file system that every process reaches under the same path."""

    def check_path(self, path: str) -> None:
        """Refuses a scheme other than `file`."""
        if not path:
            raise ValueError("a store needs a path, got an empty one")
        if url_scheme(path) not in (None, "file"):
            raise ValueError(
                f"not a path of a file system; use Store.create for its scheme: {path}"
            )

    @classmethod
    def matches(cls, path: str) -> bool:
        """Returns whether this kind of store serves a path: one without a scheme, or `file`."""
        return bool(path) and url_scheme(path) in (None, "file")

    def get_filesystem(self) -> StoreFileSystem:
        """Like `fs`."""
        return self.fs

    def copy(
        self, lpath: str, rpath: str, recursive: bool = False, callback: Any = None, **kwargs: Any
    ) -> None:
        """Copies a local file, or the content of a local directory, into the store.

        Args:
            lpath: The file or directory.
            rpath: The path of the copy; a directory's files come directly below it.
            recursive: Whether directories in a directory are copied, too.
            callback: Not used.
            **kwargs: Not used.

        Raises:
            FileNotFoundError: There is nothing at `lpath`.
        """
        del callback, kwargs
        source = Path(native.localized_path(lpath))
        if not durable_writes.is_path_present(source):
            raise FileNotFoundError(f"nothing to copy at: {lpath}")
        if durable_writes.is_present_file(source):
            self.write_bytes(rpath, source.read_bytes())
            return
        for path in sorted(source.rglob("*") if recursive else source.iterdir()):
            if durable_writes.is_present_file(path):
                self.write_bytes(
                    f"{rpath.rstrip('/')}/{path.relative_to(source).as_posix()}", path.read_bytes()
                )


class LocalStore(FilesystemStore):
    """Horovod's older name of `FilesystemStore`."""


def url_scheme(path: str) -> str | None:
    """Returns the scheme of a URL in lower case; `None` for a path."""
    found = _SCHEME_PATTERN.match(path)
    return found[1].lower() if found else None


def _rebuild_store(
    kind: type[AbstractFilesystemStore], arguments: dict[str, Any]
) -> AbstractFilesystemStore:
    return kind(**arguments)
