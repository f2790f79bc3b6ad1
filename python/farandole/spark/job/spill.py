# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sends objects that are too large for Spark's closures and rows through a store, by the hash of
their content.

A job has its own directory there, which is removed with the job. Its files are unpickled, so a file
is used only if it has the hash that came through Spark, like the closures and rows of the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from farandole.common import pickling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.stores.marks import Mark
    from farandole.stores.options import StorageOptions
    from farandole.stores.store import Store

LIMIT: Final = 16 << 20
"""Bytes of a pickle that travel without a store."""
_PREFIX: Final = "spill-"
_USE: Final = "_use-"
_WEEK: Final = 7 * 24 * 3600.0
_LASTS: Final = 3600.0
"""Seconds that drivers elsewhere believe a driver's mark, which it renews."""
_MARKS: dict[str, Mark | None] = {}
"""Marks of this driver in the directories of its jobs."""


@dataclass(frozen=True)
class Stored:
    """A file in a job's directory.

    Attributes:
        name: SHA-256 of its content, which is its file's name, too.
        size: Its bytes.
    """

    name: str
    size: int


@dataclass(frozen=True)
class Spill:
    """A job's directory in a store; unpickling one puts the store's options in force.

    Attributes:
        url: The directory.
        options: Options of the store.
    """

    url: str
    options: StorageOptions | None = None

    @classmethod
    def below(cls, store: Store | str) -> Spill:
        """Returns a new directory among the runs of a store.

        Args:
            store: A store, or its URL.
        """
        from farandole.stores.store import Store  # noqa: PLC0415 - only jobs that are given one

        made = Store.create(store) if isinstance(store, str) else store
        runs = made.to_remote("spill")
        sweep(runs.runs_path)
        spill = cls(f"{runs.runs_path}/{_PREFIX}{uuid.uuid4().hex}", runs.storage_options)
        _MARKS[spill.url] = _mark(spill.url)
        return spill

    def put(self, data: bytes) -> Stored:
        """Writes something, whole or not at all."""
        name = hashlib.sha256(data).hexdigest()
        self._store().write(name, data)
        return Stored(name, len(data))

    def take(self, stored: Stored) -> bytes:
        """Reads the data that `put` has written.

        Raises:
            ValueError: The file is not the one that was written.
        """
        data = self._store().read(stored.name)
        if hashlib.sha256(data).hexdigest() != stored.name:
            raise ValueError(
                f"{self.url}/{stored.name} differs from the file that the job wrote: {len(data)} "
                f"of {stored.size} bytes"
            )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the job's directory."""
        self._store().write(name, data)

    def read(self, name: str) -> bytes:
        """Reads a file of the job's directory."""
        return self._store().read(name)

    def names(self, folder: str) -> list[str]:
        """Returns the files of a folder of the job's directory, sorted; none where there is no
        such folder.
        """
        store = self._store()
        return [name for name, _ in store.list(folder)] if store.exists(folder) else []

    def clear(self) -> None:
        """Deletes everything the job has left."""
        mark = _MARKS.pop(self.url, None)
        self._store().delete_all()
        if mark is not None:
            mark.release()

    def carried(self, packed: bytes) -> bytes:
        """Returns a pickled `(fn, args, kwargs)`. It travels by the store if it is large, and so
        does its result.
        """
        if len(packed) <= LIMIT:
            return pickling.dumps((call, (self, packed), {}))
        return pickling.dumps((call_stored, (self, self.put(packed)), {}))

    def fetched(self, value: Any) -> Any:
        """Returns a result of a carried function, whichever way it came."""
        return pickle.loads(self.take(value)) if isinstance(value, Stored) else value  # noqa: S301 - see the module

    def _store(self) -> Any:
        from farandole._native import store  # noqa: PLC0415 - as in `below`

        return store.Store(self.url)


def sweep(runs_path: str) -> None:
    """Deletes files of jobs with killed drivers. A living driver has a mark in its job's directory.

    Directories without a mark, as of versions that left none, are deleted when they are a week old.

    Args:
        runs_path: URL of the directory of all runs.
    """
    from farandole._native.store import Store as NativeStore  # noqa: PLC0415 - as in `below`

    runs = NativeStore(runs_path)
    # a store that cannot be tidied is told of by the job that writes there
    with contextlib.suppress(OSError):
        for name, _, _, is_directory in runs.look(""):
            if is_directory and name.startswith(_PREFIX) and _is_left(runs, name):
                runs.delete_all(name)


def _is_left(runs: Any, name: str) -> bool:
    files = [path for path, _ in runs.list(name)]
    if any(path.rpartition("/")[2].startswith(_USE) for path in files):
        return runs.child(name).is_free()
    ages = [time.time() - (runs.stat(path)[2] or time.time()) for path in files]
    return bool(ages) and min(ages) > _WEEK


def _mark(url: str) -> Mark | None:
    from farandole._native.store import Store as NativeStore  # noqa: PLC0415 - as in `below`
    from farandole.stores.marks import Mark  # noqa: PLC0415 - as above

    name = NativeStore(url).share(_LASTS)
    return None if name is None else Mark(url, name, _LASTS)


def call(spill: Spill, packed: bytes) -> Any:
    """Calls a pickled function in its worker; a large result stays in the store."""
    function: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] = pickle.loads(packed)  # noqa: S301 - Spark's closure
    del packed
    fn, args, kwargs = function
    value = fn(*args, **kwargs)
    answer = pickling.dumps(value)
    if len(answer) <= LIMIT:
        return value
    del value
    return spill.put(answer)


def call_stored(spill: Spill, stored: Stored) -> Any:
    """Like `call`, of a function that is itself in the store."""
    return call(spill, spill.take(stored))
