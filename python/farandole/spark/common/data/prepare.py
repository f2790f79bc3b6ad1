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

# ruff: noqa: PLC0415 - tasks load what they need

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import threading
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import cloudpickle

from farandole._native import prepare as native
from farandole.data import places
from farandole.data.columns import Roles, check_present
from farandole.data.datasets import is_place, linked, open_dataset
from farandole.data.encoding import Encoding, sources_of
from farandole.data.learning import Learner, Wish, encoding_at, needed, note_encoding
from farandole.data.prepare import PreparedData as Prepared
from farandole.data.prepare import columns_of, described, other_split, spec_of, texts
from farandole.spark.common.data import plan
from farandole.spark.common.data.existing import Existing
from farandole.spark.job.session import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from farandole.data.splits import Split
    from farandole.stores.store import AbstractFilesystemStore

_RESULT = "partition int, error string, of_store boolean, part binary"
_REMEMBERED = 8


@dataclass(eq=False)
class _Entry:
    key: str
    frame: DataFrame
    fingerprint: str
    prepared: Prepared
    users: int = 0


@dataclass
class _Cache:
    lock: threading.RLock = field(default_factory=threading.RLock)
    entries: list[_Entry] = field(default_factory=list)


class _Turns:
    """Threads that want the same data prepared: the first one does it, and the others wait for
    that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[str, _Turn] = WeakValueDictionary()

    def of(self, key: str) -> _Turn:
        """Returns the lock to hold during the lookup and the preparation."""
        with self._lock:
            return self._locks.setdefault(key, _Turn())


class _Turn:
    """A lock that can be referred to weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_CACHE = _Cache()
_TURNS = _Turns()
_SAME_ROWS: ContextVar[str | None] = ContextVar("farandole_same_rows", default=None)


@contextlib.contextmanager
def same_rows(name: str) -> Iterator[None]:
    """Says that all frames that are prepared in this context, and in others of the same name, have
    the same rows.

    It counts where no plan tells: on Spark Connect.

    Args:
        name: of the rows, unique to them.
    """
    token = _SAME_ROWS.set(name)
    try:
        yield
    finally:
        _SAME_ROWS.reset(token)


def clear_training_cache() -> None:
    """Forgets which DataFrames have been prepared; their files stay until a later fit takes the
    place.

    Data that was prepared from files is still found, by the keys in the store.
    """
    with _CACHE.lock:
        _forget([entry for entry in _CACHE.entries if not entry.users])


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: AbstractFilesystemStore,
    df: DataFrame,
    roles: Roles,
    seed: int = 0,
    partitions_per_process: int = 10,
    *,
    fill: Mapping[str, Any] | float | str | None = None,
    categories: Sequence[str] | Mapping[str, Any] = (),
    split: Split | None = None,
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
        store: where to.
        df: the rows, whose columns and types have been checked.
        roles: the columns.
        seed: of the split.
        partitions_per_process: most partitions per training process.
        fill: what replaces nulls and NaN, see `farandole.data.prepare_data`.
        categories: columns that become indices, see `farandole.data.prepare_data`.
        split: how validation rows are chosen, if not by rows alone.
        ragged: how lists of different lengths are padded, by column.
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
    check_present(Roles(tuple(side), ()), df.columns, "DataFrame")
    names = sources_of([*roles.selected, *side], df.columns)
    wish = Wish.of(categories, fill, roles.labels, split, ragged).of_rows(
        sources_of(roles.kept, df.columns)
    )
    encoded = _Encoded(wish, roles, df.schema) if needed(wish, roles.kept, df.columns) else None
    # mapInArrow takes no names with dots or backticks: columns travel by number, and get their
    # names back in tasks.
    chosen = df.select(
        *[_quoted(df, name).alias(f"column{index}") for index, name in enumerate(names)]
    )
    options = {
        **spec_of(roles, seed, fill, allow_nan=allow_nan),
        "compress_sparse": compress_sparse,
    }
    merged = chosen.coalesce(num_processes * partitions_per_process)
    words = plan.lasting(chosen)
    if words is not None:
        told = json.dumps([words, options, *wish.told()], sort_keys=True)
        key = f"fit-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
        with _TURNS.of(f"{store.prefix_path}\n{key}"):
            place = places.find(store, key, validates=options["validation"] is not None)
            if place is None:
                prepared = _prepare(store, merged, names, options, key, encoded)
            else:
                prepared = described(
                    place, validates=options["validation"] is not None, reused=True
                )
        with prepared:
            yield prepared
        return
    by_plan = plan.fingerprint(chosen)
    source = by_plan if by_plan is not None else _SAME_ROWS.get()
    told = json.dumps([options, *wish.told()], sort_keys=True)
    key = f"{source}\n{store.get_train_data_path()}\n{store.get_val_data_path()}\n{told}"
    with _TURNS.of(key) if source is not None else contextlib.nullcontext():
        entry = None if source is None else _lookup(key, None if by_plan is None else chosen)
        if entry is None:
            fingerprint = f"once-{uuid.uuid4().hex}"
            made = _prepare(store, merged, names, options, fingerprint, encoded)
            entry = _Entry(key, chosen, fingerprint, made, users=1)
            with _CACHE.lock:
                _CACHE.entries.append(entry)
    try:
        yield entry.prepared
    finally:
        with _CACHE.lock:
            entry.users -= 1
            idle = [one for one in _CACHE.entries if not one.users]
            _forget([one for one in idle if one.key.startswith("None\n")] + idle[:-_REMEMBERED])


