# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts over all rows of a source, by threads, or of a Spark DataFrame, by its executors.

A counter is started for each part of the rows. Its method `add` counts a record batch, and `merge`
adds another counter.
"""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cloudpickle

from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from farandole.data.inputs.source_units import RowSource, SourceUnit


def accumulate_over_source(
    source: RowSource, columns: list[str], start: Callable[[], Any], threads: int
) -> Any:
    """Returns the count of all rows of a source.

    Args:
        source: The rows.
        columns: Columns of the batches.
        start: Returns a counter without rows.
        threads: Units that are read at the same time.
    """

    def accumulate_unit(unit: SourceUnit) -> Any:
        counter = start()
        for batch in unit.batches():
            counter.add(batch)
        return counter

    whole = start()
    with ThreadPoolExecutor(threads, "farandole-count") as pool:
        for part in pool.map(accumulate_unit, source.units(columns)):
            whole.merge(part)
    return whole


def accumulate_on_executors(
    frame: Any,
    columns: list[str],
    start: Callable[[], Any],
    collect_rows: Callable[[Any], Iterable[Any]],
) -> Any:
    """Returns the count of all rows of a Spark DataFrame, which its executors count.

    Args:
        frame: The rows: a result of `alias_columns_by_number`.
        columns: Names of the columns.
        start: Returns a counter without rows, also on executors.
        collect_rows: Returns the rows of a small DataFrame.

    Raises:
        ValueError: A counter refused a batch. Spark would repeat a failing task, and wrap the
            message into two stack traces.
    """

    def accumulate_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counter, error = start(), None
        for batch in batches:
            try:
                if error is None:
                    counter.add(batch.rename_columns(columns))
            except ValueError as problem:
                error = str(problem)
        result = [pa.array([error], pa.string()), pa.array([pickle.dumps(counter)], pa.binary())]
        yield pa.RecordBatch.from_arrays(result, names=["error", "part"])

    whole = start()
    for row in collect_rows(frame.mapInArrow(accumulate_partition, "error string, part binary")):
        if row.error is not None:
            raise ValueError(row.error)
        whole.merge(cloudpickle.loads(bytes(row.part)))
    return whole


def alias_columns_by_number(frame: Any, names: Sequence[str]) -> Any:
    """Returns columns of a Spark DataFrame as `column0`, `column1` and so on.

    `mapInArrow` takes no names with dots or backticks, so columns travel by number.

    Args:
        frame: A DataFrame of Spark.
        names: Columns of the frame.
    """
    return frame.select(
        *(frame[quote_column(name)].alias(f"column{index}") for index, name in enumerate(names))
    )


def quote_column(name: str) -> str:
    """Returns a column's name in Spark's quotation marks.

    Args:
        name: Any name; a dot in it is no path.
    """
    return "`" + name.replace("`", "``") + "`"
