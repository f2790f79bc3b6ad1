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
complete. Their members are stored without compression, so an archive that unpacks to more than it
has is refused before anything is unpacked.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole._native import store as native

    Fault = Callable[[str, bytes], str | None]

PREVIOUS_SUFFIX = ".previous"
_UNSUPPORTED_SYNC_ERRNOS = (errno.EINVAL, errno.ENOTSUP)
_UNSUPPORTED_LINK_ERRNOS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_ENCRYPTED_FLAG = 1
"""Bit of the flags of an archive's member."""
_DIRECTORY_END = b"PK\5\6"
"""Begin of an archive's last record, whose bytes 10 and 11 are the number of members."""
_LARGE_COUNT = 0xFFFF
"""Number in that record if another record has the number."""
_temporary_numbers = itertools.count(1)
_log = logging.getLogger("farandole")


class DurableFileOperations:
    """The operations of a file system that matter here."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory whose parent is there."""
        with contextlib.suppress(FileExistsError):
            path.mkdir()

    def write_new_file(self, path: Path, data: bytes) -> None:
        """Writes a new file."""
        with path.open("xb") as file:
            file.write(data)

    def fsync_path(self, path: Path) -> None:
        """Returns when a file's content, or a directory's entries, are on the disk."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:
            if not is_present_directory(path):
                raise
            # In a directory of mode 0733, this user may create names and cannot open it. Then all
            # file systems are synced.
            os.sync()
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such call for directories.
            if error.errno not in _UNSUPPORTED_SYNC_ERRNOS or not is_present_directory(path):
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


_LOCAL_FILES = DurableFileOperations()


def write_durably(
    store: native.Store,
    name: str,
    data: bytes,
    *,
    keeps: bool = False,
    disk: DurableFileOperations = _LOCAL_FILES,
) -> None:
    """Writes a file. After a loss of power at any moment, the file is complete, or it has its
    previous content.

    Args:
        store: directory of the run.
        name: name of the file, directly in it.
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
    directory: Path, name: str, data: bytes, *, keeps: bool, disk: DurableFileOperations
) -> None:
    missing = itertools.takewhile(
        lambda path: not is_path_present(path), (directory, *directory.parents)
    )
    for created in reversed(list(missing)):
        disk.make_directory(created)
        disk.fsync_path(created.parent)
    # Names of unfinished files end so everywhere in a store.
    fresh, second = (
        directory / f"{name}#{os.getpid()}{next(_temporary_numbers):06}" for _ in range(2)
    )
    path = directory / name
    try:
        disk.write_new_file(fresh, data)
        disk.fsync_path(fresh)
        if keeps and is_path_present(path):
            try:
                disk.link_file(path, second)
            except OSError as error:
                if error.errno not in _UNSUPPORTED_LINK_ERRNOS:
                    raise
                # Without links, only the previous checkpoint is there for a moment.
                disk.rename_file(path, directory / (name + PREVIOUS_SUFFIX))
            else:
                disk.rename_file(second, directory / (name + PREVIOUS_SUFFIX))
        disk.rename_file(fresh, path)
        disk.fsync_path(directory)
    except BaseException as error:
        for unfinished in (fresh, second):
            # The caller needs the first error, and a later write does not use these names.
            with contextlib.suppress(OSError):
                disk.remove_file(unfinished)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # An error of a descriptor, such as of a full disk, names no file.
            error.filename = str(path)
        raise


def is_path_present(path: Path) -> bool:
    """Returns whether there is something at a path; a link counts if its target is there.

    Unlike `Path.exists`, an error other than "no such file" is not taken for absence.

    Args:
        path: on a local file system.

    Raises:
        OSError: the path cannot be examined, for example because a mount does not answer.
    """
    return _mode_if_present(path) is not None


def is_present_file(path: Path) -> bool:
    """Returns whether a path is a file, or a link to one.

    Python 3.14 and later take every error for absence in `Path.is_file`; here only "no such file"
    is.

    Args:
        path: on a local file system.

    Raises:
        OSError: the path cannot be examined.
    """
    mode = _mode_if_present(path)
    return mode is not None and stat.S_ISREG(mode)


