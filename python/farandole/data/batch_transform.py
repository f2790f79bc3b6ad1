# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A user's function on whole batches, in worker threads or processes.

The function takes a `pyarrow.RecordBatch` (scalars as columns of their type, vectors as fixed-size
lists, texts as large strings) and returns another one, a `pyarrow.Table`, or a dict of arrays.
Batches stay in order.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from farandole.common import pickling
from farandole.data.arrays import VARIABLE_WIDTH_DTYPES
from farandole.data.lazy_pyarrow import is_list_type, pa

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from farandole._native.reader import Batch, DatasetField, Reader

TRANSFORM_POOLS = ("thread", "process", "dummy")
"""Places where a function may run; `dummy` is the thread that iterates."""


class ResultShapeRecord:
    """The types and shapes of a function's results, for those results that have no rows.

    A result without rows has no types and shapes: an empty list column has no length.
    """

    def __init__(self) -> None:
        """Creates an empty record."""
        self._known: dict[str, Any] | None = None

    def with_known_shapes(
        self, result: dict[str, Any], others: Callable[[], Generator[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Returns the result; where it has no rows, with the types and shapes of another one that
        has.

        Args:
            result: Arrays by name.
            others: Results to look at, where none with rows has come yet. It is called at most
                once.
        """
        if _has_rows(result):
            self._known = self._known or _empty_copies(result)
            return result
        if self._known is None:
            with closing(others()) as found:
                self._known = next((_empty_copies(one) for one in found if _has_rows(one)), {})
        return result | self._known


class BatchTransform:
    """A function with the workers that run it."""

    def __init__(self, function: Callable[[Any], Any], workers: int, pool: str) -> None:
        """Starts nothing yet.

        Args:
            function: From a record batch to a record batch, a table or a dict of arrays.
            workers: Number of batches that are transformed at a time.
            pool: `thread`, `process` or `dummy`.

        Raises:
            ValueError: Another pool, or no workers.
        """
        if pool not in TRANSFORM_POOLS:
            raise ValueError(f"transform_pool must be one of {', '.join(TRANSFORM_POOLS)}: {pool}")
        if workers < 1:
            raise ValueError(f"transform_workers must be at least 1: {workers}")
        self.function, self.workers, self.pool = function, workers, pool
        self._processes: ProcessPoolExecutor | None = None
        self._shapes = ResultShapeRecord()

    def __getstate__(self) -> tuple[bytes, int, str]:
        """Returns the state without workers; the function is pickled by value."""
        return pickling.pickle_by_value(self.function), self.workers, self.pool

    def __setstate__(self, state: tuple[bytes, int, str]) -> None:
        """Starts nothing yet."""
        function, self.workers, self.pool = state
        self.function = cloudpickle.loads(function)
        self._processes, self._shapes = None, ResultShapeRecord()

    def transform_batches(
        self, batches: Iterator[Batch], fields: Sequence[DatasetField], reader: Callable[[], Reader]
    ) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Transforms batches, up to two a worker ahead of the consumer.

        A result without rows has the types and shapes of other results. If it is the first one, the
        function is called with batches of the whole data set until it returns rows.

        Args:
            batches: As the reader gives them.
            fields: Their columns.
            reader: Makes a reader of the whole data set.
        """

        def transform_all_batches() -> Generator[dict[str, Any]]:
            with closing(reader().read_epoch(0, 0)) as found:
                for batch in found:
                    yield _check_result_arrays(self.function(batch_to_arrow(batch, fields)))

        with closing(self._ordered_results(batches, fields)) as results:
            for batch, result in results:
                yield batch, self._shapes.with_known_shapes(result, transform_all_batches)

    def _ordered_results(
        self, batches: Iterator[Batch], fields: Sequence[DatasetField]
    ) -> Generator[tuple[Batch, dict[str, Any]]]:
        if self.pool == "dummy":
            for batch in batches:
                yield batch, _check_result_arrays(self.function(batch_to_arrow(batch, fields)))
            return
        waiting: deque[tuple[Batch, Any]] = deque()
        executor = self._worker_executor()
        call = _transform_in_worker if self.pool == "process" else self.function
        try:
            for batch in batches:
                waiting.append((batch, executor.submit(call, batch_to_arrow(batch, fields))))
                if len(waiting) > 2 * self.workers:
                    first, result = waiting.popleft()
                    yield first, _check_result_arrays(result.result())
            while waiting:
                first, result = waiting.popleft()
                yield first, _check_result_arrays(result.result())
        finally:
            for _, result in waiting:
                result.cancel()
            if executor is not self._processes:
                executor.shutdown(wait=True)

    def _worker_executor(self) -> Executor:
        if self.pool == "thread":
            return ThreadPoolExecutor(self.workers, thread_name_prefix="fd-transform")
        if self._processes is None:
            # A fork of this process would have its locks but not its threads.
            context = multiprocessing.get_context("forkserver")
            function = pickling.pickle_by_value(self.function)
            self._processes = ProcessPoolExecutor(
                self.workers, context, _initialize_worker_process, (function,)
            )
        return self._processes

    def close(self) -> None:
        """Ends worker processes."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.shutdown(wait=True, cancel_futures=True)


_worker_function: Callable[[Any], Any] | None = None


def _initialize_worker_process(function: bytes) -> None:
    """Initializes a worker process: loads the function and watches the parent process."""
    global _worker_function  # noqa: PLW0603 - a worker has one function
    _worker_function = cloudpickle.loads(function)
    threading.Thread(target=_exit_when_parent_ends, name="fd-watch-parent", daemon=True).start()


def _exit_when_parent_ends() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _transform_in_worker(batch: Any) -> Any:
    if _worker_function is None:
        raise RuntimeError("this worker process has no function")
    return _check_result_arrays(_worker_function(batch))


def batch_to_arrow(batch: Batch, fields: Sequence[DatasetField]) -> Any:
    """Returns a batch as a `pyarrow.RecordBatch` that shares its memory; only booleans are copied.

    Args:
        batch: As the reader gives it.
        fields: Its columns.
    """
    py_buffer, from_buffers = pa.py_buffer, pa.Array.from_buffers
    arrays = []
    for field in fields:
        if field.dtype in VARIABLE_WIDTH_DTYPES:
            kind = pa.large_string() if field.dtype == "utf8" else pa.large_binary()
            ends, values = (py_buffer(part) for part in batch.text_buffers(field.name))
            arrays.append(from_buffers(kind, batch.rows, [None, ends, values]))
            continue
        count = batch.rows * math.prod(field.shape)
        buffer = py_buffer(memoryview(batch.column(field.name)))
        if field.dtype == "bool":
            values = from_buffers(pa.uint8(), count, [None, buffer]).cast(pa.bool_())
        else:
            kind = pa.type_for_alias(field.dtype)
            values = from_buffers(kind, count, [None, buffer])
        arrays.append(
            pa.FixedSizeListArray.from_arrays(values, math.prod(field.shape))
            if field.shape
            else values
        )
    return pa.RecordBatch.from_arrays(arrays, [field.name for field in fields])


def _has_rows(result: dict[str, Any]) -> bool:
    return any(len(values) for values in result.values())


def _empty_copies(result: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of the arrays or tensors with zero rows; arrays that cannot be sliced by rows
    are left out.
    """
    none = {}
    for name, values in result.items():
        # Sparse and nested tensors have no slices of rows.
        with suppress(RuntimeError, TypeError, IndexError):
            none[name] = (
                values[:0].clone() if hasattr(values, "clone") else np.asarray(values)[:0].copy()
            )
    return none


def _check_result_arrays(result: Any) -> dict[str, Any]:
    """Returns the result of a function, as arrays by name."""
    if isinstance(result, dict):
        return result
    names = getattr(result, "column_names", None) or getattr(
        getattr(result, "schema", None), "names", None
    )
    if names is None or not hasattr(result, "column"):
        kind = type(result).__name__
        raise TypeError(
            "transformation_fn must return a RecordBatch, a Table or a dict of arrays, it "
            f"returned {kind}"
        )
    return {name: column_from_arrow(name, result.column(index)) for index, name in enumerate(names)}


def column_from_arrow(name: str, column: Any, who: str = "transformation_fn") -> Any:
    """Returns a column as a NumPy array of shape `(rows,)` or, for lists of one length, `(rows,
    length)`.

    Args:
        name: Name of the column, for messages.
        column: An Arrow array or chunked array.
        who: Made the column, for messages.

    Raises:
        ValueError: Nulls, lists of different lengths, types that are no numbers.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = (
                pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            )
    if column.null_count:
        raise ValueError(f"{who} left {column.null_count} nulls in column {name}")
    kind = column.type
    if is_list_type(kind):
        lengths = column.value_lengths().unique()
        if len(lengths) > 1:
            raise ValueError(f"{who} made lists of different lengths in column {name}")
        values = column_from_arrow(name, column.flatten(), who)
        return (
            values.reshape(len(column), -1)
            if len(column)
            else values.reshape(0, getattr(kind, "list_size", 0))
        )
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"{who} made column {name} of {kind}, which is neither a number nor a list of numbers"
        )
    return column.to_numpy(zero_copy_only=False)
