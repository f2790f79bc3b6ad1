# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Files by path, directory or pattern, in any store, with the facts that distinguish their
versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farandole._native import store as native

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAGIC = re.compile(r"[*?\[]")
_PREPARED = ("_manifest.json", "_preparation.json")
"""One of these is in every directory of prepared data; the second where a preparation has not
ended.
"""


@dataclass(frozen=True)
class File:
    """One file: its path (local, or a URL), size, and when it was written, in seconds since the
    epoch.
    """

    path: str
    size: int
    modified: float | None

    @property
    def version(self) -> str:
        """Facts that change when the file changes."""
        return f"{self.path} {self.size} {self.modified}"


@dataclass(frozen=True)
class Found:
    """The files of one path, below a directory whose own name means nothing."""

    base: str
    files: list[File]
    prepared: list[str] = field(default_factory=list)
    """Directories below the base in which Farandole prepared data, relative to it."""


def find(path: str) -> Found:
    """Returns the meaning of a path.

    Args:
        path: A file, a directory (every file below it, but for names that begin with `_` or `.`),
            or a pattern with `*`, `?`, `[...]`, or `**` for any directories; local or a URL.

    Returns:
        The files, by name.

    Raises:
        FileNotFoundError: There is nothing.
    """
    directory, name = _split(path)
    if _exists(directory, name):
        base = native.Store(directory)
        item = base.stat(name) if name else (name, 0, None, True)
        if not item[3]:
            return Found(_shown(base), [File(_join(_shown(base), name), item[1], item[2])])
        base = base.child(name) if name else base
        walked = list(_walk(base))
        files = [file for relative, file in walked if not _hidden(relative)]
        if not files:
            raise FileNotFoundError(f"no files in the directory: {path}")
        return Found(_shown(base), files, _prepared(walked))
    if not _MAGIC.search(path):
        raise FileNotFoundError(f"no such file or directory: {path}")
    fixed, pattern = _fixed_part(path)
    matches = re.compile(_translated(pattern)).fullmatch
    base = native.Store(fixed)
    walked = list(_walk(base))
    files = [file for relative, file in walked if matches(relative) and not _hidden(relative)]
    if not files:
        raise FileNotFoundError(f"no file matches the pattern: {path}")
    return Found(_shown(base), files, _prepared(walked))


def is_prepared(directory: str) -> bool:
    """Returns whether a directory contains prepared data of Farandole, complete or not.

    Args:
        directory: A path or a URL.
    """
    store = native.Store(directory)
    return any(store.exists(name) for name in _PREPARED)


def is_pattern(path: str) -> bool:
    """Returns whether a path has `*`, `?` or `[` in it, and nothing has that name."""
    return bool(_MAGIC.search(path)) and not _exists(*_split(path))


def is_file(path: str) -> bool:
    """Returns whether a path is the path of a file."""
    directory, name = _split(path)
    return bool(name) and _exists(directory, name) and not native.Store(directory).stat(name)[3]


def extensions(files: Iterable[File]) -> set[str]:
    """Returns the suffixes of the names, in lower case, without those of compression."""
    names = (file.path.rpartition("/")[2].lower() for file in files)
    plain = (re.sub(r"\.(gz|bz2|zst|lz4|br)$", "", name) for name in names)
    return {name.rpartition(".")[2] if "." in name else "" for name in plain}


def _split(path: str) -> tuple[str, str]:
    whole = native.full_path(path).rstrip("/")
    directory, _, name = whole.rpartition("/")
    return (whole, "") if directory.endswith(("/", ":")) else (directory, name)


def _exists(directory: str, name: str) -> bool:
    try:
        store = native.Store(directory)
        return bool(store.look()) if not name else store.exists(name)
    except ValueError:
        if _MAGIC.search(directory):
            return False
        raise


def _shown(store: native.Store) -> str:
    return store.local_path or store.url


def _join(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}"


def _walk(base: native.Store, below: str = "") -> Iterator[tuple[str, File]]:
    for name, size, modified, is_directory in base.look(below):
        relative = f"{below}/{name}" if below else name
        if is_directory:
            yield from _walk(base, relative)
        else:
            yield relative, File(_join(_shown(base), relative), size, modified)


def _prepared(walked: Iterable[tuple[str, File]]) -> list[str]:
    pairs = (relative.rpartition("/") for relative, _ in walked)
    return sorted({directory for directory, _, name in pairs if name in _PREPARED})


def _hidden(relative: str) -> bool:
    # `_a=1` is a partition of a column whose name begins so.
    return any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in relative.split("/")
    )


def _fixed_part(path: str) -> tuple[str, str]:
    whole = native.full_path(path)
    scheme, _, rest = whole.partition("://")
    parts = rest.split("/")
    first = next(index for index, part in enumerate(parts) if _MAGIC.search(part))
    return f"{scheme}://{'/'.join(parts[:first])}", "/".join(parts[first:])


def _translated(pattern: str) -> str:
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