@dataclass(frozen=True)
class _Encoded:
    """Rows that are encoded before they are written: what to learn of them, and for which
    columns.
    """

    wish: Wish
    roles: Roles
    schema: Any

    def learn(self, df: DataFrame, names: list[str]) -> Encoding:
        """Looks at the rows, where there is something to learn.

        Args:
            df: the rows, whose columns go by number.
            names: of its columns.
        """
        counted = self.wish.plan(_arrow_schema(self.schema, names), self.roles)
        known = self.wish.known()
        if known is not None:
            return known
        validation = self.roles.validation
        read, split = self.wish.reads(counted, self.roles), self.wish.split

        def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _count(batches, read, Learner(counted, validation, split))

        chosen = df.select(*[f"column{names.index(name)}" for name in read])
        told = "farandole: learning categories and replacements of missing values"
        whole = Learner(counted, split=split)
        for row in Cluster.active().collect(
            chosen.mapInArrow(count, "error string, part binary"), told
        ):
            if row.error is not None:
                raise ValueError(row.error)
            whole.merge(cloudpickle.loads(row.part))
        return self.wish.fulfilled(counted, whole)


def _count(
    batches: Iterator[pa.RecordBatch], names: list[str], learner: Learner
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task: what a partition's rows teach."""
    import pyarrow as pa

    error = None
    for batch in batches:
        try:
            if error is None:
                learner.add(batch.rename_columns(names))
        except ValueError as problem:
            error = str(problem)
    columns = [pa.array([error], pa.string()), pa.array([pickle.dumps(learner)], pa.binary())]
    yield pa.RecordBatch.from_arrays(columns, names=["error", "part"])


def _arrow_schema(schema: Any, names: list[str]) -> pa.Schema:
    """Returns the types of columns as their rows arrive; for types that Arrow lacks, one that
    teaches nothing.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    def kind(name: str) -> pa.DataType:
        try:
            return to_arrow_type(schema[name].dataType)
        except Exception:  # noqa: BLE001 - it differs by Spark's version
            return pa.binary()

    return pa.schema([(name, kind(name)) for name in names])


def _prepare(
    store: AbstractFilesystemStore,
    df: DataFrame,
    names: list[str],
    options: dict[str, Any],
    key: str,
    encoded: _Encoded | None,
) -> Prepared:
    encoding = None if encoded is None else encoded.learn(df, names)
    if encoding is not None:
        options = {**options, "fill": texts(encoding.plain_fill), **encoding.split}
    wanted = names if encoded is None else encoded.roles.selected
    resumable = not key.startswith("once")
    place, begun = places.take(store, key, resumable=resumable)
    val_url = None if options["validation"] is None else place.val_url
    spec = json.dumps({**options, "train": place.train_url, "val": val_url, "fingerprint": key})
    sources = plan.parts(df) if resumable else None
    done: dict[int, bytes] = {}
    try:
        if begun:
            place.resume(spec, store.prefix_path)
            same = {
                number
                for number, source in enumerate(sources or [])
                if place.told.get(number) == source
            }
            done = {number: part for number, part in place.done.items() if number in same}
        note_encoding(place, encoding, validates=val_url is not None)
        rows = _Rows(names, wanted, encoding)
        parts = _write(df, rows, store, spec, _Progress(place.train_url, done, sources))
        other = other_split(parts, options)
        if other is not None:
            spec = json.dumps({**json.loads(spec), "validation": other})
            parts = _write(df, rows, store, spec, _Progress(place.train_url, {}, sources))
        committed = json.loads(native.commit(store.prefix_path, spec, parts))
        place.finish()
    except ValueError:
        place.discard()
        raise
    except OSError:
        (place.release if resumable else place.discard)()
        raise
    except BaseException:
        place.release()  # and not discarded: tasks may still write; who takes the place empties it
        raise
    return described(
        place, validates=val_url is not None, dropped=committed["dropped"], resumed=len(done)
    )


def find_data(
    store: AbstractFilesystemStore,
    roles: Roles,
    idx: int | None = None,
    where: Existing | None = None,
) -> Prepared:
    """Returns the data set that exists already, prepared by us or by any program.

    Args:
        store: where it is, or where the file goes by which workers find data of elsewhere.
        roles: the columns that will be used.
        idx: number of the data set in the store.
        where: the place of the rows, if not in the store.

    Returns:
        The data that was found; validation data is used if it exists.

    Raises:
        ValueError: no data set, or a column is not in it.
        FileNotFoundError: nothing is at a path that was given.
    """
    there = where or Existing.in_store(store, idx)
    if (
        isinstance(there.train, str)
        and not there.given
        and not store.is_parquet_dataset(there.train)
    ):
        raise ValueError(f"there is no training data at {there.train}")
    train = open_dataset(there.train)
    encoding = (
        encoding_at(there.train) if isinstance(there.train, str) and is_place(there.train) else None
    )
    columns = columns_of(((one.name, one.dtype, one.shape) for one in train.columns), encoding)
    check_present(Roles(roles.features, roles.labels, roles.weight), list(columns), "training data")
    val = None
    if there.val is not None and (
        there.given or (isinstance(there.val, str) and store.is_parquet_dataset(there.val))
    ):
        val = open_dataset(there.val)
    if train.rows == 0:
        raise ValueError(f"there are no rows at {there.train}")
    return Prepared(
        index=idx,
        train_url=linked(store, train),
        val_url=linked(store, val) if val is not None and val.rows else None,
        train_rows=train.rows,
        val_rows=0 if val is None else val.rows,
        columns=columns,
        reused=True,
        encoding=encoding,
    )


def _lookup(key: str, frame: DataFrame | None) -> _Entry | None:
    """Returns the data that was prepared under a key; if a frame is given, only data with the
    same rows.
    """
    with _CACHE.lock:
        for entry in list(_CACHE.entries):
            if entry.key != key or (frame is not None and not _same(entry.frame, frame)):
                continue
            manifest = native.read_manifest(entry.prepared.train_url)
            if manifest is not None and json.loads(manifest)["fingerprint"] == entry.fingerprint:
                entry.users += 1
                entry.prepared = replace(entry.prepared, reused=True)
                return entry
            if not entry.users:
                _forget([entry])
    return None


def _forget(entries: list[_Entry]) -> None:
    for entry in entries:
        if entry in _CACHE.entries:
            _CACHE.entries.remove(entry)
            entry.prepared.release()


def _same(left: DataFrame, right: DataFrame) -> bool:
    return left.sparkSession is right.sparkSession and left.sameSemantics(right)


def _quoted(df: DataFrame, name: str) -> Any:
    return df["`" + name.replace("`", "``") + "`"]


@dataclass(frozen=True)
class _Progress:
    """The summaries of a finished task, and of tasks that had finished before."""

    train_url: str
    done: dict[int, bytes]
    sources: list[str] | None

    def note(self, partition: int, part: bytes) -> None:
        if self.sources is not None and partition < len(self.sources):
            places.note(self.train_url, partition, part, source=self.sources[partition])


@dataclass(frozen=True)
class _Rows:
    """The processing of batches from Spark."""

    names: list[str]
    """Names of the columns, which are addressed by number."""
    wanted: list[str]
    encoding: Encoding | None

    def encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        named = batch.rename_columns(self.names)
        return named if self.encoding is None else self.encoding.encode(named, self.wanted)


def _write(
    df: DataFrame, form: _Rows, store: AbstractFilesystemStore, spec: str, progress: _Progress
) -> list[bytes]:
    preparation = uuid.uuid4().hex[:8]
    url, storage = store.prefix_path, store.storage_options

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage.apply()
        return write_partition(batches, form, url, spec, preparation, progress)

    rows = Cluster.active().collect(df.mapInArrow(write, _RESULT), "farandole: preparing data")
    rows.sort(key=lambda row: row.partition)
    failed = next((row for row in rows if row.error is not None), None)
    if failed is not None:
        raise (OSError if failed.of_store else ValueError)(failed.error)
    return [bytes(row.part) for row in rows]


def write_partition(
    batches: Iterator[pa.RecordBatch],
    form: _Rows,
    url: str,
    spec: str,
    preparation: str,
    progress: _Progress,
) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark task: writes one partition and yields one row about it.

    Args:
        batches: the partition.
        form: what becomes of its batches.
        url: the store's prefix.
        spec: what to write, see `farandole._native.prepare`.
        preparation: a name that no other preparation has.
        progress: where to say that the partition is finished, and which ones are.

    Yields:
        One row of (partition, error or null, whether the store is to blame, what `commit` wants).
    """
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("partitions are written in Spark tasks only")
    partition = context.partitionId()
    error, of_store, part = None, False, progress.done.get(partition)
    if part is None:
        writer = native.PartitionWriter(
            url, spec, partition, f"{preparation}-{context.taskAttemptId()}"
        )
        try:
            for batch in batches:
                writer.write(form.encoded(batch))
            part = writer.finish()
            progress.note(partition, part)
        except (ValueError, OSError) as problem:
            error, of_store = str(problem), isinstance(problem, OSError)
            writer.abort()
    kinds = {
        "partition": pa.int32(),
        "error": pa.string(),
        "of_store": pa.bool_(),
        "part": pa.binary(),
    }
    values = (partition, error, of_store, part)
    columns = [pa.array([value], kind) for value, kind in zip(values, kinds.values(), strict=True)]
    yield pa.RecordBatch.from_arrays(columns, names=list(kinds))
