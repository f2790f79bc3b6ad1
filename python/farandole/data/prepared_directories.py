# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The numbered directories of a store in which prepared data lives.

A directory of training data and its directory of validation data have one number. Files in the
training directory describe both:

    _lease-<name>.json  one process writes here
    _use-<name>.json    a process reads here; both count while the process lives
    _preparation.json   a preparation that has not ended; describes the data
    _done-<n>.json      a finished partition: a repeated preparation continues with the others
    _manifest.json      the data is complete
    _used.json          the time of the last use

Data has a key, which identifies its source. Keys begin with a word. `once` data cannot be found
again, so its directory is free when its process releases it. Data that a fit prepared (`fit`) is
kept for a week after its last use. Data that was prepared explicitly (`data`) stays until
`Store.gc` deletes it. Files that no preparation wrote are never deleted: a directory with such
files is skipped, and so is one that is a symbolic link. A process whose lease is gone writes
nothing more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.stores import small_files
from farandole.stores.lease_files import LeaseFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from farandole.stores.store import AbstractFilesystemStore

MANIFEST_FILE = "_manifest.json"
_PREPARATION_FILE = "_preparation.json"
_LAST_USE_FILE = "_used.json"
_FINISHED_PARTITION_PREFIX = "_done-"
_MARK_FILE_PREFIXES = ("_lease-", "_use-", "_clock-")
_log = logging.getLogger("farandole")
_RETENTION_SECONDS = 7 * 24 * 3600.0


class PreparedDirectory(LeaseFile):
    """A numbered pair of directories that this process writes or uses."""

    def __init__(self, store: AbstractFilesystemStore, index: int, file_name: str) -> None:
        self.train_url = store.get_train_data_path(index)
        super().__init__(self.train_url, file_name)
        self.index = index
        self.val_url = store.get_val_data_path(index)
        self.finished_partitions: dict[int, bytes] = {}
        self.last_partitions: set[int] = set()

    def empty_and_mark_directory(self, key: str) -> None:
        """Empties the directory and marks it with the key of the new preparation.

        Args:
            key: The key of the data, which identifies its source.

        Raises:
            RuntimeError: The lease is gone, so another process may own the directory.
        """
        self.check_lease()
        train = NativeStore(self.train_url)
        # First: files without a mark are never deleted, by a later preparation either.
        train.write(_PREPARATION_FILE, _to_json({"key": key, "time": time.time()}))
        train.delete_content_keep_lease(self._file_name)
        NativeStore(self.val_url).delete_all()

    @property
    def lease_name(self) -> str:
        """The name of the lease or use file in the training directory."""
        return self._file_name

    def check_lease(self) -> None:
        """Checks that this process still has the directory; to be called before it is written.

        Raises:
            RuntimeError: The lease is gone, so another process may own the directory.
        """
        NativeStore(self.train_url).check_lease(self._file_name)

    def load_finished_partitions(
        self, spec: str, prefix: str, sources: Sequence[str] | None = None
    ) -> None:
        """Finds out which partitions a killed preparation had finished; their bytes are read and
        compared.

        Args:
            spec: The preparation, as `farandole._native.prepare` has it.
            prefix: URL of the store.
            sources: Source of each partition, which must be the same as then; `None`: any.
        """
        train = NativeStore(self.train_url)
        for name, _ in train.list():
            if not name.startswith(_FINISHED_PARTITION_PREFIX):
                continue
            try:
                record = small_files.read_json(train, name) or {}
                partition, part = int(record["partition"]), json.dumps(record["part"]).encode()
                last, source = bool(record["last"]), str(record["source"])
                if not native.is_partition_whole(prefix, spec, part):
                    continue
            except (ValueError, KeyError, TypeError, FileNotFoundError):
                continue  # half written
            if sources is not None and source not in sources[partition : partition + 1]:
                continue
            self.finished_partitions[partition] = part
            self.last_partitions |= {partition} if last else set()
        for url in (self.train_url, self.val_url):
            NativeStore(url).remove_partial_uploads()

    def finish_preparation(self) -> None:
        """Marks the data as complete, and downgrades the lease to a shared use.

        Raises:
            RuntimeError: The lease is gone, so another process may own the directory.
        """
        train = NativeStore(self.train_url)
        with self._file_lock:
            self._file_name = train.downgrade_lease(self._file_name)
        train.delete(_PREPARATION_FILE)
        for name, _ in train.list():
            if name.startswith(_FINISHED_PARTITION_PREFIX):
                train.delete(name)

    def release_and_delete_data(self) -> None:
        """Lets go of the place and deletes everything in it, unless the lease is gone."""
        with self._file_lock:
            if self._give_up_holding():
                train, val = NativeStore(self.train_url), NativeStore(self.val_url)
                # Renewed, so that no process takes the place during the deletion.
                if not train.renew_mark(self._file_name):
                    _log.warning(
                        "prepared data is not deleted, because this process has lost its lease: %s",
                        self.train_url,
                    )
                    return
                foreign = train.find_foreign_file(val)
                if foreign is not None:
                    _log.warning("prepared data is not deleted, because of a file: %s", foreign)
                    train.delete(self._file_name)
                    return
                # If this process is killed now, the mark shows that the rest may be deleted.
                train.write(_PREPARATION_FILE, _to_json({"key": "once deleted", "time": 0}))
                val.delete_all()
                train.delete_content_and_lease(self._file_name)


