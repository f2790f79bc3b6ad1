# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A store as an fsspec file system, for pandas, pyarrow and other users of fsspec."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

try:
    from fsspec import AbstractFileSystem
    from fsspec.spec import AbstractBufferedFile
# fsspec comes with torch, pandas and pyspark's helpers; without it there is no `Store.fs`
except ImportError:
    AbstractFileSystem = AbstractBufferedFile = object

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreFileSystem(AbstractFileSystem):  # pyright: ignore[reportGeneralTypeIssues]
    """fsspec over the native store: paths are URLs, or local paths; credentials are those the
    stores were given.

    Args:
        storage: the store's options; they travel with a pickle of this, as they do with the
            store's.
        **options: options of fsspec.

    Raises:
        ImportError: fsspec is not installed.
    """

    protocol = "farandole"
    cachable = False

    def __init__(self, storage: Any = None, **options: Any) -> None:
        if AbstractFileSystem is object:
            raise ImportError("Store.fs needs the package fsspec: pip install fsspec")
        super().__init__(storage=storage, **options)

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> str | list[str]:
        if isinstance(path, list):
            return [one.rstrip("/") or "/" for one in path]
        return path.rstrip("/") or "/"

    @staticmethod
    def _store_and_name(path: str) -> tuple[native.Store, str]:
        directory, _, name = native.full_path(path).rstrip("/").rpartition("/")
        if directory.endswith(("/", ":")):  # the path is a whole bucket, or the root
            return native.Store(path), ""
        return native.Store(directory), name

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type; raises `FileNotFoundError` when nothing is there."""
        store, name = self._store_and_name(path)
        _name, size, modified, is_directory = store.stat(name)
        return self._file_entry(path.rstrip("/"), size, modified, is_directory)

    def exists(self, path: str, **_: Any) -> bool:
        """Returns whether something is there; a store that cannot be asked is an error."""
        return self._kind_if_present(path) is not None

    def isfile(self, path: str) -> bool:
        """Returns whether a file is there; errors as in `exists`."""
        return self._kind_if_present(path) == "file"

    def isdir(self, path: str) -> bool:
        """Returns whether a directory is there; errors as in `exists`."""
        return self._kind_if_present(path) == "directory"

    def _kind_if_present(self, path: str) -> str | None:
        try:
            return self.info(path)["type"]
        except FileNotFoundError:
            return None

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Returns the entries of a directory, or the file itself."""
        base = path.rstrip("/")
        items = native.Store(path).list_directory()
        if not items:
            found = self.info(path)
            items = (
                [] if found["type"] == "directory" else [("", found["size"], found["mtime"], False)]
            )
        described = [
            self._file_entry(f"{base}/{name}" if name else base, size, modified, is_directory)
            for name, size, modified, is_directory in items
        ]
        return described if detail else [one["name"] for one in described]

    @staticmethod
    def _file_entry(
        name: str, size: int, modified: float | None, is_directory: bool
    ) -> dict[str, Any]:
        kind = "directory" if is_directory else "file"
        return {
            "name": name,
            "size": None if is_directory else size,
            "type": kind,
            "mtime": modified,
        }

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Returns the bytes of a file; negative positions count from its end."""
        store, name = self._store_and_name(path)
        if start is None and end is None:
            return store.read(name)
        size = store.size(name)
        first, last, _step = slice(start, end).indices(size)
        return store.read_range(name, first, max(first, last))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Writes a file so that no reader sees half of it."""
        store, name = self._store_and_name(path)
        if mode != "create":
            store.write(name, value)
        elif not store.create_if_absent(name, value):
            raise FileExistsError(path)

    def rm_file(self, path: str) -> None:
        """Deletes a file."""
        store, name = self._store_and_name(path)
        store.delete(name)

    _rm = rm_file

    def rm(
        self,
        path: str | Sequence[str],
        recursive: bool = False,
        maxdepth: int | None = None,  # noqa: ARG002
    ) -> None:
        """Deletes files, or with `recursive` everything below directories."""
        for each_path in [path] if isinstance(path, str) else path:
            if recursive:
                native.Store(each_path).delete_all()
            self.rm_file(each_path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copies a file; within a directory, the store copies it itself."""
        source, name = self._store_and_name(path1)
        target, copy = self._store_and_name(path2)
        if source.url == target.url:
            source.copy(name, copy)
        else:
            target.write(copy, source.read(name))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Does nothing: directories come with their files."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: directories come with their files."""

    def created(self, path: str) -> Any:
        """Like `modified`: a file is never changed, only written again."""
        return self.modified(path)

    def modified(self, path: str) -> Any:
        """Returns the time at which a file was written, in UTC."""
        from datetime import UTC, datetime  # noqa: PLC0415 - rarely needed

        seconds = self.info(path)["mtime"]
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,  # noqa: ARG002 - a file appears when it is closed
        cache_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        if mode == "rb":
            return _RangeReadFile(
                self, path, mode, block_size or 4 << 20, cache_options=cache_options
            )
        if mode in ("wb", "xb"):
            if mode == "xb" and self.exists(path):
                raise FileExistsError(path)
            return _WriteOnCloseFile(self, path, "create" if mode == "xb" else "overwrite")
        raise ValueError(
            "files of a store can only be read or written as a whole, not opened with mode "
            f"{mode!r}: {path}"
        )


class _RangeReadFile(AbstractBufferedFile):  # pyright: ignore[reportGeneralTypeIssues]
    """A file read by ranges."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


class _WriteOnCloseFile(io.BytesIO):
    """A file that appears when it is closed; with mode `create` only if there is none then."""

    def __init__(self, fs: StoreFileSystem, path: str, mode: str) -> None:
        super().__init__()
        self._fs, self._path, self._mode = fs, path, mode

    def close(self) -> None:
        """Writes it, once."""
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._fs.pipe_file(self._path, data, self._mode)

    def __del__(self) -> None:
        """Does not write a file that was not closed, because it may be incomplete."""

    def __exit__(self, kind: object, *rest: object) -> None:
        """Writes the file, unless the block failed."""
        if kind is None:
            self.close()
        else:
            super().close()
