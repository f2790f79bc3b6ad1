# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""From a DataFrame to prepared data in the store, in one pass on the executors.

Each task passes Spark's Arrow batches to the native `PartitionWriter`, which splits, checks and
writes them. The summary of its files is returned as one row, and the driver writes the manifest
last. Data without a manifest is not used, so files of a failed or repeated task are never read.
Errors in the data are returned as a row, too, because Spark would repeat a failing task, and wrap
the message into two stack traces.

Only this process finds prepared rows of this session again. Any process finds data that a plan
reads from files: see `plan`.
"""

# ruff: noqa: PLC0415 - tasks load only the modules that they use

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.data import prepared_directories
from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.data.datasets import open_dataset, write_dataset_link
from farandole.data.encoding import ColumnEncoding, columns_of_features
from farandole.data.encoding_learning import (
    EncodingSpec,
    learn_encoding,
    needs_encoding,
    read_encoding,
)
from farandole.data.lazy_pyarrow import pa
from farandole.data.prepare import PreparedData as Prepared
from farandole.data.prepare import (
    native_writer_spec,
    prepared_columns,
    prepared_data_key,
    read_prepared_manifests,
    write_prepared_data,
)
from farandole.data.statistics_passes import accumulate_on_executors, alias_columns_by_number
from farandole.spark.common.data import plan_fingerprints
from farandole.spark.common.data.existing_data import ExistingDataPaths
from farandole.spark.job.session_adapter import SparkSessionAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from farandole._native.reader import Dataset
    from farandole.data.encoding_learning import EncodingLearner
    from farandole.data.validation_splits import ValidationSplit
    from farandole.stores.store import AbstractFilesystemStore
    from farandole.stores.store_options import StorageOptions

_PARTITION_RESULT_SCHEMA = "partition int, error string, is_store_error boolean, part binary"
_MAX_IDLE_ENTRIES = 8


@dataclass(eq=False)
class _PreparedEntry:
    key: str
    frame: DataFrame
    fingerprint: str
    prepared: Prepared
    users: int = 0


@dataclass
class _PreparedDataCache:
    lock: threading.RLock = field(default_factory=threading.RLock)
    entries: list[_PreparedEntry] = field(default_factory=list)


_PREPARED_DATA_CACHE = _PreparedDataCache()
_PREPARATION_LOCKS: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_SAME_ROWS_NAME: ContextVar[str | None] = ContextVar("farandole_same_rows", default=None)


@contextlib.contextmanager
def declare_same_rows(name: str) -> Iterator[None]:
    """Declares that all frames prepared in this context, and in other contexts of the same name,
    have the same rows.

    The declaration is used only if no plan identifies the rows: on Spark Connect.

    Args:
        name: name of these rows, and of no other rows.
    """
    token = _SAME_ROWS_NAME.set(name)
    try:
        yield
    finally:
        _SAME_ROWS_NAME.reset(token)


def clear_training_cache() -> None:
    """Forgets which DataFrames have been prepared; their files stay until a later fit takes the
    place.

    Data that was prepared from files is still found, by the keys in the store.
    """
    with _PREPARED_DATA_CACHE.lock:
        _release_cached_entries(
            [entry for entry in _PREPARED_DATA_CACHE.entries if not entry.users]
        )


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: AbstractFilesystemStore,
    df: DataFrame,
    roles: ColumnRoles,
    seed: int = 0,
    partitions_per_process: int = 10,
    *,
    fill: Mapping[str, Any] | float | str | None = None,
    categories: Sequence[str] | Mapping[str, Any] = (),
    split: ValidationSplit | None = None,
    ragged: Mapping[str, Any] | None = None,
    allow_nan: bool = False,
    compress_sparse: bool = False,
) -> Iterator[Prepared]:
    """Writes the columns of a DataFrame to the store, or finds that this has been done before.

    The split by a share depends on each row's content and the seed, not on how the rows are
    partitioned. Rows are written where they are: partitions are merged when there are more than
    `num_processes * partitions_per_process`, and never shuffled.

    Args:
        num_processes: training processes.
        store: store that receives the data.
        df: the rows, whose columns and types have been checked.
        roles: the columns.
        seed: seed of the split.
        partitions_per_process: most partitions per training process.
        fill: replacement of nulls and NaN, see `farandole.data.prepare_data`.
        categories: columns that become indices, see `farandole.data.prepare_data`.
        split: rule that chooses validation rows, if not each row alone decides.
        ragged: padding of lists of different lengths, by column.
        allow_nan: takes NaN and infinities as values like any others.
        compress_sparse: compresses vectors, which are written dense.

    Yields:
        The prepared data, which is not overwritten inside the context.

    Raises:
        ValueError: no rows, no rows on one side of the split, or data that does not fit; naming the
            column.
        OSError: the store refused.
    """
    side = [] if split is None else [split.column]
    check_columns_present(ColumnRoles(tuple(side), ()), df.columns, "DataFrame")
    names = columns_of_features([*roles.source_columns_to_read, *side], df.columns)
    encoding_spec = EncodingSpec.from_arguments(categories, fill, roles.labels, split, ragged)
    # Columns get their names back in tasks.
    chosen = alias_columns_by_number(df, names)
    options = {
        **native_writer_spec(roles, seed, fill, allow_nan=allow_nan),
        "compress_sparse": compress_sparse,
    }
    merged = chosen.coalesce(num_processes * partitions_per_process)
    learn_and_write = partial(_write_prepared_data, store, merged, names, options)
    if needs_encoding(encoding_spec, roles.stored_columns, df.columns):
        schema = _arrow_schema(df.schema, names)
        learn = partial(_learn_encoding_on_executors, merged, names, schema, roles, encoding_spec)
        learn_and_write = partial(learn_and_write, learn=learn, wanted=roles.source_columns_to_read)
    plan_text = plan_fingerprints.portable_plan_text(chosen)
    if plan_text is not None:
        key = prepared_data_key("fit", encoding_spec, plan_text, options)
        with _preparation_lock(f"{store.prefix_path}\n{key}"):
            validates = options["validation"] is not None
            directory = prepared_directories.hold_complete_directory(
                store, key, validates=validates
            )
            prepared = (
                learn_and_write(key)
                if directory is None
                else read_prepared_manifests(directory, validates=validates, reused=True)
            )
        with prepared:
            yield prepared
        return
    by_plan = plan_fingerprints.plan_fingerprint(chosen)
    source = by_plan if by_plan is not None else _SAME_ROWS_NAME.get()
    key_text = json.dumps([options, *encoding_spec.prepared_data_key_values()], sort_keys=True)
    key = f"{source}\n{store.get_train_data_path()}\n{store.get_val_data_path()}\n{key_text}"
    with _preparation_lock(key) if source is not None else contextlib.nullcontext():
        entry = None if source is None else _lookup_entry(key, None if by_plan is None else chosen)
        if entry is None:
            fingerprint = f"once-{uuid.uuid4().hex}"
            made = learn_and_write(fingerprint)
            entry = _PreparedEntry(key, chosen, fingerprint, made, users=1)
            with _PREPARED_DATA_CACHE.lock:
                _PREPARED_DATA_CACHE.entries.append(entry)
    try:
        yield entry.prepared
    finally:
        with _PREPARED_DATA_CACHE.lock:
            entry.users -= 1
            idle = [one for one in _PREPARED_DATA_CACHE.entries if not one.users]
            _release_cached_entries(
                [one for one in idle if one.key.startswith("None\n")] + idle[:-_MAX_IDLE_ENTRIES]
            )


def _preparation_lock(key: str) -> threading.Lock:
    """Returns the lock of a data set, to hold during its lookup and preparation: if several threads
    want the same data prepared, the first thread prepares it and the other threads wait.
    """
    with _PREPARED_DATA_CACHE.lock:
        return _PREPARATION_LOCKS.setdefault(key, threading.Lock())


def _learn_encoding_on_executors(
    df: DataFrame, names: list[str], schema: pa.Schema, roles: ColumnRoles, spec: EncodingSpec
) -> ColumnEncoding:
    """Learns the encoding in a pass over the rows, if it is not already given.

    Args:
        df: the rows, with numbered columns.
        names: names of these columns.
        schema: their types.
        roles: their roles.
        spec: the requested encoding.
    """

    def collect_rows(counted: DataFrame) -> list[Any]:
        description = "farandole: learning categories and replacements of missing values"
        return SparkSessionAdapter.from_active_session().collect_rows(counted, description)

    def count_rows(read: list[str], start: Callable[[], EncodingLearner]) -> EncodingLearner:
        chosen = df.select(*[f"column{names.index(name)}" for name in read])
        return accumulate_on_executors(chosen, read, start, collect_rows)

    return learn_encoding(schema, roles, spec, count_rows)


def _arrow_schema(schema: Any, names: list[str]) -> pa.Schema:
    """Returns the Arrow types of the columns. A type that Arrow lacks is replaced by a type from
    which no encoding is learned.
    """
    from pyspark.sql.pandas.types import to_arrow_type

    def arrow_type(name: str) -> pa.DataType:
        try:
            return to_arrow_type(schema[name].dataType)
        except Exception:  # noqa: BLE001 - it differs by Spark's version
            return pa.binary()

    return pa.schema([(name, arrow_type(name)) for name in names])


def _write_prepared_data(
    store: AbstractFilesystemStore,
    df: DataFrame,
    names: list[str],
    options: dict[str, Any],
    key: str,
    learn: Callable[[], ColumnEncoding] | None = None,
    wanted: list[str] | None = None,
) -> Prepared:
    encoding = None if learn is None else learn()
    rows = _SparkBatchEncoder(names, names if wanted is None else wanted, encoding)
    resumable = not key.startswith("once")
    sources = plan_fingerprints.partition_sources(df) if resumable else None

    def write_partitions(
        directory: prepared_directories.PreparedDirectory, spec: str
    ) -> list[bytes]:
        done = _PartitionCompletionLog(
            directory.train_url, directory.lease_name, directory.finished_partitions, sources
        )
        return _write_partitions(df, rows, store, spec, done)

    return write_prepared_data(
        store,
        key,
        options,
        encoding,
        write_partitions,
        resumable=resumable,
        sources=sources or [],
        writers_may_outlive=True,
    )


def find_existing_data(
    store: AbstractFilesystemStore,
    roles: ColumnRoles,
    idx: int | None = None,
    where: ExistingDataPaths | None = None,
) -> Prepared:
    """Returns the data set that exists already, prepared by us or by any program.

    Args:
        store: store of the data. If the data is not in the store, the store receives a file by
            which workers find the data.
        roles: the columns that will be used.
        idx: number of the data set in the store.
        where: paths of the rows, if they are not in the store.

    Returns:
        The data that was found; validation data is used if it exists.

    Raises:
        ValueError: no data set, or a column is not in it.
        FileNotFoundError: a given path does not exist.
    """
    paths = where or ExistingDataPaths.from_store(store, idx)
    if (
        isinstance(paths.train, str)
        and not paths.given
        and not store.is_parquet_dataset(paths.train)
    ):
        raise ValueError(f"there is no training data at {paths.train}")
    train = open_dataset(paths.train, paths.types)
    encoding = read_encoding(train.url) if train.is_prepared else None
    columns = prepared_columns(
        ((one.name, one.dtype, one.shape) for one in train.columns), encoding
    )
    check_columns_present(
        ColumnRoles(roles.features, roles.labels, roles.weight), list(columns), "training data"
    )
    val = None
    if paths.val is not None and (
        paths.given or (isinstance(paths.val, str) and store.is_parquet_dataset(paths.val))
    ):
        val = open_dataset(paths.val, paths.types)
    if train.rows == 0:
        raise ValueError(f"there are no rows at {paths.train}")
    return Prepared(
        index=idx,
        train_url=write_dataset_link(store, train),
        val_url=write_dataset_link(store, val) if val is not None and val.rows else None,
        train_rows=train.rows,
        val_rows=0 if val is None else val.rows,
        columns=columns,
        reused=True,
        encoding=encoding,
        source_options=_options_of_paths(paths, train, val),
    )


def _options_of_paths(
    paths: ExistingDataPaths, train: Dataset, val: Dataset | None
) -> tuple[StorageOptions, ...]:
    """Returns the options with which this process reads the user's paths; workers need them."""
    if not paths.given:
        return ()
    from farandole.stores.store_options import StorageOptions

    opened = [StorageOptions.for_url(each.url) for each in (train, val) if each is not None]
    return tuple(filter(None, opened))