def record_resumable_partition(
    train_url: str, lease: str, partition: int, part: bytes, *, last: bool = True, source: str = ""
) -> None:
    """Records that a partition is finished, so that a repeated preparation skips it.

    Args:
        train_url: The directory of training data.
        lease: The name of the preparation's lease.
        partition: Its number.
        part: Result of `PartitionWriter.finish`.
        last: Whether no other partition of the same file follows.
        source: The source of the partition.

    Raises:
        RuntimeError: The lease is gone, so another process may own the directory.
    """
    record = {"partition": partition, "last": last, "source": source, "part": json.loads(part)}
    train = NativeStore(train_url)
    # The record would be taken for one of the next owner.
    train.check_lease(lease)
    train.write(f"{_FINISHED_PARTITION_PREFIX}{partition}.json", _to_json(record))


def hold_complete_directory(
    store: AbstractFilesystemStore, key: str, *, validates: bool
) -> PreparedDirectory | None:
    """Returns complete data of a key, which is not overwritten while it is in use.

    Args:
        store: The store to search.
        key: The key of the data, which identifies its source.
        validates: Whether there is validation data.

    Returns:
        The prepared directory, or `None`.
    """
    for index in _existing_directory_indices(store):
        train = NativeStore(store.get_train_data_path(index))
        is_complete = partial(_is_complete, store, index, key, validates=validates)
        directory = _hold_if_suitable(store, index, train.mark_in_use, is_complete)
        if directory is not None:
            train.write(_LAST_USE_FILE, _to_json({"time": time.time()}))
            return directory
    return None


def acquire_resumable_or_emptied_directory(
    store: AbstractFilesystemStore, key: str, *, resumable: bool, replace: bool = False
) -> tuple[PreparedDirectory, bool]:
    """Acquires a prepared directory for this process alone.

    Args:
        store: The store for the prepared data.
        key: The key of the data, which identifies its source.
        resumable: Whether to resume a killed preparation of the same key.
        replace: Whether complete data of the same key may be emptied.

    Returns:
        The directory, and whether it has such a preparation; if not, the directory has been
        emptied.
    """
    for index in _existing_directory_indices(store) if resumable else ():
        url = store.get_train_data_path(index)
        train, val = NativeStore(url), NativeStore(store.get_val_data_path(index))
        if train.find_foreign_file(val):
            continue
        is_unfinished = partial(_has_unfinished_preparation, url, key)
        directory = _hold_if_suitable(store, index, train.acquire_lease, is_unfinished)
        if directory is not None:
            return directory, True
    for index in itertools.count():
        train = NativeStore(store.get_train_data_path(index))
        is_reusable = partial(_is_reusable_directory, store, index, key if replace else None)
        directory = _hold_if_suitable(store, index, train.acquire_lease, is_reusable)
        if directory is not None:
            directory.empty_and_mark_directory(key)
            return directory, False
    raise AssertionError("numbers do not end")


