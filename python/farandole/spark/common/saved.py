# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""How a saved estimator or model lies in its directory, and how it is replaced without a moment in which none is there.

    metadata/    Spark ML's JSON: class, uid, parameters; it names the directory of the data
    data/        Parquet with rows of (part, chunk, bytes): named parts, cut in pieces
    data-2/      the same, every second time that the directory is overwritten

Spark writes and reads it wherever Spark has a file system for the path's scheme; where it has none, as on most
installations for `s3://`, `gs://` and `az://`, the native store does, with the environment's credentials. Both see
the same files.

Object stores have no rename, so the new object goes to the data directory that is not in use, then the metadata is
written, and at last the old data is deleted. A failure before the metadata leaves the old object. Spark itself deletes
old metadata before it writes new; a failure right there leaves data without metadata. For that moment the data holds
the metadata, too, as a part of its own, with the size of every other part: a reader that finds no metadata takes the
newest data that is complete.
"""

# ruff: noqa: PLC0415, SLF001 - loaded where it is needed; the JVM behind a session

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any

from farandole._native import store as native

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHUNK = 16 << 20
_DATA = "part string, chunk int, bytes binary"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_SLOTS = ("data", "data-2")
_SLOT = "farandoleData"
"""Key of the metadata that names the data directory; before there was one, it was the first."""
_SELF = "farandole.metadata"
"""The part that repeats the metadata."""


class Place:
    """The directory of a saved object, which Spark reads and writes, or else the native store.

    Args:
        path: of the directory.
        session: Spark's.
    """

    def __init__(self, path: str, session: SparkSession) -> None:
        self._path = path.rstrip("/")
        self._files = _BySpark(self._path, session) if _spark_knows(path, session) else _ByStore(self._path)

    def write(self, metadata: dict[str, Any], parts: dict[str, bytes], *, overwrite: bool) -> None:
        """Writes the object; what was there before stays until the new one is complete.

        Args:
            metadata: what JSON can write.
            parts: bytes by name.
            overwrite: whether something may be there.

        Raises:
            FileExistsError: something is there.
        """
        if not overwrite and self._files.exists():
            raise FileExistsError(f"there is something already, write().overwrite() replaces it: {self._path}")
        used = self._used()
        slot = _SLOTS[1] if used == _SLOTS[0] else _SLOTS[0]
        whole = {**metadata, _SLOT: slot}
        sizes = {name: len(data) for name, data in parts.items()}
        itself = json.dumps({"metadata": whole, "sizes": sizes}).encode()
        self._files.write_data(
            slot, [one for name, data in {**parts, _SELF: itself}.items() for one in _chunks(name, data)]
        )
        self._files.write_metadata(json.dumps(whole, separators=(",", ":")))
        self._files.keep_only(slot)

    def read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The metadata and the parts of the object.

        Raises:
            FileNotFoundError: nothing was saved there, or it is damaged.
        """
        metadata = self._metadata()
        if metadata is not None:
            rows = self._files.data(str(metadata.get(_SLOT, _SLOTS[0])))
            if rows is not None:
                parts = _parts(rows)
                parts.pop(_SELF, None)
                return metadata, parts
            raise FileNotFoundError(
                f"the data of what was saved is gone: {self._path}/{metadata.get(_SLOT, _SLOTS[0])}"
            )
        found = self._complete()
        if not found:
            raise FileNotFoundError(f"nothing was saved at {self._path}")
        return max(found, key=lambda one: int(one[0].get("timestamp", 0)))

    def _metadata(self) -> dict[str, Any] | None:
        text = self._files.metadata()
        return None if not text else json.loads(text)

    def _used(self) -> str | None:
        """The data directory that must not be touched."""
        metadata = self._metadata()
        if metadata is not None:
            return str(metadata.get(_SLOT, _SLOTS[0]))
        found = self._complete()
        return str(max(found, key=lambda one: int(one[0].get("timestamp", 0)))[0][_SLOT]) if found else None

    def _complete(self) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
        """Objects whose data is whole and says what metadata belongs to it."""
        found = []
        for slot in _SLOTS:
            parts = _parts(self._files.data(slot) or [])
            told = json.loads(parts.pop(_SELF, b"{}"))
            if told and told["sizes"] == {name: len(data) for name, data in parts.items()}:
                found.append((told["metadata"], parts))
        return found


