# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits of elastic states in a store, from which a job that is started again continues.

    <prefix>/runs/<run_id>/checkpoint             the last commit that was written
    <prefix>/runs/<run_id>/checkpoint.previous    the one before, which is used if the last one is
                                                  damaged

One rank writes, in its own thread. Training waits for it only at the end. While a commit is being
written, others are skipped, so a slow store does not slow down training. That rank holds a lease of
the run, so that no other job or fit writes there at the same time.
"""

from __future__ import annotations

import io
import json
import logging
import re
import threading
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from farandole.common.suspension import may_be_suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.stores.remote_store import RemoteStore
    from farandole.stores.store import Store

_log = logging.getLogger("farandole")


class StoredCommits:
    """Writes commits and reads the last one back.

    Args:
        store: Store for the commits, or its URL.
        run_id: Names the directory there. A job that starts again has the same one.
        every: Commits from one that is written to the next.

    Raises:
        ValueError: `every` is below 1, the store cannot be had, or it keeps no runs.
    """

    def __init__(self, store: Store | str, run_id: str, every: int) -> None:
        from farandole.stores import run_lease  # noqa: PLC0415 - few states have a store
        from farandole.stores.store import Store  # noqa: PLC0415 - as above

        if every < 1:
            raise ValueError(f"every must be at least 1: {every}")
        made = Store.create(store) if isinstance(store, str) else store
        if not made.saving_runs():
            raise ValueError(
                f"the store keeps no runs, because it was made with save_runs=False: {made!r}"
            )
        self.run_id = run_id
        self._remote = made.to_remote(run_id)
        self._lease = run_lease.RunLease(made.get_run_path(run_id), run_id)
        self._commits_per_write = every
        self._last_started = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._written_contents: CommitContents | None = None
        self.loaded_contents: CommitContents | None = None
        """Contents of the commit from which this start of the job has continued."""

    @property
    def directory_url(self) -> str | None:
        """The directory."""
        return self._remote.run_path

    def acquire_lease(self) -> None:
        """Takes the lease of the run, before this process reads or writes commits.

        Raises:
            RunInUseError: Another job or a fit holds it.
            FarandoleEnvironmentError: The driver has the secret of the store, and does not give
                this process its key.
        """
        self._lease.acquire_lease()
        self._keyed_run_store()

    def hand_over_lease(self) -> None:
        """Leaves the lease to the process of this job that is rank 0 now."""
        self._lease.hand_over_lease()

    def release_lease(self) -> None:
        """Gives the lease back, after the last commit."""
        self._lease.release_lease()

    def is_write_due(self, commits: int) -> bool:
        """Returns whether a commit must be written now.

        Args:
            commits: Its number.
        """
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and commits - self._last_started >= self._commits_per_write

    def is_commit_written(self, commits: int) -> bool:
        """Returns whether a commit was written, once `wait` has returned.

        Args:
            commits: Its number.
        """
        return self._last_started == commits and self._failure is None

    def has_progressed(self) -> bool:
        """Returns whether a commit was written, and its contents differ from the commit from which
        this start of the job has continued. The launcher limits the number of starts, so a value
        that changes in each start, such as a time, does not requeue a job for ever.
        """
        written = self._written_contents
        return written is not None and written != self.loaded_contents

    def start_commit_write(
        self,
        commits: int,
        plain: dict[str, Any],
        pack: Callable[[], bytes],
        done: Callable[[], None],
    ) -> None:
        """Writes a commit in another thread.

        Args:
            commits: Its number.
            plain: Its attributes that are no arrays or tensors.
            pack: Makes its bytes, there.
            done: Called there when the bytes are made, or could not be.
        """
        self._last_started, self._failure = commits, None

        def write_commit() -> None:
            try:
                try:
                    data = pack()
                finally:
                    done()
                run = self._keyed_run_store()
                self._lease.renew_or_raise()
                run.write_checkpoint(run.checkpoint_filename, data)
                self._written_contents = describe_contents(data, plain)
            except Exception as error:  # noqa: BLE001 - training continues; its end raises it
                self._failure = error
                _log.warning(
                    "commit %d could not be written to %s: %s", commits, self.directory_url, error
                )

        self._thread = threading.Thread(target=write_commit, name="farandole-commits", daemon=True)
        self._thread.start()

    def wait_for_commit_write(self) -> Exception | None:
        """Waits for the commit in progress; returns the error of the last one, if any."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def read_last_commit(self) -> bytes | None:
        """Returns the commit to continue from; `None` where there is none.

        Raises:
            ValueError: There are some, and none of them can be used.
        """
        return self._keyed_run_store().read_checkpoint_to_resume()

    def _keyed_run_store(self) -> RemoteStore:
        """Returns the paths of the run, with the key that signs its commits.

        If the driver has the secret, this process requests the key from it once.

        Raises:
            FarandoleEnvironmentError: The driver does not answer.
        """
        from farandole.stores import run_keys  # noqa: PLC0415 - few states have a store

        if self._remote.run_key is None and run_keys.must_request_key_from_driver():
            self._remote = replace(self._remote, run_key=run_keys.request_run_key(self.run_id))
        return self._remote