def _lookup_entry(key: str, frame: DataFrame | None) -> _PreparedEntry | None:
    """Returns the data that was prepared under a key; if a frame is given, only data with the
    same rows.
    """
    with _PREPARED_DATA_CACHE.lock:
        for entry in list(_PREPARED_DATA_CACHE.entries):
            if entry.key != key or (frame is not None and not _is_same_frame(entry.frame, frame)):
                continue
            manifest = native.read_manifest(entry.prepared.train_url)
            if manifest is not None and json.loads(manifest)["fingerprint"] == entry.fingerprint:
                entry.users += 1
                entry.prepared = replace(entry.prepared, reused=True)
                return entry
            if not entry.users:
                _release_cached_entries([entry])
    return None


def _release_cached_entries(entries: list[_PreparedEntry]) -> None:
    for entry in entries:
        if entry in _PREPARED_DATA_CACHE.entries:
            _PREPARED_DATA_CACHE.entries.remove(entry)
            entry.prepared.release()


def _is_same_frame(first: DataFrame, second: DataFrame) -> bool:
    return first.sparkSession is second.sparkSession and first.sameSemantics(second)


@dataclass(frozen=True)
class _PartitionCompletionLog:
    """The summaries of a finished task, and of tasks that had finished before."""

    train_url: str
    lease: str
    done: dict[int, bytes]
    sources: list[str] | None

    def check_lease(self) -> None:
        """Raises a `RuntimeError` if the driver has lost the directory."""
        NativeStore(self.train_url).check_lease(self.lease)

    def record_partition(self, partition: int, part: bytes) -> None:
        if self.sources is not None and partition < len(self.sources):
            prepared_directories.record_resumable_partition(
                self.train_url, self.lease, partition, part, source=self.sources[partition]
            )