class _BySpark:
    """What Spark's own readers and writers do; those of a Connect session are all that it has."""

    def __init__(self, path: str, session: SparkSession) -> None:
        self._path = path
        self._session = session

    def exists(self) -> bool:
        if _is_connect(self._session):
            return self.metadata() is not None
        files, path = self._hadoop("")
        return files.exists(path)

    def metadata(self) -> str | None:
        from pyspark.errors import AnalysisException

        try:
            row = self._session.read.text(f"{self._path}/metadata").first()
        except AnalysisException as error:
            if _is_missing(error):
                return None
            raise
        return None if row is None else row[0]

    def data(self, slot: str) -> list[tuple[str, int, bytes]] | None:
        from pyspark.errors import AnalysisException

        try:
            rows = self._session.read.schema(_DATA).parquet(f"{self._path}/{slot}").collect()
        except AnalysisException as error:
            if _is_missing(error):
                return None
            raise
        return [(row.part, row.chunk, bytes(row.bytes)) for row in rows]

    def write_data(self, slot: str, rows: list[tuple[str, int, bytearray]]) -> None:
        # One file, which Spark's committer shows as a whole.
        frame = self._session.createDataFrame(rows, _DATA).coalesce(1)
        frame.write.mode("overwrite").parquet(f"{self._path}/{slot}")

    def write_metadata(self, text: str) -> None:
        frame = self._session.createDataFrame([(text,)], "value string").coalesce(1)
        frame.write.mode("overwrite").text(f"{self._path}/metadata")

    def keep_only(self, slot: str) -> None:
        if _is_connect(self._session):
            # A Connect client can delete nothing; it can leave nothing in there.
            for other in _SLOTS:
                if other != slot and self.data(other):
                    self.write_data(other, [])
            return
        files, path = self._hadoop("")
        for one in files.listStatus(path):
            if one.getPath().getName() not in (slot, "metadata"):
                files.delete(one.getPath(), True)

    def _hadoop(self, name: str) -> tuple[Any, Any]:
        """Hadoop's file system, and a path below the directory."""
        classic: Any = self._session
        path = classic._jvm.org.apache.hadoop.fs.Path(f"{self._path}/{name}" if name else self._path)
        return path.getFileSystem(classic._jsparkSession.sessionState().newHadoopConf()), path


class _ByStore:
    """What the native store does."""

    def __init__(self, path: str) -> None:
        self._store = native.Store(path)

    def exists(self) -> bool:
        return self._store.exists()

    def metadata(self) -> str | None:
        name = self._metadata_file()
        return None if name is None else self._store.read(name).decode()

    def data(self, slot: str) -> list[tuple[str, int, bytes]] | None:
        if not self._store.exists(slot):
            return None
        names = [_below(slot, name) for name, _ in self._store.list(slot) if name.endswith(".parquet")]
        return [row for name in names for row in _rows(self._store.read(name))]

    def write_data(self, slot: str, rows: list[tuple[str, int, bytearray]]) -> None:
        self._store.delete_all(slot)
        self._store.write(f"{slot}/part-00000.parquet", _parquet(rows))
        self._store.write(f"{slot}/_SUCCESS", b"")

    def write_metadata(self, text: str) -> None:
        # One write, seen as a whole, in place of the one file that is there, which Spark may have named otherwise.
        self._store.write(self._metadata_file() or "metadata/part-00000.txt", text.encode() + b"\n")
        self._store.write("metadata/_SUCCESS", b"")

    def keep_only(self, slot: str) -> None:
        for name, _ in self._store.list():
            if name.partition("/")[0] not in (slot, "metadata"):
                self._store.delete(name)

    def _metadata_file(self) -> str | None:
        if not self._store.exists("metadata"):
            return None
        return next((_below("metadata", name) for name, _ in self._store.list("metadata") if "part-" in name), None)


def _is_missing(error: Exception) -> bool:
    return "PATH_NOT_FOUND" in str(error) or "does not exist" in str(error)


def _is_connect(session: SparkSession) -> bool:
    return type(session).__module__.startswith("pyspark.sql.connect")


def _spark_knows(path: str, session: SparkSession) -> bool:
    scheme = _SCHEME.match(path)
    if scheme is None or _is_connect(session):
        return True
    classic: Any = session
    configuration = classic._jsparkSession.sessionState().newHadoopConf()
    try:
        classic._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme[1], configuration)
    except Exception:  # noqa: BLE001 - whatever keeps it from loading
        return False
    return True


def _below(directory: str, name: str) -> str:
    return name if name.startswith(f"{directory}/") else f"{directory}/{name}"


def _chunks(part: str, data: bytes) -> list[tuple[str, int, bytearray]]:
    starts = range(0, max(len(data), 1), _CHUNK)
    return [(part, index, bytearray(data[start : start + _CHUNK])) for index, start in enumerate(starts)]


def _parts(rows: list[tuple[str, int, bytes]]) -> dict[str, bytes]:
    whole: dict[str, list[tuple[int, bytes]]] = {}
    for part, chunk, data in rows:
        whole.setdefault(part, []).append((chunk, data))
    return {part: b"".join(data for _, data in sorted(chunks)) for part, chunks in whole.items()}


def _parquet(rows: list[tuple[str, int, bytearray]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part, chunk, data = zip(*rows, strict=True) if rows else ((), (), ())
    columns = [pa.array(part, pa.string()), pa.array(chunk, pa.int32()), pa.array(map(bytes, data), pa.binary())]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, names=["part", "chunk", "bytes"]), file)
    return file.getvalue()


def _rows(data: bytes) -> list[tuple[str, int, bytes]]:
    import pyarrow.parquet as pq

    return [(row["part"], row["chunk"], row["bytes"]) for row in pq.read_table(io.BytesIO(data)).to_pylist()]
