# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""From files, tables and frames to prepared data in a store, without Spark.

Rows flow from pyarrow into the native `PartitionWriter`, which checks, splits and writes them. The
size of the source does not affect the memory. Finished partitions are recorded, so a preparation
that was killed continues with the others. Any process finds data again that was prepared from the
same source in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from farandole._native import prepare as native
from farandole.data import prepared_directories
from farandole.data.columns import ColumnRoles, PreparedColumn, check_columns_present
from farandole.data.encoding import columns_of_features
from farandole.data.encoding_learning import (
    EncodingSpec,
    learn_encoding,
    needs_encoding,
    read_encoding,
    write_encoding,
)
from farandole.data.inputs.sources import RowSource, SourceUnit, open_source
from farandole.data.inputs.sql import query_source
from farandole.data.loader_arguments import fill_argument_by_column
from farandole.data.statistics import Statistics, load_or_compute_statistics
from farandole.data.statistics_passes import accumulate_over_source
from farandole.data.validation_splits import resolve_validation_split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from farandole.data.encoding import ColumnEncoding
    from farandole.data.ragged import Nested, Pad, RaggedColumn
    from farandole.stores.store import AbstractFilesystemStore
    from farandole.stores.store_options import StorageOptions

PARTITION_TARGET_BYTES = 128 << 20
"""Bytes in memory that become one partition, which is one file of each side."""
_PARTITIONS_PER_UNIT = 100_000
"""Numbers of partitions that one unit has to itself."""
_UNLIMITED_ROWS = 1 << 62
_FORMAT_VERSION = 2
"""Changes when the same options would write other bytes."""


@dataclass(frozen=True)
class PreparedData:
    """A data set that can be trained on. As a context manager it releases the data at the end."""

    index: int | None
    train_url: str
    val_url: str | None
    train_rows: int
    val_rows: int
    columns: dict[str, PreparedColumn]
    reused: bool = False
    """Whether the data had been prepared before."""
    dropped: int = 0
    """Number of rows that the validation column assigns to neither side."""
    resumed: int = 0
    """Partitions that a killed preparation had finished."""
    encoding: ColumnEncoding | None = field(default=None, repr=False)
    """The encoding of categories and missing values, if rows were encoded."""
    place: prepared_directories.PreparedDirectory | None = field(
        default=None, repr=False, compare=False
    )
    statistics: Statistics | None = field(default=None, repr=False, compare=False)
    source_options: tuple[StorageOptions, ...] = field(default=(), repr=False, compare=False)
    """Options of the places of rows that no store of this process has, for all that read them."""

    @property
    def categories(self) -> dict[str, list[Any]]:
        """The categories of each column that has some; the index of the first is 2, in labels 0."""
        return (
            {}
            if self.encoding is None
            else {name: list(one) for name, one in self.encoding.categories.items()}
        )

    @property
    def fill(self) -> dict[str, Any]:
        """The replacements of missing values, if rows were encoded."""
        return {} if self.encoding is None else dict(self.encoding.fill)

    @property
    def ragged(self) -> dict[str, RaggedColumn]:
        """The padding of lists of different lengths, by column."""
        return {} if self.encoding is None else dict(self.encoding.ragged)

    def release(self) -> None:
        """Declares that this process no longer uses the data. The data stays in the store."""
        if self.place is not None:
            self.place.delete_if_held()

    def __enter__(self) -> Self:
        """Returns the data itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of it."""
        self.release()