@dataclass(frozen=True)
class _SparkBatchEncoder:
    """The processing of batches from Spark."""

    names: list[str]
    """Names of the columns, which are addressed by number."""
    wanted: list[str]
    encoding: ColumnEncoding | None

    def encode_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        named = batch.rename_columns(self.names)
        return named if self.encoding is None else self.encoding.encode_batch(named, self.wanted)


def _write_partitions(
    df: DataFrame,
    form: _SparkBatchEncoder,
    store: AbstractFilesystemStore,
    spec: str,
    progress: _PartitionCompletionLog,
) -> list[bytes]:
    preparation = uuid.uuid4().hex[:8]
    url, storage = store.prefix_path, store.storage_options

    def write_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage.apply_to_process()
        return write_partition(batches, form, url, spec, preparation, progress)

    rows = SparkSessionAdapter.from_active_session().collect_rows(
        df.mapInArrow(write_batches, _PARTITION_RESULT_SCHEMA), "farandole: preparing data"
    )
    rows.sort(key=lambda row: row.partition)
    failed = next((row for row in rows if row.error is not None), None)
    if failed is not None:
        progress.check_lease()
        raise (OSError if failed.is_store_error else ValueError)(failed.error)
    return [bytes(row.part) for row in rows]


def write_partition(
    batches: Iterator[pa.RecordBatch],
    form: _SparkBatchEncoder,
    url: str,
    spec: str,
    preparation: str,
    progress: _PartitionCompletionLog,
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task: writes one partition and yields one row about it.

    Args:
        batches: the partition.
        form: transformation of its batches.
        url: the store's prefix.
        spec: specification of the data, see `farandole._native.prepare`.
        preparation: a name that no other preparation has.
        progress: record of the finished partitions.

    Yields:
        One row of (partition, error or null, whether the store failed, argument of
        `commit_partitions`).
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("partitions are written in Spark tasks only")
    partition = context.partitionId()
    error, is_store_error, part = None, False, progress.done.get(partition)
    if part is None:
        try:
            progress.check_lease()
        except RuntimeError as lost:
            error, is_store_error = str(lost), True
    if part is None and error is None:
        writer = native.PartitionWriter(
            url, spec, partition, f"{preparation}-{context.taskAttemptId()}"
        )
        try:
            for batch in batches:
                writer.write(form.encode_batch(batch))
            part = writer.finish()
            progress.record_partition(partition, part)
        except (ValueError, OSError, RuntimeError) as problem:
            error, is_store_error = str(problem), not isinstance(problem, ValueError)
            writer.abort()
    kinds = {
        "partition": pa.int32(),
        "error": pa.string(),
        "is_store_error": pa.bool_(),
        "part": pa.binary(),
    }
    values = (partition, error, is_store_error, part)
    columns = [pa.array([value], kind) for value, kind in zip(values, kinds.values(), strict=True)]
    yield pa.RecordBatch.from_arrays(columns, names=list(kinds))


def describe_prepared_data(prepared: Prepared) -> str:
    """Returns the numbers of rows of prepared data, and their place, as a user reads them."""
    origin = "data that was prepared before" if prepared.reused else "prepared data"
    validation = f", {prepared.val_rows:,} for validation" if prepared.val_url else ""
    left_out = (
        f"; {prepared.dropped:,} left out by the validation column (null or negative)"
        if prepared.dropped
        else ""
    )
    return f"{origin}: {prepared.train_rows:,} rows{validation} in {prepared.train_url}{left_out}"
