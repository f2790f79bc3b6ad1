# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What is too large for Spark's closures and rows goes through a store, by the hash of its content.

A job has a directory of its own there, which ends with the job. What is read from it is unpickled, so it is read only
where its hash came by Spark, as the closures and rows of the job itself do.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farandole.spark.common.store import StorageOptions, Store

LIMIT: Final = 16 << 20
"""Bytes of a pickle that travel without a store."""


@dataclass(frozen=True)
class Stored:
    """Something that lies in a job's directory.

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
        """A new directory among the runs of a store.

        Args:
            store: A store, or its URL.
        """
        from farandole.spark.common.store import Store  # noqa: PLC0415 - only jobs that are given one

        made = Store.create(store) if isinstance(store, str) else store
        runs = made.to_remote("spill")
        return cls(f"{runs.runs_path}/spill-{uuid.uuid4().hex}", runs.storage_options)

    def put(self, data: bytes) -> Stored:
        """Writes something, whole or not at all."""
        name = hashlib.sha256(data).hexdigest()
        self._store().write(name, data)
        return Stored(name, len(data))

    def take(self, stored: Stored) -> bytes:
        """Reads what `put` has written.

        Raises:
            ValueError: The file is not what was written.
        """
        data = self._store().read(stored.name)
        if hashlib.sha256(data).hexdigest() != stored.name:
            raise ValueError(f"{self.url}/{stored.name} is not what the job wrote: {len(data)} of {stored.size} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the job's directory."""
        self._store().write(name, data)

    def read(self, name: str) -> bytes:
        """Reads a file of the job's directory."""
        return self._store().read(name)

    def names(self, folder: str) -> list[str]:
        """The files of a folder of the job's directory, sorted; none where there is no such folder."""
        store = self._store()
        return [name for name, _ in store.list(folder)] if store.exists(folder) else []

    def clear(self) -> None:
        """Deletes everything the job has left."""
        self._store().delete_all()

    def carried(self, packed: bytes) -> bytes:
        """A pickled `(fn, args, kwargs)` whose large result, and which itself when large, travels by the store."""
        if len(packed) <= LIMIT:
            return cloudpickle.dumps((call, (self, packed), {}))
        return cloudpickle.dumps((call_stored, (self, self.put(packed)), {}))

    def fetched(self, value: Any) -> Any:
        """A result of a carried function, whichever way it came."""
        return pickle.loads(self.take(value)) if isinstance(value, Stored) else value  # noqa: S301 - see the module

    def _store(self) -> Any:
        from farandole._native import store  # noqa: PLC0415 - as in `below`

        return store.Store(self.url)


def call(spill: Spill, packed: bytes) -> Any:
    """Calls a pickled function in its worker; a large result stays in the store."""
    function: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] = pickle.loads(packed)  # noqa: S301 - Spark's closure
    del packed
    fn, args, kwargs = function
    value = fn(*args, **kwargs)
    answer = cloudpickle.dumps(value)
    if len(answer) <= LIMIT:
        return value
    del value
    return spill.put(answer)


def call_stored(spill: Spill, stored: Stored) -> Any:
    """As `call`, of a function that is itself in the store."""
    return call(spill, spill.take(stored))
