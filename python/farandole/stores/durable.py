# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checkpoints that survive a loss of power, and the use of the previous one if the last one is
damaged.

On a file system, a new checkpoint is written to a temporary name and synchronized. Then the
previous checkpoint is renamed to its second name, the new checkpoint is renamed to its final name,
and the directory is synchronized:

    checkpoint             the last checkpoint
    checkpoint.previous    the checkpoint before

Object stores show a file only when it is complete. There, the store copies the previous checkpoint,
then the new checkpoint is written. On HDFS this process copies it, and the settings of the data
nodes decide whether files survive a loss of power.

Checkpoints of PyTorch, Lightning and Keras are zip archives, whose checksums show whether a file is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native import store as native

    Fault = Callable[[str, bytes], str | None]

PREVIOUS_SUFFIX = ".previous"
_UNSUPPORTED_SYNC_ERRNOS = (errno.EINVAL, errno.ENOTSUP)
_temporary_numbers = itertools.count(1)
_log = logging.getLogger("farandole")


class DurableFiles:
    """The operations of a file system that matter here."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory whose parent is there."""
        with contextlib.suppress(FileExistsError):
            path.mkdir()

    def write_new_file(self, path: Path, data: bytes) -> None:
        """Writes a new file."""
        with path.open("xb") as file:
            file.write(data)

    def sync_path(self, path: Path) -> None:
        """Returns when a file's content, or a directory's entries, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such call for directories.
            if error.errno not in _UNSUPPORTED_SYNC_ERRNOS or not path.is_dir():
                raise
        finally:
            os.close(descriptor)

    def link_file(self, path: Path, name: Path) -> None:
        """Gives a file a second name."""
        os.link(path, name)

    def rename_file(self, path: Path, name: Path) -> None:
        """Gives a file another name, which stood for another file until then."""
        path.replace(name)

    def remove_file(self, path: Path) -> None:
        """Deletes a file; a missing one is no error."""
        path.unlink(missing_ok=True)


_LOCAL_FILES = DurableFiles()


def write_durably(
    store: native.Store,
    name: str,
    data: bytes,
    *,
    keeps: bool = False,
    disk: DurableFiles = _LOCAL_FILES,
) -> None:
    """Writes a file that is whole, or the one before, after a loss of power at any moment.

    Args:
        store: directory of the run.
        name: of the file, directly in it.
        data: the whole content.
        keeps: whether the file that has the name now is kept as `<name>.previous`.
        disk: does the work on local file systems.

    Raises:
        OSError: it cannot be written; the message names the path.
    """
    if store.local_path is not None:
        _write_locally(Path(store.local_path), name, data, keeps=keeps, disk=disk)
        return
    if keeps:
        with contextlib.suppress(FileNotFoundError):  # the first checkpoint
            store.copy(name, name + PREVIOUS_SUFFIX)
    store.write(name, data)


def _write_locally(
    directory: Path, name: str, data: bytes, *, keeps: bool, disk: DurableFiles
) -> None:
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    for one in reversed(missing):
        disk.make_directory(one)
        disk.sync_path(one.parent)
    # Names of unfinished files end so everywhere in a store.
    fresh, second = (
        directory / f"{name}#{os.getpid()}{next(_temporary_numbers):06}" for _ in range(2)
    )
    path = directory / name
    try:
        disk.write_new_file(fresh, data)
        disk.sync_path(fresh)
        if keeps and path.exists():
            try:
                disk.link_file(path, second)
            # a file system without links: for a moment there is the one before alone
            except OSError:
                disk.rename_file(path, directory / (name + PREVIOUS_SUFFIX))
            else:
                disk.rename_file(second, directory / (name + PREVIOUS_SUFFIX))
        disk.rename_file(fresh, path)
        disk.sync_path(directory)
    except BaseException:
        disk.remove_file(fresh)
        disk.remove_file(second)
        raise


def sync_tree(directory: Path, disk: DurableFiles = _LOCAL_FILES) -> None:
    """Returns when a directory, and everything in it, is on the disk, whichever process wrote it.

    Args:
        directory: that is there.
        disk: does the work.
    """
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            disk.sync_path(Path(folder) / name)
        disk.sync_path(Path(folder))
    for above in directory.parents:
        # a directory of another user, which existed before
        with contextlib.suppress(PermissionError):
            disk.sync_path(above)


def read_intact(store: native.Store, name: str, fault: Fault | None = None) -> bytes | None:
    """Returns a checkpoint if it exists and is intact; logs a warning if it is damaged.

    Args:
        store: directory of the run.
        name: name of the file.
        fault: takes the name and the content, and returns a further reason to refuse the file.
    """
    data = store.read(name) if store.exists(name) else None
    if data is None:
        return None
    why = find_damage(data)
    if why is not None:
        _log.warning("the checkpoint is damaged and is not used: %s/%s: %s", store.url, name, why)
        return None
    why = None if fault is None else fault(name, data)
    if why is not None:
        _log.warning("the checkpoint is not used: %s/%s: %s", store.url, name, why)
        return None
    return data


def read_last_intact(store: native.Store, name: str, fault: Fault | None = None) -> bytes | None:
    """Returns the checkpoint to continue from: the last checkpoint, or the previous checkpoint if
    the last is damaged or missing.

    The previous checkpoint then replaces a damaged checkpoint, so that the next write does not keep
    the damaged file.

    Args:
        store: directory of the run.
        name: name of the checkpoint.
        fault: as in `read_intact`.

    Returns:
        The bytes of the checkpoint; `None` if there is no checkpoint, for a fresh run.

    Raises:
        ValueError: there are checkpoints, and none of them can be used.
    """
    found = read_intact(store, name, fault)
    if found is not None:
        return found
    there = store.exists(name)
    found = read_intact(store, name + PREVIOUS_SUFFIX, fault)
    if found is None:
        if there or store.exists(name + PREVIOUS_SUFFIX):
            raise ValueError(
                "the run has no usable checkpoint (see the warnings): choose another run_id, or "
                f"delete {store.url} to start the run from the beginning"
            )
        return None
    state = "cannot be used" if there else "is missing"
    _log.warning(
        "%s/%s %s: the run continues from the one before, %s%s",
        store.url,
        name,
        state,
        name,
        PREVIOUS_SUFFIX,
    )
    write_durably(store, name, found)
    return found


def find_damage(data: bytes) -> str | None:
    """Returns the defect of a checkpoint; `None` if it is complete.

    Args:
        data: of the file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            broken = file.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        return f"{len(data)} bytes that are no whole archive ({error})"
    return None if broken is None else f"{broken} in it does not match its checksum"
