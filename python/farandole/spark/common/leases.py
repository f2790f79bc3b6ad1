# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Which process prepares data in which numbered directory of a store.

Prepared data is never written over while somebody may read it: a directory is taken by a small file in it that names
its process. A directory is free when nobody took it, when its process has ended on this host, or after a week. Files
that no preparation wrote are never deleted: a directory with such files is passed over.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from farandole._native.store import Store as NativeStore

if TYPE_CHECKING:
    from farandole.spark.common.store import AbstractFilesystemStore

_NAME = "_lease.json"
_MANIFEST = "_manifest.json"
_LONGEST = 7 * 24 * 3600.0
_HELD: set[str] = set()
_LOCK = threading.Lock()


def acquire(store: AbstractFilesystemStore) -> int:
    """Takes the lowest free number of a store and empties its directories.

    Args:
        store: where data will be prepared.

    Returns:
        The number.
    """
    with _LOCK:
        index = 0
        while True:
            url = store.get_train_data_path(index)
            directory, beside = NativeStore(url), NativeStore(store.get_val_data_path(index))
            if url not in _HELD and _is_free(directory) and (directory.exists(_NAME) or _is_ours(beside)):
                break
            index += 1
        directory.delete_all()
        beside.delete_all()
        directory.write(_NAME, _holder())
        if not _HELD:
            atexit.register(release_all)
        _HELD.add(url)
        return index


def release(url: str) -> None:
    """Gives a directory back; the data stays readable until somebody takes the number again.

    Args:
        url: the training data's directory.
    """
    with _LOCK:
        if url in _HELD:
            _HELD.discard(url)
            NativeStore(url).delete(_NAME)


def discard(url: str, beside: str | None) -> None:
    """Gives a directory back and deletes what a failed preparation left in it.

    Args:
        url: the training data's directory.
        beside: the validation data's, if there is one.
    """
    with _LOCK:
        if url in _HELD:
            _HELD.discard(url)
            for written in (beside, url):
                if written is not None:
                    NativeStore(written).delete_all()


def abandon(url: str, beside: str | None) -> None:
    """As `discard`, for when tasks may still write: the directory keeps a mark by which it is taken and emptied again.

    Args:
        url: the training data's directory.
        beside: the validation data's, if there is one.
    """
    discard(url, beside)
    NativeStore(url).write(_NAME, _holder())


def release_all() -> None:
    """Gives back everything this process holds."""
    for url in list(_HELD):
        with contextlib.suppress(OSError):
            release(url)


def _holder() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}).encode()


def _is_free(directory: NativeStore) -> bool:
    if not directory.exists(_NAME):
        return _is_ours(directory)
    try:
        holder = json.loads(directory.read(_NAME))
    except (ValueError, FileNotFoundError):
        return True
    if holder["host"] == socket.gethostname():
        return holder["pid"] == os.getpid() or not Path(f"/proc/{holder['pid']}").exists()
    return time.time() - holder["time"] > _LONGEST


def _is_ours(directory: NativeStore) -> bool:
    return directory.exists(_MANIFEST) or not directory.exists()
