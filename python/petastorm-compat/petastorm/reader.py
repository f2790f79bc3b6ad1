# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`make_reader` and `make_batch_reader`: rows, and batches of a row group, from Parquet."""

from __future__ import annotations

import itertools
import operator
import random
import warnings
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow.parquet as pq

from farandole.data.data_memory_budget import default_byte_budget
from petastorm._row_groups import ParquetRowGroups, RowGroupReading
from petastorm.errors import NoDataAvailableError
from petastorm.etl.dataset_metadata import find_stored_schema
from petastorm.predicates import PredicateBase
from petastorm.transform import TransformSpec, transform_schema
from petastorm.unischema import Unischema

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

_ROW_GROUPS_AHEAD_PER_WORKER = 2
_MEMORY_BYTES_PER_ENCODED_BYTE = 2
"""Arrays beside the Arrow table that they are made of."""
_OPTIONS_WITHOUT_EFFECT = (
    *("pyarrow_serialize", "results_queue_size", "zmq_copy_buffers", "convert_early_to_numpy"),
    *("cache_location", "cache_size_limit", "cache_row_size_estimate", "cache_extra_settings"),
    "hdfs_driver",
)
"""Options of petastorm's queues, caches and drivers, which this reader does not have."""


def make_reader(
    dataset_url: str | list[str],
    schema_fields: Sequence[Any] | None = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    **options: Any,
) -> Reader:
    """Returns a reader of rows, which codecs decode.

    Args:
        dataset_url: A directory that petastorm's `materialize_dataset` wrote, by path or URL.
        schema_fields: Fields to read, as `UnischemaField` or as regular expressions that match the
            whole name; default: all.
        reader_pool_type: `thread`, `process` or `dummy`, see `Reader`.
        workers_count: Number of row groups that are read and decoded at a time.
        options: Options of `Reader`.

    Raises:
        pickle.UnpicklingError: A stored schema with other classes than those of petastorm.
        NoDataAvailableError: Fewer row groups than shards.
        ValueError: An impossible option.
    """
    return _open_reader(False, dataset_url, schema_fields, reader_pool_type, workers_count, options)


def make_batch_reader(
    dataset_url_or_urls: str | list[str],
    schema_fields: Sequence[Any] | None = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    **options: Any,
) -> Reader:
    """Returns a reader of row groups of any Parquet: named tuples of arrays.

    Columns of lists of one length become matrices. Nulls of integers become NaN.

    Args:
        dataset_url_or_urls: A directory, or a list of files, by path or URL.
        schema_fields: Like in `make_reader`.
        reader_pool_type: Like in `make_reader`.
        workers_count: Like in `make_reader`.
        options: Options of `Reader`.

    Raises:
        NoDataAvailableError: Fewer row groups than shards.
        ValueError: An impossible option.
    """
    urls = dataset_url_or_urls
    return _open_reader(True, urls, schema_fields, reader_pool_type, workers_count, options)


def _open_reader(
    batched: bool,
    urls: str | list[str],
    schema_fields: Any,
    reader_pool_type: str,
    workers_count: int,
    options: dict[str, Any],
) -> Reader:
    if options.pop("cache_type", None) not in (None, "null", "local-disk"):
        raise ValueError("cache_type must be 'null' or 'local-disk'")
    for name in _OPTIONS_WITHOUT_EFFECT:
        options.pop(name, None)
    return Reader(
        urls,
        schema_fields,
        is_batched_reader=batched,
        reader_pool_type=reader_pool_type,
        workers_count=workers_count,
        **options,
    )


class _ReadingTask(NamedTuple):
    row_group: int
    part: int


