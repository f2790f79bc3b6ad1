# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The numbered directories of a store in which prepared data lives.

A directory of training data and its directory of validation data are one place. Files in the former
describe both:

    _lease-<name>.json  one process writes here
    _use-<name>.json    a process reads here; both count while the process lives
    _preparation.json   a preparation that has not ended; describes the data
    _done-<n>.json      a finished partition: a repeated preparation continues with the others
    _manifest.json      the data is complete
    _used.json          its time is that of the last use

Data has a key, which identifies its source. Keys begin with a word. `once` data cannot be found
again, so its place is free when its process releases it. Data that a fit prepared (`fit`) is kept
for a week after its last use. Data that was prepared explicitly (`data`) stays until `Store.gc`
deletes it. Files that no preparation wrote are never deleted: a directory with such files is
skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from typing import TYPE_CHECKING, Any

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.stores.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.stores.store import AbstractFilesystemStore

MANIFEST = "_manifest.json"
_PREPARATION = "_preparation.json"
_USED = "_used.json"
_DONE = "_done-"
_MARKS = ("_lease-", "_use-")
_KEPT = 7 * 24 * 3600.0


class Place(Mark):
    """A numbered pair of directories that this process writes or uses."""

    def __init__(self, store: AbstractFilesystemStore, index: int, mark: str) -> None:
        self.train_url = store.get_train_data_path(index)
        super().__init__(self.train_url, mark)
        self.index = index
        self.val_url = store.get_val_data_path(index)
        self.done: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.told: dict[int, str] = {}

    def begin(self, key: str) -> None:
        """Empties the place and marks it with the key of the new preparation.

        Args:
            key: What the data is made from.
        """
        train = NativeStore(self.train_url)
        train.delete(MANIFEST)  # first: no reader may find a manifest without its files
        train.write(_PREPARATION, _json({"key": key, "time": time.time()}))
        for name, _ in train.list():
            if name != _PREPARATION and not name.startswith(_MARKS):
                train.delete(name)
        train.tidy()
        NativeStore(self.val_url).delete_all()

    def resume(self, spec: str, prefix: str) -> None:
        """Finds out which partitions a killed preparation had finished; their bytes are read and
        compared.

        Args:
            spec: The preparation, as `farandole._native.prepare` has it.
            prefix: URL of the store.
        """
        train = NativeStore(self.train_url)
        for name, _ in train.list():
            if not name.startswith(_DONE):
                continue
            try:
                told = json.loads(train.read(name))
                partition, part = int(told["partition"]), json.dumps(told["part"]).encode()
                last, source = bool(told["last"]), str(told["source"])
                if not native.is_whole(prefix, spec, part):
                    continue
            except (ValueError, KeyError, TypeError, FileNotFoundError):
                continue  # half written
            self.done[partition] = part
            self.told[partition] = source
            self.ended |= {partition} if last else set()
        for url in (self.train_url, self.val_url):
            NativeStore(url).tidy()

    def finish(self) -> None:
        """Says that the data is complete, and uses it from now on beside others."""
        train = NativeStore(self.train_url)
        with self._touching:
            self._mark = train.settle(self._mark)
        train.delete(_PREPARATION)
        for name, _ in train.list():
            if name.startswith(_DONE):
                train.delete(name)

    def discard(self) -> None:
        """Lets go of the place and deletes everything in it."""
        with self._touching:
            if self._let_go():
                NativeStore(self.val_url).delete_all()
                NativeStore(self.train_url).clear(self._mark)


def note(
    train_url: str, partition: int, part: bytes, *, last: bool = True, source: str = ""
) -> None:
    """Says that a partition is finished, so that a repeated preparation leaves it out.

    Args:
        train_url: The place's directory of training data.
        partition: Its number.
        part: What `PartitionWriter.finish` returned.
        last: Whether no other partition of the same file follows.
        source: What it was made from.
    """
    told = {"partition": partition, "last": last, "source": source, "part": json.loads(part)}
    NativeStore(train_url).write(f"{_DONE}{partition}.json", _json(told))


