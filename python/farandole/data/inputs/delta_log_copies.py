# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Local copies of the logs of Delta tables, for stores whose credentials deltalake does not take:
tokens of Google Cloud Storage that a function returns. The native store reads the log with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING, Final

from farandole._native import store as native
from farandole.common.scratch_directories import temporary_directory
from farandole.stores.durable_writes import read_if_present

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG_DIRECTORY: Final = "_delta_log"
_LOG_DIRECTORIES: Final = (
    LOG_DIRECTORY,
    f"{LOG_DIRECTORY}/_sidecars",
    f"{LOG_DIRECTORY}/_staged_commits",
)
_LAST_CHECKPOINT_NAME: Final = "_last_checkpoint"
_VERSION_PATTERN: Final = re.compile(r"(\d{20})\..*")
_DELETION_VECTOR_PATTERN: Final = re.compile(r"(?:[^/]+/)*deletion_vector_[0-9a-f-]{36}\.bin")


@contextlib.contextmanager
def hold_log_copy(url: str, *, whole: bool) -> Iterator[Path]:
    """Copies the log of a table to a directory that exists inside the context.

    Args:
        url: URL of the table.
        whole: Whether to copy all versions, or those since the last checkpoint.

    Raises:
        OSError: The log cannot be read.
    """
    store = native.Store(url)
    oldest = 0 if whole else _last_checkpoint_version(store)
    with temporary_directory() as directory:
        for part in _LOG_DIRECTORIES:
            (directory / part).mkdir()
            for name, _, modified, is_directory in store.list_directory(part):
                number = _VERSION_PATTERN.fullmatch(name)
                if is_directory or (number is not None and int(number[1]) < oldest):
                    continue
                path = directory / part / name
                path.write_bytes(store.read(f"{part}/{name}"))
                if modified is not None:  # versions are chosen by it
                    os.utime(path, (modified, modified))
        yield directory


def copy_deletion_vectors(url: str, directory: Path) -> None:
    """Copies the files with deletion vectors of a table.

    Args:
        url: URL of the table.
        directory: The copy of its log.

    Raises:
        OSError: A file cannot be read.
    """
    store = native.Store(url)
    for name, _ in store.list():
        if _DELETION_VECTOR_PATTERN.fullmatch(name) is not None and ".." not in name.split("/"):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(name))


def _last_checkpoint_version(store: native.Store) -> int:
    """Returns the version of the newest checkpoint that the log names; 0 without one."""
    text = read_if_present(store, f"{LOG_DIRECTORY}/{_LAST_CHECKPOINT_NAME}")
    if text is None:
        return 0
    try:
        found = json.loads(text)["version"]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0
