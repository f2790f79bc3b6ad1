# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The directory of a saved estimator or model, and how one save replaces another.

    metadata/part-*             one JSON object: class, uid, parameters, and "save": its data,
                                number and format
    data/save=<id>/*.parquet    rows of (part, chunk, bytes): named parts, cut in pieces

An overwriting save adds before it deletes. The new data goes to its own directory. The new metadata
follows, as one file that appears as a whole. From then on the new save is valid: readers use the
metadata with the highest number. The old files are deleted last. If a step fails, one complete save
remains, and the next `overwrite` deletes the rest.

Saves of earlier versions have no "save" in their metadata, and their files are directly in `data/`.
They are read, too. Earlier versions can read the files that are written here: a directory
`save=<id>` is a partition to Spark. A save of a newer format is refused.

Spark writes and reads if it has a file system for the path's scheme. Otherwise, for example for
`s3://`, `gs://` and `az://` on most installations, the native store does, with the credentials of
the environment. Both see the same files.

The native reader reads the Parquet files of local directories and of the native store. A damaged or
hostile file may state wrong sizes. Therefore the memory of the rows is limited to `_BASE_ROW_BYTES`
plus `_MAX_ROW_BYTES_RATIO` times the file's size, and to four times as much during decoding. New
files are written without compression and dictionaries, so their content is not larger than the
files. Earlier versions wrote dictionaries, which store equal chunks once: a model of a gigabyte of
zeros may be a file below a megabyte. `FARANDOLE_SAVED_BYTES` raises the limit for such a file. On
other file systems, Spark's own reader reads the files in its JVMs, whose heaps have a limit.
"""

# ruff: noqa: PLC0415, SLF001 - loaded where it is needed; Spark's own helpers

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole import _variables as variables
from farandole._native import reader
from farandole._native import store as native
from farandole._native.settings import read_setting
from farandole.spark.job.session_adapter import is_connect
from farandole.stores import durable_writes
from farandole.stores.small_files import (
    MAX_TABLE_FILE_BYTES,
    DamagedFileError,
    parse_json,
    raise_as_damaged_file,
    read_small_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

FORMAT_VERSION = 1
"""The version of these files."""
_CHUNK_BYTES = 16 << 20
_BASE_ROW_BYTES = 128 << 20
_MAX_ROW_BYTES_RATIO = 32
"""Largest ratio of the bytes of a directory's rows to the bytes of its files, in addition to
`_BASE_ROW_BYTES`; `SAVED_BYTES_VARIABLE` allows more. Earlier versions wrote files with Snappy,
which makes a value at most 22 times smaller, unless a dictionary makes it even smaller."""
SAVED_BYTES_VARIABLE = variables.SAVED_BYTES
"""Bytes that the rows of a directory may take in any case."""
_BUDGET_ERROR_PATTERN = re.compile(r"byte budget|a budget of \d+ bytes")
"""Pattern of the native reader's errors about its memory limit. Such an error does not mean that
the file is damaged.
"""
_PARQUET_OPTIONS = {
    "compression": "uncompressed",
    "parquet.enable.dictionary": "false",
    # A row group for each row, so that a reader needs memory for one. Older Parquet ignores the
    # first.
    "parquet.block.row.count.limit": "1",
    "parquet.page.row.count.limit": "1",
}
"""Options of Spark for the Parquet files."""
_DATA_SCHEMA = "part string, chunk int, bytes binary"
_DATA_COLUMNS = ["part", "chunk", "bytes"]
_SCHEME_PATTERN = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_OWN_NAME_PATTERN = re.compile(r"(metadata|data)/(part-|save=|[._])")
"""Pattern of the names that a save creates, and also one that was cut off before its metadata."""
_MAX_NAMES_SHOWN = 5
_FILE_SCHEME_PATTERN = re.compile(r"^file:(//)?(?=/)")
_log = logging.getLogger("farandole")

_Row = tuple[str, int, bytes]


class SaveDirectory:
    """A directory that holds a saved object.

    Args:
        path: of the directory.
        session: Spark's.
    """

    def __init__(self, path: str, session: SparkSession) -> None:
        self._path = path.rstrip("/")
        self._files: _StoreSaveFiles | _SparkSaveFiles = (
            _SparkSaveFiles(self._path, session)
            if _spark_has_scheme(path, session)
            else _StoreSaveFiles(native.Store(self._path))
        )

    def write_object_version(
        self, metadata: dict[str, Any], parts: dict[str, bytes], *, overwrite: bool
    ) -> None:
        """Writes the object; one that was there before can be read until the new one can.

        Args:
            metadata: as Spark ML has it.
            parts: bytes by name.
            overwrite: whether something may be there.

        Raises:
            FileExistsError: something is there, and may not be; or it is of another class, and
                cannot be deleted; or it is no saved object.
        """
        if not overwrite and self._files.has_object():
            raise FileExistsError(
                f"the path already exists; write().overwrite() replaces it: {self._path}"
            )
        before = _parse_save_metadata(self._files.metadata_lines())
        old = self._files.deletable_names() if overwrite else []
        foreign = [name for name in old or () if _OWN_NAME_PATTERN.match(name) is None]
        if foreign and not before:
            raise FileExistsError(
                f"no saved object is there, but other files are, which overwrite() would delete "
                f"({', '.join(foreign[:_MAX_NAMES_SHOWN])}): delete them, or choose another path: "
                f"{self._path}"
            )
        if old is None and any(one["class"] != metadata["class"] for one in before):
            raise FileExistsError(
                "Spark Connect cannot delete the old object there, which is of another class "
                f"({before[0]['class']}): delete it, or choose another path: {self._path}"
            )
        identity = uuid.uuid4().hex
        data = f"data/save={identity}"
        number = 1 + max((_save_number(one) for one in before), default=0)
        text = json.dumps(
            {**metadata, "save": {"data": data, "number": number, "format": FORMAT_VERSION}},
            separators=(",", ":"),
        )
        self._files.write_rows(
            data, [chunk for name, part in parts.items() for chunk in _split_chunks(name, part)]
        )
        self._synchronize_directory()  # a loss of power must not leave metadata without its data
        self._files.write_metadata_file(identity, text)
        self._synchronize_directory()
        for name in old or []:
            try:
                self._files.delete_entry(name)
            except Exception as error:  # noqa: BLE001 - of Spark, its file systems and stores
                _log.warning(
                    "the new object is saved at %s; of the one before, %s could not be deleted, "
                    "and the next overwriting save tries again: %s",
                    self._path,
                    name,
                    error,
                )

    def _synchronize_directory(self) -> None:
        """Syncs written data on a file system of this host, before any step that needs it."""
        directory = self._files.local_directory()
        if directory is not None and durable_writes.is_present_directory(directory):
            durable_writes.fsync_directory_tree(directory)

    def read_metadata(self, kind: str | None = None) -> dict[str, Any]:
        """Returns the JSON of the last complete save.

        Args:
            kind: class whose save is preferred, where an overwriting save of another one was cut
                off.

        Raises:
            FileNotFoundError: nothing was saved there.
            DamagedFileError: the metadata is damaged.
            ValueError: a newer version of Farandole saved it.
        """
        lines = self._files.metadata_lines()
        saves = _parse_save_metadata(lines)
        if not saves and lines:
            raise DamagedFileError(f"damaged: {self._path}/metadata: no line describes a save")
        if not saves:
            raise FileNotFoundError(f"nothing was saved at {self._path}")
        last = max(saves, key=lambda one: (one["class"] == kind, _save_number(one)))
        version = last.get("save", {}).get("format", FORMAT_VERSION)
        if version > FORMAT_VERSION:
            raise ValueError(
                f"the object saved at {self._path} has format {version}, and this version of "
                f"Farandole reads up to format {FORMAT_VERSION}: load it with the version that "
                f"saved it, "
                "or a newer one"
            )
        return last

    def read_parts(self, metadata: dict[str, Any]) -> dict[str, bytes]:
        """Returns the parts that belong to metadata.

        Args:
            metadata: as `read_metadata` returned it.

        Raises:
            ValueError: the metadata names a place outside of the directory's data.
        """
        directory = metadata.get("save", {}).get("data", "data")
        if re.fullmatch(r"data(/save=[0-9a-f]+)?", directory) is None:
            raise ValueError(
                f"the metadata at {self._path} names no directory of its data: {directory!r}"
            )
        whole: dict[str, list[tuple[int, bytes]]] = {}
        for part, chunk, data in self._files.read_rows(directory):
            whole.setdefault(part, []).append((chunk, data))
        # Each part's chunks are released when it is joined.
        return {part: b"".join(data for _, data in sorted(whole.pop(part))) for part in list(whole)}


class _StoreSaveFiles:
    """The reader and writer of the directory through the native store, whose files appear as a
    whole; names are relative to the directory.
    """

    def __init__(self, store: native.Store) -> None:
        self._store = store

    def has_object(self) -> bool:
        """Returns whether an object is there, or a part of one."""
        return self._store.exists()

    def deletable_names(self) -> list[str]:
        """Returns all names that an overwriting save deletes at its end."""
        # Metadata goes first: once it is gone, nothing names the old data.
        return sorted(
            (name for name, _ in self._store.list()),
            key=lambda name: not name.startswith("metadata/"),
        )

    def local_directory(self) -> Path | None:
        """Returns the directory if a file system of this host has it; the directory need not exist
        yet.
        """
        return None if self._store.local_path is None else Path(self._store.local_path)

    def metadata_lines(self) -> list[str]:
        """Returns the lines of all metadata."""
        names = [name for name, _ in self._store.list() if name.startswith("metadata/part-")]
        texts = []
        for name in names:
            data = read_small_file(self._store, name, MAX_TABLE_FILE_BYTES) or b""
            with raise_as_damaged_file(f"{self._store.url}/{name}"):
                texts.append(data.decode())
        return [line for text in texts for line in text.splitlines()]

    def read_rows(self, directory: str) -> Iterable[_Row]:
        """Yields the rows of the Parquet files directly in a directory."""
        return _read_parquet_rows(self._store, directory)

    def write_rows(self, directory: str, rows: list[tuple[str, int, bytearray]]) -> None:
        """Writes a new directory of Parquet files."""
        self._store.write(f"{directory}/part-00000.parquet", _encode_parquet(rows))

    def write_metadata_file(self, identity: str, text: str) -> None:
        """Adds a file to the metadata, which appears as a whole."""
        self._store.write(f"metadata/part-00000-{identity}.txt", text.encode() + b"\n")

    def delete_entry(self, name: str) -> None:
        """Deletes a file, or a directory with all that is in it."""
        self._store.delete(name)


class _SparkSaveFiles:
    """Like `_StoreSaveFiles` through Spark, whose committed files appear as a whole."""

    def __init__(self, path: str, session: SparkSession) -> None:
        self._path = path
        self._session = session
        self._hadoop: tuple[Any, Any] | None = None
        self._local: native.Store | None = None
        if not is_connect(session):
            classic: Any = session
            root = classic._jvm.org.apache.hadoop.fs.Path
            configuration = classic._jsparkSession.sessionState().newHadoopConf()
            files = root(path).getFileSystem(configuration)
            self._hadoop = files, root
            if files.getUri().getScheme() == "file":
                self._local = native.Store(files.makeQualified(root(path)).toUri().getPath())

    def has_object(self) -> bool:
        if self._hadoop is None:
            return bool(self.metadata_lines())
        files, path = self._hadoop
        return any(files.exists(path(f"{self._path}/{name}")) for name in ("metadata", "data"))

    def deletable_names(self) -> list[str] | None:
        """Like `_StoreSaveFiles.deletable_names`; `None` if nothing can be deleted."""
        if self._hadoop is None:
            return None
        files, path = self._hadoop

        def names_below(directory: str) -> list[str]:
            found = path(f"{self._path}/{directory}" if directory else self._path)
            if not files.exists(found):
                return []
            prefix = f"{directory}/" if directory else ""
            return [prefix + one.getPath().getName() for one in files.listStatus(found)]

        inner = [
            name
            for directory in ("metadata", "data")
            for name in names_below(directory)
            if _is_not_hidden_file(name)
        ]
        return inner + [name for name in names_below("") if name not in ("metadata", "data")]

    def local_directory(self) -> Path | None:
        if self._hadoop is not None:
            # Spark completes a relative path with the directory in which its JVM was started.
            return (
                None
                if self._local is None or self._local.local_path is None
                else Path(self._local.local_path)
            )
        plain = _FILE_SCHEME_PATTERN.sub("", self._path)
        # The server may be on this host. If it is not, or completes the path otherwise, there is
        # nothing of ours here.
        return None if "://" in plain else Path(plain).absolute()

    def metadata_lines(self) -> list[str]:
        from pyspark.errors import AnalysisException

        try:
            return [row[0] for row in self._session.read.text(f"{self._path}/metadata").collect()]
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in str(error):
                return []
            raise

    def read_rows(self, directory: str) -> Iterable[_Row]:
        if self._local is not None:
            return _read_parquet_rows(self._local, directory)
        # Directly in `data` there may be directories of other saves besides.
        found = f"{self._path}/{directory}" + ("/*.parquet" if directory == "data" else "")
        return [
            (row.part, row.chunk, bytes(row.bytes))
            for row in self._session.read.parquet(found).collect()
        ]

    def write_rows(self, directory: str, rows: list[tuple[str, int, bytearray]]) -> None:
        frame = self._session.createDataFrame(rows, _DATA_SCHEMA).coalesce(1)
        frame.write.mode("errorifexists").options(**_PARQUET_OPTIONS).parquet(
            f"{self._path}/{directory}"
        )

    def write_metadata_file(self, identity: str, text: str) -> None:
        del identity  # Spark's names are unique
        frame = self._session.createDataFrame([(text,)], "value string").coalesce(1)
        frame.write.mode("append").text(f"{self._path}/metadata")

    def delete_entry(self, name: str) -> None:
        if self._hadoop is not None:
            files, path = self._hadoop
            files.delete(path(f"{self._path}/{name}"), True)


def _read_parquet_rows(store: native.Store, directory: str) -> Iterator[_Row]:
    """Yields the rows of the Parquet files directly in a directory, one at a time, in bounded
    memory.

    Raises:
        ValueError: the rows take more than the limit; the message names the variable that raises
            it.
    """
    found = [
        (name, size)
        for name, size in store.list()
        if name.rpartition("/")[0] == directory
        and name.endswith(".parquet")
        and _is_not_hidden_file(name)
    ]
    if not found:
        return
    most = max(
        _BASE_ROW_BYTES + _MAX_ROW_BYTES_RATIO * sum(size for _, size in found),
        read_setting(SAVED_BYTES_VARIABLE),
    )
    where = f"{store.url}/{directory}"
    try:
        yield from _decode_rows(store, where, [name for name, _ in found], most)
    except (ValueError, OSError) as error:
        if _BUDGET_ERROR_PATTERN.search(str(error)) is None:
            raise
        raise ValueError(
            f"the rows of {where} take more than files of their size usually hold: {error}. If "
            f"you trust the files and there is memory for them, set {SAVED_BYTES_VARIABLE} to "
            f"the bytes that "
            f"they may take, more than {most}"
        ) from error


def _decode_rows(store: native.Store, where: str, names: list[str], most: int) -> Iterator[_Row]:
    """Like `_read_parquet_rows`, of files that are there."""
    files = reader.Dataset.open_files(store.url, [(name, {}) for name in names])
    rows = reader.Reader(
        files, columns=_DATA_COLUMNS, batch_size=1, shuffle=False, byte_budget=most, threads=1
    )
    kinds = [(one.name, one.dtype, one.shape) for one in rows.columns]
    if kinds != [
        (name, kind, ())
        for name, kind in zip(_DATA_COLUMNS, ("utf8", "int32", "binary"), strict=True)
    ]:
        raise ValueError(f"the columns of {where} are not those of a save: {kinds}")
    taken = 0
    for row in rows.read_epoch(0):
        part, data = _cell_bytes(row, "part"), _cell_bytes(row, "bytes")
        taken += len(part) + len(data)
        if taken > most:
            raise ValueError(f"they take more than the byte budget of {most}")
        yield part.decode(), int.from_bytes(row.column("chunk"), sys.byteorder, signed=True), data


def _cell_bytes(row: reader.Batch, name: str) -> bytes:
    """Returns the value of a column in a batch of one row."""
    bounds, values = row.text_buffers(name)
    first, last = bounds.cast("q")
    return bytes(values[first:last])


def _is_not_hidden_file(name: str) -> bool:
    """Returns whether a file counts: Spark's marks and checksums go with their files."""
    return not name.rpartition("/")[2].startswith(("_", "."))


def _parse_save_metadata(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the objects of Spark ML among the lines; half a line is none."""
    found = []
    for line in lines:
        with contextlib.suppress(DamagedFileError):
            found.append(parse_json(line, "metadata"))
    return [one for one in found if _is_save_metadata(one)]


def _is_save_metadata(metadata: Any) -> bool:
    """Returns whether JSON has the form of the metadata of a save."""
    if not isinstance(metadata, dict):
        return False
    save = metadata.get("save", {})
    return (
        isinstance(metadata.get("class"), str)
        and isinstance(save, dict)
        and isinstance(save.get("data", ""), str)
        and all(type(save.get(name, 0)) is int for name in ("number", "format"))
    )


def _save_number(metadata: dict[str, Any]) -> int:
    return metadata.get("save", {}).get("number", 0)


def _spark_has_scheme(path: str, session: SparkSession) -> bool:
    scheme = _SCHEME_PATTERN.match(path)
    if scheme is None or is_connect(session):
        return True
    classic: Any = session
    configuration = classic._jsparkSession.sessionState().newHadoopConf()
    try:
        classic._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme[1], configuration)
    except Exception:  # noqa: BLE001 - whatever keeps it from loading
        return False
    return True


def _split_chunks(part: str, data: bytes) -> list[tuple[str, int, bytearray]]:
    starts = range(0, max(len(data), 1), _CHUNK_BYTES)
    return [
        (part, index, bytearray(data[start : start + _CHUNK_BYTES]))
        for index, start in enumerate(starts)
    ]


def _encode_parquet(rows: list[tuple[str, int, bytearray]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part, chunk, data = zip(*rows, strict=True) if rows else ((), (), ())
    columns = [
        pa.array(part, pa.string()),
        pa.array(chunk, pa.int32()),
        pa.array(map(bytes, data), pa.binary()),
    ]
    file = io.BytesIO()
    # A row group for each row, so that a reader needs memory for one.
    table = pa.Table.from_arrays(columns, names=_DATA_COLUMNS)
    pq.write_table(table, file, row_group_size=1, compression="none", use_dictionary=False)
    return file.getvalue()
