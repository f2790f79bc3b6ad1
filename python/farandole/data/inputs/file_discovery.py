# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files by path, directory or pattern, in any store, with the facts that distinguish their
versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_GLOB_PATTERN = re.compile(r"[*?\[]")
_PREPARED_DATA_FILES = ("_manifest.json", "_preparation.json")
"""One of these is in every directory of prepared data; the second where a preparation has not
ended.
"""


@dataclass(frozen=True)
class SourceFile:
    """One file: its path (local, or a URL), size, and when it was written, in seconds since the
    epoch.
    """

    path: str
    size: int
    modified: float | None

    @property
    def file_version_text(self) -> str:
        """Facts that change when the file changes."""
        return f"{self.path} {self.size} {self.modified}"


@dataclass(frozen=True)
class FilesBelowDirectory:
    """The files of one path, below a directory whose own name means nothing."""

    base: str
    files: list[SourceFile]
    prepared_directories: list[str] = field(default_factory=list)
    """Directories below the base in which Farandole prepared data, relative to it."""


def find_files(path: str) -> FilesBelowDirectory:
    """Returns the meaning of a path.

    Args:
        path: A file, a directory (every file below it, but for names that begin with `_` or `.`),
            or a pattern with `*`, `?`, `[...]`, or `**` for any directories; local or a URL.

    Returns:
        The files, by name.

    Raises:
        FileNotFoundError: There is nothing.
    """
    directory, name = _split_path(path)
    if _path_exists(directory, name):
        base = native.Store(directory)
        item = base.stat(name) if name else (name, 0, None, True)
        if not item[3]:
            return FilesBelowDirectory(
                _display_path(base),
                [SourceFile(_join_path(_display_path(base), name), item[1], item[2])],
            )
        base = base.open_child(name) if name else base
        return _matching_files(base, lambda _: True, f"no files in the directory: {path}")
    if not _GLOB_PATTERN.search(path):
        raise FileNotFoundError(f"no such file or directory: {path}")
    fixed, pattern = _split_glob_prefix(path)
    matches = re.compile(_glob_to_regex(pattern)).fullmatch
    return _matching_files(native.Store(fixed), matches, f"no file matches the pattern: {path}")


def _matching_files(
    base: native.Store, matches: Callable[[str], object], absence: str
) -> FilesBelowDirectory:
    walked = list(_walk_files(base))
    files = [file for relative, file in walked if matches(relative) and not _is_hidden(relative)]
    if not files:
        raise FileNotFoundError(absence)
    return FilesBelowDirectory(_display_path(base), files, _prepared_directories(walked))


def is_prepared_directory(directory: str) -> bool:
    """Returns whether a directory contains prepared data of Farandole, complete or not.

    Args:
        directory: A path or a URL.
    """
    store = native.Store(directory)
    return any(store.exists(name) for name in _PREPARED_DATA_FILES)


def is_glob_pattern(path: str) -> bool:
    """Returns whether a path has `*`, `?` or `[` in it, and nothing has that name."""
    return bool(_GLOB_PATTERN.search(path)) and not _path_exists(*_split_path(path))


def is_file_path(path: str) -> bool:
    """Returns whether a path is the path of a file."""
    directory, name = _split_path(path)
    return (
        bool(name) and _path_exists(directory, name) and not native.Store(directory).stat(name)[3]
    )


def file_extensions(files: Iterable[SourceFile]) -> set[str]:
    """Returns the file extensions in lower case; compression suffixes are removed first."""
    names = (file.path.rpartition("/")[2].lower() for file in files)
    plain = (re.sub(r"\.(gz|bz2|zst|lz4|br)$", "", name) for name in names)
    return {name.rpartition(".")[2] if "." in name else "" for name in plain}


def arrow_filesystem(path: str) -> Any:
    """Returns the filesystem of pyarrow in which a file is.

    Args:
        path: Path or URL.
    """
    from pyarrow import fs  # noqa: PLC0415 - a process that only trains needs none

    if path.startswith("/"):
        return fs.LocalFileSystem()
    from farandole.stores.filesystem import StoreFileSystem  # noqa: PLC0415 - only for other stores

    return fs.PyFileSystem(fs.FSSpecHandler(StoreFileSystem()))


def _split_path(path: str) -> tuple[str, str]:
    whole = native.full_path(path).rstrip("/")
    directory, _, name = whole.rpartition("/")
    if directory.endswith(("/", ":")):
        return whole, ""
    # The credentials of a directory may not be valid for the directory above it.
    has_own_options = native.configured_options(whole) != native.configured_options(directory)
    if has_own_options and native.Store(whole).list_directory():
        return whole, ""
    return directory, name


def _path_exists(directory: str, name: str) -> bool:
    try:
        store = native.Store(directory)
        return bool(store.list_directory()) if not name else store.exists(name)
    except ValueError:
        if _GLOB_PATTERN.search(directory):
            return False
        raise


def _display_path(store: native.Store) -> str:
    return store.local_path or store.url


def _join_path(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}"


def _walk_files(base: native.Store, below: str = "") -> Iterator[tuple[str, SourceFile]]:
    for name, size, modified, is_directory in base.list_directory(below):
        relative = f"{below}/{name}" if below else name
        if is_directory:
            yield from _walk_files(base, relative)
        else:
            yield relative, SourceFile(_join_path(_display_path(base), relative), size, modified)


def _prepared_directories(walked: Iterable[tuple[str, SourceFile]]) -> list[str]:
    pairs = (relative.rpartition("/") for relative, _ in walked)
    return sorted({directory for directory, _, name in pairs if name in _PREPARED_DATA_FILES})


def _is_hidden(relative: str) -> bool:
    # `_a=1` is a partition of a column whose name begins so.
    return any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in relative.split("/")
    )


def _split_glob_prefix(path: str) -> tuple[str, str]:
    whole = native.full_path(path)
    scheme, _, rest = whole.partition("://")
    parts = rest.split("/")
    first = next(index for index, part in enumerate(parts) if _GLOB_PATTERN.search(part))
    return f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])


def _glob_to_regex(pattern: str) -> str:
    """Returns a pattern as a regular expression: `*` and `?` stop at directories, `**` does not."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            out, at = out + ".*", at + 2
        elif pattern[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif pattern[at] == "?":
            out, at = out + "[^/]", at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = pattern[at + 1 : end].replace("\\", "\\\\")
            out, at = out + f"[{'^' + inside[1:] if inside[0] == '!' else inside}]", end + 1
        else:
            out, at = out + re.escape(pattern[at]), at + 1
    return out