class Reader:
    """An iterator of rows or batches; a context manager that stops reading.

    Row groups are the unit of shards and of shuffling. A seed gives them petastorm's order.
    """

    ngram = None

    def __init__(
        self,
        dataset_path: str | list[str],
        schema_fields: Any = None,
        *,
        is_batched_reader: bool = False,
        reader_pool_type: str = "thread",
        workers_count: int = 10,
        seed: int | None = None,
        shuffle_rows: bool = False,
        shuffle_row_groups: bool = True,
        shuffle_row_drop_partitions: int = 1,
        predicate: PredicateBase | None = None,
        rowgroup_selector: Any = None,
        num_epochs: int | None = 1,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        shard_seed: int | None = None,
        transform_spec: TransformSpec | None = None,
        filters: Any = None,
        storage_options: dict[str, Any] | None = None,
        filesystem: Any = None,
    ) -> None:
        """Finds the row groups; reading begins with the first row.

        Args:
            dataset_path: See `make_reader` and `make_batch_reader`.
            schema_fields: See `make_reader`.
            is_batched_reader: Whether there are batches of a row group, or decoded rows.
            reader_pool_type: `thread`, or `dummy` to read in the thread that iterates. `process`
                means threads, too: files are decoded without the interpreter's lock.
            workers_count: Number of row groups that are read at a time.
            seed: Seed of all shuffling; default: another order each time.
            shuffle_rows: Whether the rows of a row group are shuffled.
            shuffle_row_groups: Whether row groups are shuffled; without a seed, anew in each epoch.
            shuffle_row_drop_partitions: Number of parts of a row group, which are read one by one.
            predicate: Chooses rows.
            rowgroup_selector: Not supported.
            num_epochs: Number of passes over the rows; `None`: endless.
            cur_shard: Number of this shard: it has each `shard_count`-th row group.
            shard_count: Number of shards.
            shard_seed: Seed of the order in which row groups go to shards; default: `seed`.
            transform_spec: Changes rows, or pandas frames of a row group, in the workers.
            filters: Conditions as pyarrow has them: `[("year", ">", 2020)]`.
            storage_options: Credentials and endpoints, as for a store of Farandole.
            filesystem: Not supported.
        """
        if rowgroup_selector is not None or filesystem is not None:
            raise NotImplementedError("rowgroup_selector and filesystem are not supported")
        if reader_pool_type not in ("thread", "process", "dummy"):
            raise ValueError(f"Unknown reader_pool_type: {reader_pool_type}")
        if num_epochs is not None and (not isinstance(num_epochs, int) or num_epochs < 1):
            raise ValueError(f"num_epochs must be a positive integer or None: {num_epochs!r}")
        if not isinstance(schema_fields, Iterable | None) or isinstance(schema_fields, str):
            raise ValueError(
                "schema_fields must be None, or a list of UnischemaField and regular expressions: "
                f"{schema_fields!r} (n-grams are not supported)"
            )
        urls = _check_urls(dataset_path)
        if storage_options:
            from farandole.stores.store_options import StorageOptions  # noqa: PLC0415 - few need it

            given = (urls,) if isinstance(urls, str) else tuple(urls)
            StorageOptions(given, storage_options).apply_to_process()
        self.num_epochs, self.is_batched_reader = num_epochs, is_batched_reader
        source = ParquetRowGroups(urls)
        stored = _read_schema(urls, source, is_batched_reader)
        fields = list(schema_fields or ())
        read_schema = stored.create_schema_view(fields) if fields else stored
        if not read_schema.fields:
            raise RuntimeError(
                f"No fields matching the criteria '{fields}' were found in the dataset {urls}."
            )
        self.schema = (
            transform_schema(read_schema, transform_spec) if transform_spec else read_schema
        )
        self._reading = RowGroupReading(
            source,
            read_schema,
            self.schema,
            is_batched_reader,
            transform_spec,
            _check_predicate(predicate, read_schema),
            pq.filters_to_expression(filters) if isinstance(filters, list) else filters,
        )
        if shuffle_row_drop_partitions < 1:
            raise ValueError(
                f"shuffle_row_drop_partitions must be 1 or more: {shuffle_row_drop_partitions!r}"
            )
        self._groups = source.groups
        most_rows = max((group.rows for group in self._groups), default=1)
        self._parts = min(shuffle_row_drop_partitions, most_rows)
        chosen = _choose_shard(
            len(self._groups),
            cur_shard,
            shard_count,
            seed if shard_seed is None else shard_seed,
        )
        self._tasks = [_ReadingTask(group, part) for group in chosen for part in range(self._parts)]
        if not self._tasks:
            warnings.warn("no row group is left for this shard", stacklevel=4)
        self._workers = 0 if reader_pool_type == "dummy" else workers_count
        self._shuffle_rows, self._shuffle_row_groups = shuffle_rows, shuffle_row_groups
        self._seed, self._generator = seed, np.random.default_rng(seed)
        self._order_entropy = np.random.SeedSequence(seed).entropy
        self._epoch = 0
        self._pool: ThreadPoolExecutor | None = None
        self.last_row_consumed = self.stopped = False
        self._results = self._read_results()

    @property
    def batched_output(self) -> bool:
        """Whether each result is a batch."""
        return self.is_batched_reader

    @property
    def diagnostics(self) -> dict[str, Any]:
        """An empty dict; petastorm has numbers of its queues here."""
        return {}

    def reset(self) -> None:
        """Starts again after the last row.

        Raises:
            NotImplementedError: There are rows left.
        """
        if not self.last_row_consumed:
            raise NotImplementedError(
                "a reader can be reset only after all rows were consumed: make another reader"
            )
        self.last_row_consumed = False
        self._results = self._read_results()

    def stop(self) -> None:
        """Ends reading; there are no more rows."""
        self.stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Waits until all workers have ended."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        """Returns the reader."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends reading and waits for the workers."""
        self.stop()
        self.join()

    def __iter__(self) -> Reader:
        """Returns the reader: each row comes once."""
        return self

    def __next__(self) -> Any:
        """Returns the next row or batch.

        Raises:
            RuntimeError: The reader was stopped, for instance because its `with` block has ended.
        """
        if self.stopped:
            raise RuntimeError(
                "Trying to read a sample after a reader created by make_reader/make_batch_reader "
                "has stopped, perhaps because its context manager has ended"
            )
        try:
            return next(self._results)
        except StopIteration:
            self.last_row_consumed = True
            raise

    def next(self) -> Any:
        """Returns the next row or batch, like `next(reader)`."""
        return next(self)

    def _read_results(self) -> Generator[Any]:
        tasks_without_rows = 0
        for result in self._read_ahead():
            tasks_without_rows = 0 if result else tasks_without_rows + 1
            if self.num_epochs is None and tasks_without_rows > len(self._tasks):
                raise NoDataAvailableError("an endless reader found no row in a whole pass")
            if self.is_batched_reader and result:
                yield self.schema.make_namedtuple(**result)
            else:
                yield from result

    def _ordered_tasks(self) -> Iterator[_ReadingTask]:
        """Yields the tasks of all epochs."""
        for epoch in itertools.count() if self.num_epochs is None else range(self.num_epochs):
            if self._shuffle_row_groups and (epoch == 0 or self._seed is None):
                order = self._generator.permutation(len(self._tasks))
                self._tasks = [self._tasks[index] for index in order]
            self._epoch += 1  # also after a reset
            yield from self._tasks

    def _read_ahead(self) -> Iterator[Any]:
        """Yields the results of all tasks in order; up to the memory budget, later ones are read
        meanwhile.
        """
        calls = map(self._prepare_call, self._ordered_tasks() if self._tasks else ())
        if not self._workers:
            for call, _ in calls:
                yield call()
            return
        budget, reserved = default_byte_budget(), 0
        pending: deque[tuple[Future[Any], int]] = deque()
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="fd-petastorm")
        try:
            for call, size in calls:
                while pending and (
                    reserved + size > budget
                    or len(pending) >= _ROW_GROUPS_AHEAD_PER_WORKER * self._workers
                ):
                    reserved -= pending[0][1]
                    yield pending.popleft()[0].result()
                pending.append((self._pool.submit(call), size))
                reserved += size
            while pending:
                yield pending.popleft()[0].result()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare_call(self, task: _ReadingTask) -> tuple[Callable[[], Any], int]:
        """Returns the call that reads a task, and the bytes of memory that its result needs."""
        order_seed = None
        if self._shuffle_rows:
            # The parts of a row group are parts of one order.
            order_seed = [self._order_entropy, self._epoch, task.row_group]
        group = self._groups[task.row_group]
        size = _MEMORY_BYTES_PER_ENCODED_BYTE * group.encoded_bytes
        return partial(self._reading.read, group, order_seed, task.part, self._parts), size