def _hold_if_suitable(
    store: AbstractFilesystemStore,
    index: int,
    hold: Callable[[], str | None],
    is_suitable: Callable[[], bool],
) -> PreparedDirectory | None:
    """Returns a directory that this process holds, if it is suitable, also once it is held."""
    file_name = hold() if is_suitable() else None
    if file_name is None:
        return None
    directory = PreparedDirectory(store, index, file_name)
    if is_suitable():
        return directory
    directory.delete_if_held()
    return None


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _existing_directory_indices(store: AbstractFilesystemStore) -> Iterator[int]:
    return itertools.takewhile(
        lambda index: NativeStore(store.get_train_data_path(index)).exists(), itertools.count()
    )


def _read_manifest(url: str) -> dict[str, Any] | None:
    try:
        text = native.read_manifest(url)
    except ValueError:  # another program wrote the manifest
        return None
    return None if text is None else json.loads(text)


def _is_complete(store: AbstractFilesystemStore, index: int, key: str, *, validates: bool) -> bool:
    """Returns whether manifests have this key, and all files that they name exist with the right
    size.
    """
    urls = [
        store.get_train_data_path(index),
        *([store.get_val_data_path(index)] if validates else []),
    ]
    for url in urls:
        manifest = _read_manifest(url)
        if manifest is None or manifest["fingerprint"] != key:
            return False
        found = dict(NativeStore(url).list())
        if any(found.get(file["path"]) != file["bytes"] for file in manifest["files"]):
            return False
    return True


def _unfinished_preparation_key(url: str) -> str | None:
    """Returns the key of a preparation that has not ended."""
    try:
        found = small_files.read_json(NativeStore(url), _PREPARATION_FILE) or {}
        return str(found["key"])
    except (ValueError, LookupError, TypeError):  # absent, or half written
        return None


def _has_unfinished_preparation(url: str, key: str) -> bool:
    return _unfinished_preparation_key(url) == key and not NativeStore(url).exists(MANIFEST_FILE)


def _last_use_time(directory: NativeStore) -> float:
    try:
        found = small_files.read_json(directory, _LAST_USE_FILE) or {}
        return float(found["time"])
    except (ValueError, LookupError, TypeError):  # absent, or half written
        pass
    for name in (MANIFEST_FILE, _PREPARATION_FILE):
        with contextlib.suppress(FileNotFoundError):
            return directory.stat(name)[2] or time.time()
    return 0.0


def _is_reusable_directory(store: AbstractFilesystemStore, index: int, own: str | None) -> bool:
    """Returns whether a place may be emptied if no process uses it."""
    url = store.get_train_data_path(index)
    directory, beside = NativeStore(url), NativeStore(store.get_val_data_path(index))
    if directory.find_foreign_file(beside) is not None:
        return False
    theirs = [name for name, _ in directory.list() if not name.startswith(_MARK_FILE_PREFIXES)]
    manifest = _read_manifest(url)
    key = manifest["fingerprint"] if manifest is not None else _unfinished_preparation_key(url)
    if key is None:
        return not theirs and (
            not beside.exists() or _read_manifest(store.get_val_data_path(index)) is not None
        )
    if key.startswith("once") or key == own:
        return True
    asked_for = manifest is not None and key.startswith("data")
    return not asked_for and time.time() - _last_use_time(directory) > _RETENTION_SECONDS
