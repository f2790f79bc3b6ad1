# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`frame_loader`: from a frame to batches of tensors, without an estimator and without prepared data."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from farandole.data.inputs.frames import is_spark
from farandole.data.loader import ParquetLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
GROUP_ROWS = 16384
"""Rows of a row group that is written here."""


def frame_loader(
    frame: Any,
    batch_size: int,
    columns: Sequence[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ParquetLoader:
    """Returns a loader of the rows of a frame.

    The rows are written once, as plain Parquet, to a directory of their own. It is removed when the loader is, or when
    this process ends. Processes that get the loader by pickle read the same files: call `follow_world()` there.

    Args:
        frame: A Spark DataFrame, which its executors write, or any source of `farandole.data.prepare_data`.
        batch_size: Rows of one batch of each rank.
        columns: Which columns; default: all that a batch can hold.
        cache: The directory for the rows, which all processes that read or write them must see; default: the one for
            temporary files. A path or a `file://` URL.
        options: Of `ParquetLoader`.

    Raises:
        ValueError: A column that the frame does not have or has twice, a frame without rows, a URL of a remote store
            as `cache`, or executors on other hosts that write to a disk of their own.
        TypeError: A frame that holds no rows.
    """
    directory = _directory(cache) / f"farandole-frame-{uuid.uuid4().hex}"
    try:
        if is_spark(frame):
            _check(columns, frame.columns)
            chosen = frame if columns is None else frame.select(*map(_quoted, columns))
            rows = _write_from_executors(chosen, directory)
        else:
            rows = None
            _write(frame, columns, directory)
        loader = ParquetLoader(directory, batch_size, columns, **options)
        if rows is not None:
            _expect(rows, loader.dataset.rows, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(loader, _remove, directory, os.getpid())
    return loader


def _directory(cache: str | os.PathLike[str] | None) -> Path:
    """Returns the directory that `cache` means."""
    text = tempfile.gettempdir() if cache is None else os.fspath(cache)
    if not _URL.match(text):
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"cache must be a directory that all processes see as a file system, not {text}: write the rows to the "
            "remote store with prepare_data, and read them with ParquetLoader"
        )
    return Path(unquote(parts.path))


def _write_from_executors(frame: Any, directory: Path) -> int:
    """Lets Spark write the rows, and returns their number."""
    from pyspark.sql import Observation, functions  # noqa: PLC0415 - only where there is Spark

    seen = Observation()
    counted = frame.observe(seen, functions.count(functions.lit(1)).alias("rows"))
    counted.write.parquet(directory.absolute().as_uri())
    rows = seen.get["rows"]
    if not any(directory.glob("*.parquet")):
        _expect(rows, 0, directory)
    return rows


def _expect(written: int, found: int, directory: Path) -> None:
    if found != written:
        raise ValueError(
            f"Spark wrote {written} rows to {directory}, and {found} of them are here: its executors are on other "
            "hosts; give cache= a directory that all hosts share"
        )


def _check(columns: Sequence[str] | None, present: Sequence[str]) -> None:
    lacking = [name for name in columns or () if name not in present]
    if lacking:
        raise ValueError(f"the frame has no column {lacking[0]!r}: {', '.join(present)}")
    counts = Counter(present)
    twice = [name for name in columns or present if counts[name] > 1]
    if twice:
        raise ValueError(f"the frame has more than one column {twice[0]!r}: rename them")


def _quoted(name: str) -> str:
    """Returns a column's name in Spark's quotation marks."""
    return "`" + name.replace("`", "``") + "`"


def _write(frame: Any, columns: Sequence[str] | None, directory: Path) -> None:
    from farandole.data.inputs.sources import open_source  # noqa: PLC0415 - needs pyarrow

    source = open_source(frame)
    names = source.schema.names if columns is None else list(columns)
    _check(names, source.schema.names)
    import pyarrow as pa  # noqa: PLC0415 - as above
    import pyarrow.parquet as pq  # noqa: PLC0415

    directory.mkdir(parents=True)
    writer = None
    try:
        for unit in source.units(names):
            for batch in unit.batches():
                if not batch.num_rows:
                    continue
                writer = writer or pq.ParquetWriter(directory / "rows.parquet", batch.schema, compression="none")
                writer.write_table(pa.Table.from_batches([batch]), row_group_size=GROUP_ROWS)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError("the frame has no rows")


def _remove(directory: Path, process: int) -> None:
    """Removes the rows, but not from a process that was forked from the one that wrote them."""
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