def prepare_data(
    source: Any,
    store: AbstractFilesystemStore | str | os.PathLike[str],
    *,
    feature_cols: Sequence[str] | None = None,
    label_cols: Sequence[str] = (),
    sample_weight_col: str | None = None,
    validation: float | str | None = None,
    seed: int = 0,
    fill: Mapping[str, Any] | float | str | None = None,
    categories: Sequence[str] | Mapping[str, Sequence[Any] | int | None] = (),
    validation_stratify: str | None = None,
    validation_group: str | None = None,
    validation_time: str | None = None,
    ragged: Mapping[str, Pad | Nested] | None = None,
    allow_nan: bool = False,
    compression: Literal["none", "snappy", "lz4", "zstd"] = "none",
    row_group_rows: int | None = None,
    format: Literal["parquet", "csv", "json", "ipc"] | None = None,  # noqa: A002 - as pyarrow calls it
    types: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    sql: str | None = None,
    threads: int = 2,
    reuse: bool = True,
    statistics: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PreparedData:
    """Writes rows to a store in the form that training reads fastest, unless this has been done
    before.

    Sources, in bounded memory: Parquet, CSV, JSON (one object a line) and Arrow IPC files, by path,
    directory, pattern or a list of paths, in any store; Delta tables (with the extra `delta`);
    tables of Unity Catalog, `uc://catalog.schema.table`, and files in its volumes; pyarrow tables
    and datasets, pandas and polars frames, and anything that streams Arrow.
    Directories named `column=value` are columns.

    The data stays in the store until `Store.gc` deletes it. Estimators train on it by
    `fit_on_parquet(dataset_idx=data.index)`, `ParquetLoader(data.train_url, ...)` reads it. A
    preparation that was killed continues at the next call with the same arguments, except for
    streams.

    Args:
        source: The rows.
        store: Store that receives the data: a `Store`, or its path or URL.
        feature_cols: Columns for the model; default: all columns that have no other role.
        label_cols: Columns to compare with.
        sample_weight_col: Column with each row's weight.
        validation: Share of rows held out, chosen by a hash of their content and the seed: the same
            rows however the files are cut. Or a column: true, positive, or `"validation"` rows are
            held out, negative, null and `"test"` rows are left out altogether.
        seed: Seed of the choice.
        fill: Replacement of nulls and NaN: one value for all columns it makes sense for, or values
            by column (`"*"` for all others). Without it they are errors that name the column.
            `"mean"`, `"median"` and `"most_frequent"` are learned from the rows, without the
            rows that a validation column holds out. A feature `<column>__missing` is 1 where the
            column is missing.
        categories: Columns of strings, integers or booleans that become indices: 0 for a missing
            value, 1 for one that is no category, and from 2 on the categories, sorted; labels
            become the indices of their classes, from 0 on. By name their categories, or how many
            there may be, the most frequent ones; else they are learned.
        validation_stratify: Column of classes: the share is held out of each, of every class with
            two rows at least one.
        validation_group: Column of groups: all rows of a group are on one side.
        validation_time: Column of times or numbers: the latest rows are held out.
        ragged: Treatment of columns of lists of different lengths: `{"tokens":
            Pad(max_length=512)}` pads them, and `Nested()` makes nested tensors of them.
        allow_nan: Accepts NaN and infinities like other values.
        compression: Compression of the files.
        row_group_rows: Rows of a row group; default: by size, as suits shuffling.
        format: Format of the files, if their names do not show it.
        types: Types of columns of CSV and JSON by name, as `{"id": "string"}`; others are guessed
            from the first 4 MiB of each file. In all formats, types of columns whose values are in
            the names of directories.
        options: Options of CSV: `delimiter`, `column_names`, `skip_rows`, `encoding`, `quote_char`,
            `null_values`, `decimal_point` and others that pyarrow has.
        sql: A query, in which the source is the table `source`; or `source` maps table names of the
            query to paths, tables and frames. The query spills to disk if it needs more than
            256 MiB of memory. Needs the extra `sql`.
        threads: Files read at the same time.
        reuse: Whether data that was prepared before may be used.
        statistics: Whether the result has statistics of features and labels: they take one more
            pass and are stored with the data.
        storage_options: Credentials and endpoints of the source's paths, as for a store; default:
            the options of a store of this process with the same location, else the provider's
            environment. The store has options of its own.

    Returns:
        The prepared data, with its places. This process holds it until `release`, or its end.

    Raises:
        ImportError: pyarrow is not installed: `pip install 'farandole[data]'`.
        FileNotFoundError: There is no such file.
        ValueError: Rows that do not fit, files that disagree, no rows on a side; the message names
            the column or file.
        OSError: The store refused; another attempt continues with the missing files.
    """
    from farandole.stores.store import Store  # noqa: PLC0415 - loaded with fsspec

    target = Store.create(os.fspath(store)) if isinstance(store, str | os.PathLike) else store
    reading: dict[str, Any] = {
        "format": format,
        "types": types,
        "options": options,
        "storage_options": storage_options,
    }
    opened = open_source(source, **reading) if sql is None else query_source(source, sql, **reading)
    roles = resolve_column_roles(opened, feature_cols, label_cols, sample_weight_col, validation)
    spec = {
        **native_writer_spec(roles, seed, fill, allow_nan=allow_nan),
        "compression": compression,
        "row_group_rows": row_group_rows,
    }
    split = resolve_validation_split(
        roles.validation, validation_stratify, validation_group, validation_time, seed
    )
    encoding_spec = EncodingSpec.from_arguments(categories, fill, roles.labels, split, ragged)
    filesystem_store = cast("AbstractFilesystemStore", target)
    if statistics and not opened.is_rereadable:
        raise ValueError(
            "a stream can be read only once, so statistics=True is not possible: write it to "
            "files first"
        )
    done = prepare_source(
        opened, filesystem_store, roles, spec, "data", encoding_spec, threads=threads, reuse=reuse
    )
    names = columns_of_features([*roles.features, *roles.labels], opened.schema.names)
    return (
        done
        if not statistics
        else replace(
            done, statistics=load_or_compute_statistics(done.train_url, opened, names, threads)
        )
    )


def resolve_column_roles(
    source: RowSource,
    features: Sequence[str] | None,
    labels: Sequence[str],
    weight: str | None,
    validation: float | str | None,
) -> ColumnRoles:
    """Returns the role of each column of a source.

    Raises:
        ValueError: A column is missing, or is two things; or a share that cannot be.
    """
    cannot = isinstance(validation, bool) or not isinstance(validation, float | int | str | None)
    if cannot or validation != validation:  # noqa: PLR0124 - NaN alone is not itself
        raise ValueError(
            f"validation must be a share of the rows or the name of a column: {validation!r}"
        )
    present = source.schema.names
    if isinstance(features, str) or isinstance(labels, str):
        raise ValueError(
            "columns must be a list of names: "
            f"{features if isinstance(features, str) else labels!r}"
        )
    if features is None:
        others = {*labels, weight, validation if isinstance(validation, str) else None}
        features = [name for name in present if name not in others]
    share = float(validation) if isinstance(validation, int) else validation
    roles = ColumnRoles(tuple(features), tuple(labels), weight, share)
    check_columns_present(roles, present, "source")
    return roles


def native_writer_spec(
    roles: ColumnRoles,
    seed: int,
    fill: Mapping[str, Any] | float | str | None = None,
    *,
    allow_nan: bool = False,
) -> dict[str, Any]:
    """Returns the native writer's arguments for columns, split and missing values; see
    `farandole._native.prepare`.
    """
    split: dict[str, Any] | None = None
    if isinstance(roles.validation, str):
        split = {"column": roles.validation}
    elif roles.validation is not None and roles.validation != 0:
        split = {"fraction": roles.validation}
    return {
        "columns": roles.stored_columns,
        "labels": list(roles.labels),
        "weight": roles.weight,
        "validation": split,
        "seed": seed,
        "fill": fill_values_as_texts(fill_argument_by_column(fill)),
        "allow_nan": allow_nan,
    }


def adjust_split_to_nonempty(
    parts: Sequence[bytes], spec: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns a split that gives each side at least one row, if a share of few rows has left one
    side empty.

    The row with the least hash goes to validation, or the row with the largest hash goes to
    training: the choice does not depend on the division of the rows into files.

    Args:
        parts: The written files of all partitions.
        spec: Specification of the preparation.

    Returns:
        What replaces `validation` in the spec; `None` where nothing is to change, or all rows are
        equal.
    """
    if not (spec["validation"] or {}).get("fraction"):
        return None
    records = [json.loads(part) for part in parts]
    hashes = [one["hashes"] for one in records if one.get("hashes")]
    sides = [any(one[side] for one in records) for side in ("train", "val")]
    if all(sides) or not hashes:
        return None
    smallest, largest = min(pair[0] for pair in hashes), max(pair[1] for pair in hashes)
    if smallest == largest:
        return None
    return {"below": largest if sides[1] else smallest + 1}


def fill_values_as_texts(fill: Mapping[str, Any]) -> dict[str, str]:
    """Values for missing ones, as text for the native writer.

    Args:
        fill: Values by column.
    """
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in fill.items()
    }


def _encode_source_units(
    source: RowSource, roles: ColumnRoles, encoding: ColumnEncoding | None
) -> list[SourceUnit]:
    """Returns the rows as they are written."""
    if encoding is None:
        return source.units(roles.source_columns_to_read)

    names = roles.source_columns_to_read

    def encode_batches(unit: SourceUnit) -> Iterator[pa.RecordBatch]:
        return (encoding.encode_batch(batch, names) for batch in unit.batches())

    side = [] if encoding.sides is None else [encoding.sides.split.column]
    return [
        replace(unit, batches=partial(encode_batches, unit))
        for unit in source.units(columns_of_features([*names, *side], source.schema.names))
    ]


def prepare_source(
    source: RowSource,
    store: AbstractFilesystemStore,
    roles: ColumnRoles,
    spec: Mapping[str, Any],
    kind: Literal["data", "fit"],
    encoding_spec: EncodingSpec | None = None,
    *,
    threads: int = 2,
    reuse: bool = True,
) -> PreparedData:
    """Prepares an open source, like `prepare_data`.

    Args:
        source: The rows.
        store: The store for the prepared data.
        roles: The columns.
        spec: The result of `native_writer_spec`, with further entries.
        kind: The caller, which decides how long the data is kept, see `prepared_directories`.
        encoding_spec: Categories, and what replaces missing values, as in `spec`.
        threads: Files read at the same time.
        reuse: Whether data that was prepared before may be used.
    """
    validates = spec["validation"] is not None
    encoding_spec = encoding_spec or EncodingSpec(fill=spec["fill"], labels=frozenset(roles.labels))
    encodes = needs_encoding(encoding_spec, roles.stored_columns, source.schema.names)
    if source.fingerprint is None:
        key = f"once-{uuid.uuid4().hex}"
    else:
        key = prepared_data_key(kind, encoding_spec, _FORMAT_VERSION, source.fingerprint, spec)
        directory = (
            prepared_directories.hold_complete_directory(store, key, validates=validates)
            if reuse
            else None
        )
        if directory is not None:
            return read_prepared_manifests(directory, validates=validates, reused=True)
    encoding = None
    if encodes:
        encoding = learn_encoding(
            source.schema,
            roles,
            encoding_spec,
            lambda names, start: accumulate_over_source(source, names, start, threads),
            is_rereadable=source.is_rereadable,
        )

    def write_units(directory: prepared_directories.PreparedDirectory, text: str) -> list[bytes]:
        writing = _PartitionedWrite(directory, store.prefix_path, text)
        return writing.write_units(_encode_source_units(source, roles, encoding), threads)

    return write_prepared_data(
        store,
        key,
        spec,
        encoding,
        write_units,
        resumable=source.fingerprint is not None and source.ordered,
        replace=not reuse,
        # a stream cannot be read again
        may_write_again=source.fingerprint is not None,
    )


def prepared_data_key(kind: str, encoding_spec: EncodingSpec, *identity: Any) -> str:
    """Returns the key of data that other processes find again.

    Args:
        kind: First word of the key, see `prepared_directories`.
        encoding_spec: The requested encoding.
        identity: Plain values that identify the rows and their form in the files.
    """
    text = json.dumps([*identity, *encoding_spec.prepared_data_key_values()], sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def write_prepared_data(
    store: AbstractFilesystemStore,
    key: str,
    spec: Mapping[str, Any],
    encoding: ColumnEncoding | None,
    write_partitions: Callable[[prepared_directories.PreparedDirectory, str], list[bytes]],
    *,
    resumable: bool,
    replace: bool = False,
    sources: Sequence[str] | None = None,
    may_write_again: bool = True,
    writers_may_outlive: bool = False,
) -> PreparedData:
    """Writes rows to a directory that this process acquires.

    Args:
        store: The store for the prepared data.
        key: The key of the data.
        spec: The result of `native_writer_spec`, with further entries.
        encoding: Encoding of the rows, if they are encoded.
        write_partitions: Writes the partitions that a directory lacks, by the native writer's
            specification; returns the results of all writers.
        resumable: Whether to resume a killed preparation of the same key.
        replace: Whether complete data of the same key may be emptied.
        sources: Source of each partition, if it decides whether a finished partition is the same.
        may_write_again: Whether the rows can be written again with another split.
        writers_may_outlive: Whether something may still write after an interrupt.
    """
    if encoding is not None:
        spec = {
            **spec,
            "fill": fill_values_as_texts(encoding.fill_of_uncategorized_columns),
            **encoding.native_split_arguments,
        }
    validates = spec["validation"] is not None
    directory, begun = prepared_directories.acquire_resumable_or_emptied_directory(
        store, key, resumable=resumable, replace=replace
    )
    val_url = directory.val_url if validates else None
    text = json.dumps({**spec, "train": directory.train_url, "val": val_url, "fingerprint": key})
    let_go = directory.delete_if_held if resumable else directory.release_and_delete_data
    try:
        if begun:
            directory.load_finished_partitions(text, store.prefix_path, sources)
        write_encoding(directory, encoding, validates=validates)
        found = len(directory.finished_partitions)
        parts = write_partitions(directory, text)
        other = adjust_split_to_nonempty(parts, spec)
        if other is not None and may_write_again:
            text = json.dumps({**json.loads(text), "validation": other})
            directory.finished_partitions.clear()
            parts = write_partitions(directory, text)
        directory.renew_if_held()
        directory.check_lease()
        committed = json.loads(native.commit_partitions(store.prefix_path, text, parts))
        directory.finish_preparation()
    except ValueError:
        directory.release_and_delete_data()
        raise
    except OSError:
        let_go()  # the store may be back, or have room, next time
        raise
    except BaseException:
        # Not discarded while tasks may still write. The next owner of the directory empties it.
        (directory.delete_if_held if writers_may_outlive else let_go)()
        raise
    return read_prepared_manifests(
        directory, validates=validates, resumed=found, dropped=committed["dropped"]
    )


def read_prepared_manifests(
    directory: prepared_directories.PreparedDirectory, *, validates: bool, **more: Any
) -> PreparedData:
    """Returns the content of a place's manifests."""
    train = json.loads(native.read_manifest(directory.train_url) or "{}")
    val = json.loads(native.read_manifest(directory.val_url) or "{}") if validates else {"rows": 0}
    encoding = read_encoding(directory.train_url)
    return PreparedData(
        index=directory.index,
        train_url=directory.train_url,
        val_url=directory.val_url if validates else None,
        train_rows=train["rows"],
        val_rows=val["rows"],
        columns=prepared_columns(
            ((one["name"], one["element"], one["shape"]) for one in train["columns"]), encoding
        ),
        encoding=encoding,
        place=directory,
        **more,
    )


def prepared_columns(
    stored: Iterable[tuple[str, str, Sequence[int]]], encoding: ColumnEncoding | None
) -> dict[str, PreparedColumn]:
    """Returns the columns as batches hold them.

    Args:
        stored: Name, element and shape of each.
        encoding: Encoding of the rows, if they are encoded: lists of different lengths have their
            largest one.
    """
    lists = {} if encoding is None else encoding.ragged
    columns = {name: PreparedColumn(name, element, tuple(shape)) for name, element, shape in stored}
    return {
        name: PreparedColumn(name, lists[name].dtype, (lists[name].max_length,))
        if name in lists
        else column
        for name, column in columns.items()
    }


class _PartitionedWrite:
    """Units on their way into partitions, some at a time."""

    def __init__(
        self, directory: prepared_directories.PreparedDirectory, prefix: str, spec: str
    ) -> None:
        self._directory, self._prefix, self._spec = directory, prefix, spec
        self._attempt = uuid.uuid4().hex[:12]
        self._stop = threading.Event()
        self._parts: dict[int, bytes] = {}

    def write_units(self, units: list[SourceUnit], threads: int) -> list[bytes]:
        """Writes missing parts.

        Returns:
            What `commit` wants, of all partitions.
        """
        missing = [
            (number, unit)
            for number, unit in enumerate(units)
            if not self._reuse_finished_unit(number)
        ]
        if len(missing) <= 1 or threads <= 1:
            for number, unit in missing:
                self._write_unit(number, unit)
        else:
            with ThreadPoolExecutor(min(threads, len(missing)), "farandole-prepare") as pool:
                try:
                    jobs = [pool.submit(self._write_unit, number, unit) for number, unit in missing]
                    done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                    failed = [job for job in done if job.exception() is not None]
                    if failed:
                        failed[0].result()
                finally:
                    self._stop.set()
                    pool.shutdown(cancel_futures=True)
        return [self._parts[number] for number in sorted(self._parts)]

    def _reuse_finished_unit(self, number: int) -> bool:
        """Takes over a unit whose partitions are all finished."""
        first, parts = number * _PARTITIONS_PER_UNIT, []
        for partition in range(first, first + _PARTITIONS_PER_UNIT):
            part = self._directory.finished_partitions.get(partition)
            if part is None:
                return False
            parts.append((partition, part))
            if partition in self._directory.last_partitions:
                self._parts.update(parts)
                return True
        return False

    def _write_unit(self, number: int, unit: SourceUnit) -> None:
        partition, part, last = (
            number * _PARTITIONS_PER_UNIT,
            None,
            (number + 1) * _PARTITIONS_PER_UNIT - 1,
        )
        max_rows: int | None = None
        for whole in unit.batches():
            batch = whole
            while batch.num_rows > 0:
                if self._stop.is_set():
                    return
                if max_rows is None:
                    each = max(1, batch.nbytes // batch.num_rows)
                    max_rows = (
                        _UNLIMITED_ROWS
                        if unit.is_one_partition
                        else max(1024, PARTITION_TARGET_BYTES // each)
                    )
                if part is None:
                    part = self._open_partition(partition)
                size = (
                    batch.num_rows
                    if partition == last
                    else min(batch.num_rows, max_rows - part.rows)
                )
                part.write_batch(batch.slice(0, size), unit.name)
                batch = batch.slice(size)
                if part.rows >= max_rows and partition < last:
                    self._finish_partition(partition, part, last=False)
                    partition, part = partition + 1, None
        if part is not None:
            self._finish_partition(partition, part, last=True)
        elif partition > number * _PARTITIONS_PER_UNIT:  # the rows ended with a partition
            prepared_directories.record_resumable_partition(
                self._directory.train_url,
                self._directory.lease_name,
                partition - 1,
                self._parts[partition - 1],
                last=True,
            )

    def _open_partition(self, partition: int) -> _OpenPartition:
        done = self._directory.finished_partitions.get(partition)
        if done is not None:
            return _OpenPartition(None, done)
        self._directory.check_lease()
        return _OpenPartition(
            native.PartitionWriter(self._prefix, self._spec, partition, self._attempt), None
        )

    def _finish_partition(self, partition: int, part: _OpenPartition, *, last: bool) -> None:
        self._parts[partition] = text = part.finish_partition()
        if part.writer is not None or last:
            prepared_directories.record_resumable_partition(
                self._directory.train_url, self._directory.lease_name, partition, text, last=last
            )


class _OpenPartition:
    """A partition being written, or one that is there already and whose rows pass by."""

    def __init__(self, writer: native.PartitionWriter | None, done: bytes | None) -> None:
        self.writer, self._done = writer, done
        self.rows = 0

    def write_batch(self, batch: pa.RecordBatch, source: str) -> None:
        self.rows += batch.num_rows
        if self.writer is None:
            return
        try:
            self.writer.write(batch)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def finish_partition(self) -> bytes:
        if self.writer is not None:
            return self.writer.finish()
        rows = json.loads(self._done or b"{}")["rows"]
        if rows != self.rows:
            raise ValueError(
                f"the source changed while it was prepared: {self.rows} rows where {rows} were "
                "before"
            )
        return self._done or b""
