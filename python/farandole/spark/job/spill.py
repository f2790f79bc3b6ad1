# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sends objects that are too large for Spark's closures and rows through a store, by the hash of
their content.

A job has its own directory there, which is removed with the job. Its files are unpickled, so a file
is used only if it has the hash that Spark transferred, like the closures and rows of the job.
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
from farandole.stores.run_names import SPILL_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.stores.lease_files import LeaseFile
    from farandole.stores.store import Store
    from farandole.stores.store_options import StorageOptions

MAX_INLINE_PICKLE_BYTES: Final = 16 << 20
"""Largest number of bytes of a pickle that is sent without a store."""
_USE_FILE_PREFIX: Final = "_use-"
_UNLEASED_LIFETIME: Final = 7 * 24 * 3600.0
_LEASE_DURATION: Final = 3600.0
"""Seconds after which a driver's lease expires for other drivers, unless it is renewed."""
_LEASE_FILE_BY_URL: dict[str, LeaseFile | None] = {}
"""Lease files of this driver in the directories of its jobs, by URL."""


@dataclass(frozen=True)
class SpilledFile:
    """A file in a job's directory.

    Attributes:
        name: SHA-256 of its content, which is its file's name, too.
        size: Its bytes.
    """

    name: str
    size: int


@dataclass(frozen=True)
class JobSpillDirectory:
    """A job's directory in a store; unpickling one puts the store's options in force.

    Attributes:
        url: The directory.
        options: Options of the store.
    """

    url: str
    options: StorageOptions | None = None

    @classmethod
    def create_in_store(cls, store: Store | str) -> JobSpillDirectory:
        """Returns a new directory in the own directory of jobs among the runs of a store.

        Args:
            store: A store, or its URL.
        """
        from farandole.stores.store import Store  # noqa: PLC0415 - only jobs that are given one

        made = Store.create(store) if isinstance(store, str) else store
        runs = made.to_remote("spill")
        spills_url = f"{runs.runs_path}/{SPILL_DIRECTORY}"
        delete_abandoned_spills(spills_url)
        spill = cls(f"{spills_url}/{uuid.uuid4().hex}", runs.storage_options)
        _LEASE_FILE_BY_URL[spill.url] = _create_lease_file(spill.url)
        return spill

    def write_hashed_bytes(self, data: bytes) -> SpilledFile:
        """Writes data atomically, under the hash of its content."""
        name = hashlib.sha256(data).hexdigest()
        self._native_store().write(name, data)
        return SpilledFile(name, len(data))

    def read_hashed_bytes(self, stored: SpilledFile) -> bytes:
        """Reads the data that `write_hashed_bytes` has written.

        Raises:
            ValueError: The file is not the one that was written.
        """
        data = self._native_store().read(stored.name)
        if hashlib.sha256(data).hexdigest() != stored.name:
            raise ValueError(
                f"{self.url}/{stored.name} differs from the file that the job wrote: {len(data)} "
                f"of {stored.size} bytes"
            )
        return data

    def write_file(self, name: str, data: bytes) -> None:
        """Writes a file of the job's directory."""
        self._native_store().write(name, data)

    def read_file(self, name: str) -> bytes:
        """Reads a file of the job's directory."""
        return self._native_store().read(name)

    def list_files(self, folder: str) -> list[str]:
        """Returns the files of a folder of the job's directory, sorted; an empty list if there is
        no such folder.
        """
        return [name for name, _ in self._native_store().list(folder)]

    def delete_directory(self) -> None:
        """Deletes the job's directory with all files, and its lease file."""
        lease_file = _LEASE_FILE_BY_URL.pop(self.url, None)
        self._native_store().delete_all()
        if lease_file is not None:
            lease_file.delete_if_held()

    def pack_call(self, packed: bytes) -> bytes:
        """Returns a pickled `(fn, args, kwargs)`. If the call or its result is large, it is passed
        through the store.
        """
        if len(packed) <= MAX_INLINE_PICKLE_BYTES:
            return pickling.pickle_by_value((call_packed, (self, packed), {}))
        return pickling.pickle_by_value((call_spilled, (self, self.write_hashed_bytes(packed)), {}))

    def load_result(self, value: Any) -> Any:
        """Returns a result of a packed call, from the store if it was passed through the store."""
        if not isinstance(value, SpilledFile):
            return value
        return pickle.loads(self.read_hashed_bytes(value))  # noqa: S301 - see the module

    def _native_store(self) -> Any:
        from farandole._native import store  # noqa: PLC0415 - only jobs that are given a store

        return store.Store(self.url)


def delete_abandoned_spills(spills_url: str) -> None:
    """Deletes files of jobs with killed drivers. A running driver has a lease file in the directory
    of its job.

    A driver that is killed before it has written its lease file leaves a directory without one,
    which is deleted when it is a week old.

    Args:
        spills_url: URL of the directory that contains only the directories of jobs.
    """
    from farandole._native.store import Store as NativeStore  # noqa: PLC0415 - only jobs that are given a store

    spills = NativeStore(spills_url)
    # If the store fails, the job that writes to the store reports the error.
    with contextlib.suppress(OSError):
        for name, _, _, is_directory in spills.list_directory(""):
            if is_directory and _is_abandoned(spills, name):
                spills.delete_all(name)


def _is_abandoned(spills: Any, name: str) -> bool:
    files = [path for path, _ in spills.list(name)]
    if any(path.rpartition("/")[2].startswith(_USE_FILE_PREFIX) for path in files):
        return spills.open_child(name).is_free()
    ages = [time.time() - (spills.stat(path)[2] or time.time()) for path in files]
    return bool(ages) and min(ages) > _UNLEASED_LIFETIME


def _create_lease_file(url: str) -> LeaseFile | None:
    from farandole._native.store import Store as NativeStore  # noqa: PLC0415 - only jobs that are given a store
    from farandole.stores.lease_files import LeaseFile  # noqa: PLC0415 - as above

    name = NativeStore(url).mark_in_use(_LEASE_DURATION)
    return None if name is None else LeaseFile(url, name, _LEASE_DURATION)


def call_packed(spill: JobSpillDirectory, packed: bytes) -> Any:
    """Calls a pickled function in its worker; a large result stays in the store."""
    function: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] = pickle.loads(packed)  # noqa: S301 - Spark's closure
    del packed
    fn, args, kwargs = function
    value = fn(*args, **kwargs)
    answer = pickling.pickle_by_value(value)
    if len(answer) <= MAX_INLINE_PICKLE_BYTES:
        return value
    del value
    return spill.write_hashed_bytes(answer)


def call_spilled(spill: JobSpillDirectory, stored: SpilledFile) -> Any:
    """Like `call_packed`, of a function that is itself in the store."""
    return call_packed(spill, spill.read_hashed_bytes(stored))