def _check_urls(urls: Any) -> str | list[str]:
    given = [urls] if isinstance(urls, str) else urls
    if not isinstance(given, list) or not given or not all(isinstance(url, str) for url in given):
        raise ValueError(f"the data set must be a URL, or a list of URLs of files: {urls!r}")
    return urls


def _read_schema(
    urls: str | list[str], source: ParquetRowGroups, is_batched_reader: bool
) -> Unischema:
    """Returns the schema that petastorm stored with a data set, or else that of its columns."""
    stored = find_stored_schema(urls) if isinstance(urls, str) else None
    if stored is not None and is_batched_reader:
        warnings.warn(
            f"petastorm wrote {urls}, so make_reader is meant for it: make_batch_reader does not "
            "decode what codecs have encoded",
            stacklevel=5,
        )
    elif stored is None and not is_batched_reader:
        warnings.warn(
            f"petastorm has not written {urls}, so make_batch_reader is meant for it: make_reader "
            "is for data sets with a stored schema",
            stacklevel=5,
        )
    return stored or Unischema.from_arrow(source.schema, source.partitions)


def _check_predicate(predicate: Any, schema: Unischema) -> PredicateBase | None:
    if predicate is None:
        return None
    if not isinstance(predicate, PredicateBase):
        raise ValueError("predicate must be derived from PredicateBase")
    tested = set(predicate.get_fields())
    unknown = sorted(tested - set(schema.fields))
    if unknown or not tested:
        raise ValueError(
            f"the predicate tests {', '.join(unknown) or 'no field'}; fields that are read: "
            f"{', '.join(schema.fields)}"
        )
    return predicate


def _choose_shard(
    row_groups: int, shard: int | None, shards: int | None, seed: int | None
) -> list[int]:
    """Returns the row groups of a shard."""
    chosen = list(range(row_groups))
    if shard is None and shards is None:
        return chosen
    try:
        number, count = operator.index(shard), operator.index(shards)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(
            f"cur_shard and shard_count must be integers, and both given: {shard!r}, {shards!r}"
        ) from None
    if not 0 <= number < count:
        raise ValueError(f"cur_shard must be at least 0 and below shard_count: {number}, {count}")
    if row_groups < count:
        raise NoDataAvailableError(
            "Number of row-groups in the dataset must be greater or equal to the number of "
            f"requested shards: {row_groups} row groups, {count} shards. Write more files, for "
            "instance with df.repartition(n), or smaller row groups"
        )
    if seed is not None:
        random.Random(seed).shuffle(chosen)  # noqa: S311 - the order that petastorm has
    return [index for index in chosen if index % count == number]