CommitContents = tuple[str, tuple[tuple[int, int], ...]]
"""Plain values of a commit as text, and checksum and size in bytes of each array or tensor."""

_ARRAY_NAME: Final = re.compile(r"\d+\.npy|.+/data/\d+")
"""Names in the archives of NumPy and torch."""


def describe_contents(data: bytes, plain: dict[str, Any]) -> CommitContents | None:
    """Returns the contents of a commit, in a job that may be suspended; `None` in others, and if
    the contents cannot be read: the commit itself is not affected.

    Args:
        data: As for `commit_contents`.
        plain: As for `commit_contents`.
    """
    if not may_be_suspended():
        return None
    try:
        return commit_contents(data, plain)
    except Exception as error:  # noqa: BLE001 - of any kind of state
        _log.warning("progress of the job is unknown: %s", error)
        return None


def commit_contents(data: bytes, plain: dict[str, Any]) -> CommitContents:
    """Returns the contents of a commit: equal for states that are equal. Only the archive's
    directory is read, so this is quick.

    Archives of equal states may differ in other bytes, such as in pickles.

    Args:
        data: Result of `_pack_commit` of a state, which is a zip archive.
        plain: Attributes in it that are no arrays or tensors.

    Raises:
        BadZipFile: It is not an archive.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        arrays = [
            (part.CRC, part.file_size)
            for part in archive.infolist()
            if _ARRAY_NAME.fullmatch(part.filename)
        ]
    return repr(_comparable_form(plain)), tuple(sorted(arrays))


def _comparable_form(value: Any) -> Any:
    """Returns a form of a value whose `repr` is equal for equal values: dicts in order of their
    keys, objects by their type.
    """
    if isinstance(value, dict):
        pairs = [(repr(key), _comparable_form(entry)) for key, entry in value.items()]
        return {"dict": sorted(pairs, key=lambda pair: pair[0])}
    if isinstance(value, list | tuple):
        return [_comparable_form(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    return type(value).__name__


def pack_commit_archive(arrays: Sequence[Any], plain: dict[str, Any]) -> bytes:
    """Returns a zip archive of arrays and plain values.

    Args:
        arrays: NumPy arrays, or values that `numpy.asarray` converts.
        plain: Values that JSON can encode.
    """
    import numpy as np  # noqa: PLC0415 - few states have a store

    buffer = io.BytesIO()
    named = {f"{number}": np.asarray(array) for number, array in enumerate(arrays)}
    np.savez(
        buffer,
        allow_pickle=False,
        plain=np.frombuffer(json.dumps(plain).encode(), np.uint8),
        **named,
    )
    return buffer.getvalue()


def unpack_commit_archive(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Inverts `pack`; runs no code.

    Args:
        data: Result of `pack`. Arrays of types that NumPy does not know come back as their
            bytes.

    Raises:
        DamagedFileError: The bytes are not what `pack` returned, or unpack to more than they are.
    """
    import numpy as np  # noqa: PLC0415 - as above

    from farandole.stores import durable_writes, small_files  # noqa: PLC0415 - few states have a store

    source_name = "a commit"
    with small_files.raise_as_damaged_file(source_name):
        damage = durable_writes.find_damage(data)
        if damage is not None:
            raise ValueError(damage)
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            plain = small_files.parse_json(found["plain"].tobytes(), source_name)
            return [found[f"{number}"] for number in range(len(found.files) - 1)], plain


def is_json_value(value: Any) -> bool:
    """Returns whether a value is unchanged by writing it as JSON and reading it."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def refuse_unstorable_values(
    values: dict[str, Any], is_plain: Callable[[Any], bool], allowed: str
) -> None:
    """Refuses attributes that a store cannot give back without running code.

    Args:
        values: By name.
        is_plain: Whether a value can go to a store.
        allowed: Description of the allowed values, for messages.

    Raises:
        TypeError: Naming the attribute.
    """
    for name, value in values.items():
        if not is_plain(value):
            raise TypeError(
                f"state.{name} is {type(value).__module__}.{type(value).__qualname__}, which "
                f"cannot be read from a store without running code: use {allowed}"
            )