def is_present_directory(path: Path) -> bool:
    """Like `is_present_file`, for a directory.

    Args:
        path: on a local file system.

    Raises:
        OSError: the path cannot be examined.
    """
    mode = _mode_if_present(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode_if_present(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_if_present(store: native.Store, name: str) -> bytes | None:
    """Returns the content of a file; `None` if there is no such file.

    Args:
        store: the directory.
        name: path of the file below it.

    Raises:
        OSError: the file cannot be read. It may exist.
    """
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def checkpoint_and_previous_names(name: str) -> tuple[str, str]:
    """Returns the names of the files with the last and the previous content of a checkpoint.

    Args:
        name: name of the checkpoint.
    """
    return name, name + PREVIOUS_SUFFIX


def fsync_directory_tree(directory: Path, disk: DurableFileOperations = _LOCAL_FILES) -> None:
    """Returns when a directory, and everything in it, is on the disk, whichever process wrote it.

    Args:
        directory: an existing directory.
        disk: does the work.
    """
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            disk.fsync_path(Path(folder) / name)
        disk.fsync_path(Path(folder))
    for above in directory.parents:
        # a directory of another user, which existed before
        with contextlib.suppress(PermissionError):
            disk.fsync_path(above)


def read_intact_checkpoint(
    store: native.Store, name: str, fault: Fault | None = None
) -> bytes | None:
    """Returns a checkpoint if it exists and is intact; logs a warning if it is damaged.

    Args:
        store: directory of the run.
        name: name of the file.
        fault: takes the name and the content, and returns a further reason to refuse the file.
    """
    data = read_if_present(store, name)
    return None if data is None else _content_if_intact(store, name, data, fault)


def _content_if_intact(
    store: native.Store, name: str, data: bytes, fault: Fault | None
) -> bytes | None:
    """Like `read_intact_checkpoint`, of a file that was read."""
    damage = find_damage(data)
    if damage is not None:
        _log.warning(
            "the checkpoint is damaged and is not used: %s/%s: %s", store.url, name, damage
        )
        return None
    damage = None if fault is None else fault(name, data)
    if damage is not None:
        _log.warning("the checkpoint is not used: %s/%s: %s", store.url, name, damage)
        return None
    return data


def recover_last_checkpoint(
    store: native.Store,
    name: str,
    fault: Fault | None = None,
    restore: Callable[[bytes], None] | None = None,
) -> bytes | None:
    """Returns the checkpoint to continue from: the last checkpoint, or the previous checkpoint if
    the last is damaged or missing.

    The previous checkpoint then replaces a damaged checkpoint, so that the next write does not keep
    the damaged file.

    Args:
        store: directory of the run.
        name: name of the checkpoint.
        fault: as in `read_intact_checkpoint`.
        restore: writes the previous checkpoint as the last one; default: `write_durably`.

    Returns:
        The bytes of the checkpoint; `None` if there is no checkpoint, for a fresh run.

    Raises:
        OSError: a checkpoint cannot be read. It may exist, so this is no fresh run.
        ValueError: there are checkpoints, and none of them can be used.
    """
    data = read_if_present(store, name)
    found = None if data is None else _content_if_intact(store, name, data, fault)
    if found is not None:
        return found
    last_is_there = data is not None
    data = read_if_present(store, name + PREVIOUS_SUFFIX)
    found = None if data is None else _content_if_intact(store, name + PREVIOUS_SUFFIX, data, fault)
    if found is None:
        if not last_is_there and data is None:
            return None
        raise ValueError(
            "the run has no usable checkpoint (see the warnings): choose another run_id, or move "
            f"{store.url} elsewhere to start the run from the beginning"
        )
    _log.warning(
        "%s/%s %s: the run continues from the one before, %s%s",
        store.url,
        name,
        "cannot be used" if last_is_there else "is missing",
        name,
        PREVIOUS_SUFFIX,
    )
    if restore is None:
        write_durably(store, name, found)
    else:
        restore(found)
    return found


def find_damage(data: bytes) -> str | None:
    """Returns the defect of a checkpoint; `None` if it is complete.

    Args:
        data: data of the file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            unpacked = sum(one.file_size for one in members)
            if unpacked > len(data):
                return f"its {len(data)} bytes unpack to {unpacked}, but checkpoints are stored"
            for member in members:
                if member.flag_bits & _ENCRYPTED_FLAG or member.compress_type != zipfile.ZIP_STORED:
                    return (
                        f"{member.filename} in it is compressed or encrypted, and no checkpoint is"
                    )
            end = data.rindex(_DIRECTORY_END)
            recorded = int.from_bytes(data[end + 10 : end + 12], "little")
            if recorded not in (len(members), _LARGE_COUNT):
                return f"it has {len(members)} of the {recorded} members that it had"
            broken = file.testzip()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the bytes are in memory, so every other error of the archive's reader is damage
        return f"{len(data)} bytes that are no whole archive ({error})"
    return None if broken is None else f"{broken} in it does not match its checksum"
