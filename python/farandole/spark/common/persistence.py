# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Saving and loading estimators and models with Spark ML's own `write()` and `read()`, alone or in a pipeline.

A saved object is a directory:

    metadata/    Spark ML's JSON: class, uid, parameters
    data/        Parquet with rows of (part, chunk, bytes): named parts, cut in pieces

Spark writes and reads it wherever Spark has a file system for the path's scheme; where it has none, as on most
installations for `s3://`, `gs://` and `az://`, the native store does, with the environment's credentials. Both see
the same files.
"""

# ruff: noqa: N802, PLC0415, SLF001 - Spark ML's names and its own helpers; loaded where it is needed

from __future__ import annotations

import io
import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.util import DefaultParamsReader, MLReadable, MLReader, MLWriter

from farandole._native import store as native

if TYPE_CHECKING:
    from pyspark.ml.param import Params
    from pyspark.sql import SparkSession

T = TypeVar("T", bound=MLReadable)

_CHUNK = 16 << 20
_DATA = "part string, chunk int, bytes binary"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_NEVER_SAVED = ("backend", "store")
_log = logging.getLogger("farandole")


class Place:
    """A directory that Spark reads and writes, or else the native store.

    Args:
        path: of the directory.
        session: Spark's.
    """

    def __init__(self, path: str, session: SparkSession) -> None:
        self._path = path.rstrip("/")
        self._session = session
        self._store = None if _spark_knows(path, session) else native.Store(self._path)

    @property
    def by_spark(self) -> bool:
        """Whether Spark has a file system for it."""
        return self._store is None

    def clear(self) -> None:
        """Deletes what is there, where Spark does not."""
        if self._store is not None:
            self._store.delete_all()

    def write(self, metadata: str, parts: dict[str, bytes], *, overwrite: bool) -> None:
        """Writes the whole directory.

        Args:
            metadata: JSON.
            parts: bytes by name.
            overwrite: whether something may be there.

        Raises:
            FileExistsError: something is there.
        """
        rows = [chunk for name, data in parts.items() for chunk in _chunks(name, data)]
        if self._store is None:
            mode = "overwrite" if overwrite else "errorifexists"
            self._session.createDataFrame([(metadata,)], "value string").coalesce(1).write.mode(mode).text(
                f"{self._path}/metadata"
            )
            self._session.createDataFrame(rows, _DATA).coalesce(1).write.mode(mode).parquet(f"{self._path}/data")
            return
        if self._store.exists() and not overwrite:
            raise FileExistsError(f"there is something already, write().overwrite() replaces it: {self._path}")
        self._store.write("data/part-00000.parquet", _parquet(rows))
        self._store.write("data/_SUCCESS", b"")
        self._store.write("metadata/part-00000.txt", metadata.encode() + b"\n")
        self._store.write("metadata/_SUCCESS", b"")

    def metadata(self) -> dict[str, Any]:
        """The JSON that was written.

        Raises:
            FileNotFoundError: nothing was saved there.
        """
        if self._store is None:
            row = self._session.read.text(f"{self._path}/metadata").first()
            text = None if row is None else row[0]
        else:
            names = [name for name, _ in self._store.list("metadata") if "part-" in name]
            text = self._store.read(_below("metadata", names[0])).decode() if names else None
        if text is None:
            raise FileNotFoundError(f"nothing was saved at {self._path}")
        return json.loads(text)

    def parts(self) -> dict[str, bytes]:
        """The parts that were written."""
        if self._store is None:
            rows = [
                (row.part, row.chunk, bytes(row.bytes))
                for row in self._session.read.parquet(f"{self._path}/data").collect()
            ]
        else:
            names = [name for name, _ in self._store.list("data") if name.endswith(".parquet")]
            rows = [row for name in names for row in _rows(self._store.read(_below("data", name)))]
        whole: dict[str, list[tuple[int, bytes]]] = {}
        for part, chunk, data in rows:
            whole.setdefault(part, []).append((chunk, data))
        return {part: b"".join(data for _, data in sorted(chunks)) for part, chunks in whole.items()}


class ParamsWriter(MLWriter):
    """Writes an object with parameters; `parts` says what of it is no JSON.

    Args:
        instance: the object.
    """

    def __init__(self, instance: Params) -> None:
        super().__init__()
        self.instance = instance

    def parts(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Splits the parameters that are set.

        Args:
            values: by name; never backend and store.

        Returns:
            Plain values by name, and parts.
        """
        raise NotImplementedError

    def _handleOverwrite(self, path: str) -> None:
        place = Place(path, self.sparkSession)
        if not place.by_spark:
            place.clear()
        elif not _is_connect(self.sparkSession):
            super()._handleOverwrite(path)  # pyright: ignore[reportAttributeAccessIssue]

    def saveImpl(self, path: str) -> None:
        """Writes the object to a path."""
        instance, session = self.instance, self.sparkSession
        values = {param.name: value for param, value in instance._paramMap.items() if value is not None}
        plain, parts = self.parts({name: value for name, value in values.items() if name not in _NEVER_SAVED})
        metadata = {
            "class": f"{type(instance).__module__}.{type(instance).__name__}",
            "timestamp": round(time.time() * 1000),
            "sparkVersion": session.version,
            "uid": instance.uid,
            "paramMap": plain,
            "defaultParamMap": {param.name: value for param, value in instance._defaultParamMap.items()},
        }
        text = json.dumps(metadata, separators=(",", ":"))
        Place(path, session).write(text, parts, overwrite=self.shouldOverwrite)


class ParamsReader(MLReader[T]):
    """Reads an object with parameters; `restore` says what becomes of its parts.

    Args:
        kind: class of the object.
    """

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind

    def restore(self, loaded: T, parts: dict[str, bytes], path: str) -> None:
        """Sets what is no JSON.

        Args:
            loaded: with its plain parameters.
            parts: as the writer made them.
            path: for messages.
        """
        raise NotImplementedError

    def load(self, path: str) -> T:
        """Reads the object at a path.

        Args:
            path: where it was saved.
        """
        place = Place(path, self.sparkSession)
        metadata = place.metadata()
        loaded: Any = self.kind()
        loaded._resetUid(metadata["uid"])
        known = {name: value for name, value in metadata["paramMap"].items() if loaded.hasParam(name)}
        defaults = {name: value for name, value in metadata["defaultParamMap"].items() if loaded.hasParam(name)}
        DefaultParamsReader.getAndSetParams(loaded, metadata | {"paramMap": known, "defaultParamMap": defaults})
        self.restore(loaded, place.parts(), path)
        return loaded


def warn_of_code(path: str, instead: str = "") -> None:
    """Says that loading runs code.

    Args:
        path: of what is loaded.
        instead: how to do without, in a clause.
    """
    _log.warning("loading from %s runs the code pickled in it: load only what you trust%s", path, instead)


def is_plain(value: Any) -> bool:
    """Whether JSON holds a value as it is."""
    if isinstance(value, list):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


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