def find(store: AbstractFilesystemStore, key: str, *, validates: bool) -> Place | None:
    """Complete data of a key, which is not overwritten while it is in use.

    Args:
        store: Where to look.
        key: What the data is made from.
        validates: Whether there is validation data.

    Returns:
        The place, or `None`.
    """
    for index in _indices(store):
        if _complete(store, index, key, validates=validates):
            train = NativeStore(store.get_train_data_path(index))
            mark = train.share()
            if mark is None:
                continue
            place = Place(store, index, mark)
            if _complete(store, index, key, validates=validates):
                train.write(_USED, _json({"time": time.time()}))
                return place
            place.release()
    return None


def take(
    store: AbstractFilesystemStore, key: str, *, resumable: bool, replace: bool = False
) -> tuple[Place, bool]:
    """Takes a place for this process alone.

    Args:
        store: Where data will be prepared.
        key: What it is made from.
        resumable: Whether a killed preparation of the same key may be gone on with.
        replace: Whether complete data of the same key may be emptied.

    Returns:
        The place, and whether such a preparation was found in it; if not, the place has been
        emptied.
    """
    for index in _indices(store) if resumable else ():
        url = store.get_train_data_path(index)
        if _begun(url) == key and not NativeStore(url).exists(MANIFEST):
            mark = NativeStore(url).take()
            if mark is None:
                continue
            place = Place(store, index, mark)
            if _begun(url) == key and not NativeStore(url).exists(MANIFEST):
                return place, True
            place.release()
    for index in itertools.count():
        own = key if replace else None
        if not _is_free(store, index, own):
            continue
        mark = NativeStore(store.get_train_data_path(index)).take()
        if mark is None:
            continue
        place = Place(store, index, mark)
        if _is_free(store, index, own):
            place.begin(key)
            return place, False
        place.release()
    raise AssertionError("numbers do not end")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _indices(store: AbstractFilesystemStore) -> Iterator[int]:
    return itertools.takewhile(
        lambda index: NativeStore(store.get_train_data_path(index)).exists(), itertools.count()
    )


def _manifest(url: str) -> dict[str, Any] | None:
    try:
        text = native.read_manifest(url)
    except ValueError:  # no manifest of ours
        return None
    return None if text is None else json.loads(text)


def _complete(store: AbstractFilesystemStore, index: int, key: str, *, validates: bool) -> bool:
    """Returns whether manifests have this key, and all files that they name exist with the right
    size.
    """
    urls = [
        store.get_train_data_path(index),
        *([store.get_val_data_path(index)] if validates else []),
    ]
    for url in urls:
        manifest = _manifest(url)
        if manifest is None or manifest["fingerprint"] != key:
            return False
        found = dict(NativeStore(url).list())
        if any(found.get(file["path"]) != file["bytes"] for file in manifest["files"]):
            return False
    return True


def _begun(url: str) -> str | None:
    """Returns the key of a preparation that has not ended."""
    try:
        return str(json.loads(NativeStore(url).read(_PREPARATION))["key"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _last_used(directory: NativeStore) -> float:
    try:
        return float(json.loads(directory.read(_USED))["time"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    for name in (MANIFEST, _PREPARATION):
        with contextlib.suppress(FileNotFoundError):
            return directory.stat(name)[2] or time.time()
    return 0.0


def _is_free(store: AbstractFilesystemStore, index: int, own: str | None) -> bool:
    """Returns whether a place may be emptied if no process uses it."""
    url = store.get_train_data_path(index)
    directory, beside = NativeStore(url), NativeStore(store.get_val_data_path(index))
    theirs = [name for name, _ in directory.list() if not name.startswith(_MARKS)]
    manifest = _manifest(url)
    key = manifest["fingerprint"] if manifest is not None else _begun(url)
    if key is None:
        return not theirs and (
            not beside.exists() or _manifest(store.get_val_data_path(index)) is not None
        )
    if key.startswith("once") or key == own:
        return True
    asked_for = manifest is not None and key.startswith("data")
    return not asked_for and time.time() - _last_used(directory) > _KEPT
