# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Statistics of the columns of a source, and the drift of another source from them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from farandole._native.store import Store as NativeStore
from farandole.data.column_accumulators import ExactMean, QuantileSketch, finite_numbers
from farandole.data.columns import refuse_missing_columns
from farandole.data.inputs.frames import is_spark_dataframe
from farandole.data.inputs.sources import RowSource, open_source
from farandole.data.lazy_pyarrow import (
    decode_dictionary,
    is_list_type,
    is_number_type,
    is_text_type,
    pa,
)
from farandole.data.statistics_passes import (
    accumulate_on_executors,
    accumulate_over_source,
    alias_columns_by_number,
)
from farandole.stores import small_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


_STATISTICS_FILE = "_statistics.json"
_DECILE_BINS = 10
_MAX_SKETCH_CELLS = 4096
"""Number of distinct buckets of a column: about three digits."""
_MAX_DISTINCT_VALUES = 65536
_MAX_KEPT_VALUES = 100
"""Values of a column of strings that are kept, the most frequent ones."""
_MIN_BIN_SHARE = 1e-4
"""A share that is taken for 0."""


_SPARK_KINDS = {
    **dict.fromkeys(("byte", "short", "integer", "long", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("date", "timestamp", "timestamp_ntz"), "number"),
    **dict.fromkeys(("string", "boolean", "varchar", "char"), "value"),
    "array": "list",
}


@dataclass(frozen=True)
class ColumnStatistics:
    """The statistics of a column. For lists, the numbers are their lengths."""

    kind: str
    """`number`, `value` (strings and booleans), `list`, or `other`; for `other`, only rows and
    missing rows are counted.
    """
    rows: int
    missing: int
    """Nulls, NaN and infinities."""
    mean: float | None = None
    least: float | None = None
    most: float | None = None
    edges: list[float] = field(default_factory=list)
    """Numbers only: the distinct deciles."""
    counts: list[int] = field(default_factory=list)
    """Numbers only: rows up to each edge, and above the last one."""
    values: dict[str, int] = field(default_factory=dict)
    """Values only: rows of each of the most frequent values."""
    distinct: int | None = None
    """Values only: the number of distinct values; `None` if more than 65,536."""


@dataclass(frozen=True)
class ColumnDrift:
    """The difference of a column from the statistics."""

    index: float
    """The population stability index: 0 for equal shares; from 0.25 on the column has changed. NaN
    where there is none: no rows with a value on one side, values that the statistics could not
    count, or a column of kind `other`."""
    missing: float
    """The share of missing rows, less the one of the statistics."""
    new: float = 0.0
    """Values only: the share of rows whose value is not in the statistics."""


@dataclass(frozen=True)
class Statistics:
    """Statistics by column. Dates and times are numbers, in the unit that they are stored in."""

    columns: dict[str, ColumnStatistics]

    def __getitem__(self, name: str) -> ColumnStatistics:
        """Returns the statistics of one column."""
        return self.columns[name]

    def drift(
        self, source: Any, *, optional: Iterable[str] = (), **reading: Any
    ) -> dict[str, ColumnDrift]:
        """Returns the drift of the columns of another source, the largest first, then columns
        without an index.

        Args:
            source: As for `prepare_data`, or a Spark DataFrame, whose executors count its rows.
            optional: Columns that the source may lack. They are then left out of the result.
            reading: `format`, `types` and `options`, as for `prepare_data`.

        Raises:
            ValueError: A column is missing, or has another kind of values.
        """
        opened = _open_source_unless_open(source, reading)
        allowed = set(optional) - set(_column_names(opened))
        before = {name: earlier for name, earlier in self.columns.items() if name not in allowed}
        found = _collect_statistics(opened, list(before), 2, before)
        drifts = {
            name: _column_drift(name, earlier, found[name]) for name, earlier in before.items()
        }
        return dict(
            sorted(drifts.items(), key=lambda pair: (math.isnan(pair[1].index), -pair[1].index))
        )

    def to_values(self) -> dict[str, Any]:
        """Returns plain values, which JSON can write."""
        return {name: asdict(earlier) for name, earlier in self.columns.items()}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        """Builds the statistics from plain values.

        Args:
            values: Result of `to_values`.
        """
        return cls({name: ColumnStatistics(**earlier) for name, earlier in values.items()})

    def to_json(self) -> str:
        """Returns the statistics as text."""
        return json.dumps(self.to_values())

    @classmethod
    def of_json(cls, text: str | bytes) -> Self:
        """Builds the statistics from JSON text.

        Args:
            text: Result of `to_json`.
        """
        return cls.of_values(json.loads(text))


def statistics_of(
    source: Any, columns: Sequence[str] | None = None, *, threads: int = 2, **reading: Any
) -> Statistics:
    """Statistics of a source, in one pass over its rows.

    Args:
        source: As for `prepare_data`, or a Spark DataFrame, whose executors count its rows.
        columns: Columns to read; default: all.
        threads: Files read at the same time.
        reading: `format`, `types` and `options`, as for `prepare_data`.

    Raises:
        ValueError: A column is missing.
    """
    opened = _open_source_unless_open(source, reading)
    found = _collect_statistics(opened, None if columns is None else list(columns), threads)
    return Statistics({name: tally.to_statistics() for name, tally in found.items()})


def read_statistics(url: str) -> Statistics | None:
    """Returns the statistics that are kept with prepared data.

    Args:
        url: URL of the training data.
    """
    values = small_files.read_json(
        NativeStore(url), _STATISTICS_FILE, small_files.MAX_TABLE_FILE_BYTES
    )
    if values is None:
        return None
    with small_files.raise_as_damaged_file(f"{url}/{_STATISTICS_FILE}"):
        return Statistics.of_values(values)


def load_or_compute_statistics(
    url: str, source: Any, columns: Sequence[str], threads: int
) -> Statistics:
    """Returns the statistics that are stored with prepared data, or computes them if there are
    none.

    Args:
        url: URL of the training data.
        source: Source of the data: an opened source, or a Spark DataFrame.
        columns: Columns of the source.
        threads: Files read at the same time.
    """
    stored = read_statistics(url)
    if stored is not None and set(columns) <= set(stored.columns):
        return stored
    counted = _collect_statistics(source, list(columns), threads)
    made = Statistics({name: tally.to_statistics() for name, tally in counted.items()})
    NativeStore(url).write(_STATISTICS_FILE, made.to_json().encode())
    return made


class _StatisticsCollector:
    """Counts the rows of a column; for a drift, only the rows of each bin of the statistics."""

    def __init__(self, kind: str, before: ColumnStatistics | None = None) -> None:
        self.kind, self.rows, self.missing = kind, 0, 0
        self.edges = None if before is None else before.edges
        self.known = None if before is None else before.values
        self.bins: list[int] = [0] * (len(self.edges or ()) + 1)
        self.mean, self.cells = ExactMean(), QuantileSketch(max_cells=_MAX_SKETCH_CELLS)
        self.smallest, self.largest = math.inf, -math.inf
        self.values: dict[str, int] | None = {}

    def add(self, column: Any) -> None:
        column = decode_dictionary(column)
        self.rows += len(column)
        if self.kind == "list":
            self.missing += column.null_count
            column = column.drop_null().value_lengths()
        if self.kind in ("number", "list"):
            values = finite_numbers(column)
            if self.kind == "number":
                self.missing += len(column) - len(values)
            if self.edges is not None:
                self.bins = [
                    count + more
                    for count, more in zip(self.bins, _bin_counts(values, self.edges), strict=True)
                ]
                return
            self.mean.add(column)
            self.cells.add(column)
            if len(values):
                self.smallest, self.largest = (
                    min(self.smallest, float(values.min())),
                    max(self.largest, float(values.max())),
                )
            return
        self.missing += column.null_count
        if self.kind == "value":
            counted = column.drop_null().cast(pa.string()).value_counts()
            self._add_value_counts(
                zip(
                    counted.field("values").to_pylist(),
                    counted.field("counts").to_pylist(),
                    strict=True,
                )
            )

    def _add_value_counts(self, pairs: Any) -> None:
        if self.values is None:
            return
        for value, count in pairs:
            if self.known is not None and value not in self.known:
                continue
            self.values[value] = self.values.get(value, 0) + count
        if len(self.values) > _MAX_DISTINCT_VALUES:
            self.values = None

    def merge(self, other: _StatisticsCollector) -> None:
        self.rows, self.missing = self.rows + other.rows, self.missing + other.missing
        self.mean.merge(other.mean)
        self.cells.merge(other.cells)
        self.bins = [earlier + more for earlier, more in zip(self.bins, other.bins, strict=True)]
        self.smallest, self.largest = (
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )
        if other.values is None:
            self.values = None
        else:
            self._add_value_counts(other.values.items())

    def to_statistics(self) -> ColumnStatistics:
        if self.kind in ("number", "list") and self.mean.count:
            # The largest number of its cell: the rows in the cell are then below the edge in any
            # other count, too.
            deciles = [
                self.cells.least_cell_end_covering(bin_ / _DECILE_BINS)
                for bin_ in range(1, _DECILE_BINS)
            ]
            edges = sorted({earlier for earlier in deciles if earlier is not None})
            cells, rows = self.cells.sorted_numbers()
            counts = _bin_counts(cells, edges, rows)
            return ColumnStatistics(
                self.kind,
                self.rows,
                self.missing,
                self.mean.value,
                self.smallest,
                self.largest,
                edges,
                counts,
            )
        values = self.values if self.kind == "value" else None
        shown = sorted(values or {}, key=lambda value: (-(values or {})[value], value))[
            :_MAX_KEPT_VALUES
        ]
        return ColumnStatistics(
            self.kind, self.rows, self.missing,
            values={value: (values or {})[value] for value in shown},
            distinct=None if values is None else len(values),
        )  # fmt: skip


def _bin_counts(values: Any, edges: Sequence[float], rows: Any = None) -> list[int]:
    """Returns the number of rows up to each edge and above the last edge; each value counts for one
    row, or for its entry in `rows`.
    """
    places = np.searchsorted(np.asarray(edges, np.float64), values, side="left")
    return np.bincount(places, rows, len(edges) + 1).astype(np.int64).tolist()


class _ColumnCollectors:
    """A collector for each column of a source."""

    def __init__(self, kinds: Mapping[str, str], before: Mapping[str, ColumnStatistics]) -> None:
        self.columns = {
            name: _StatisticsCollector(kind, before.get(name)) for name, kind in kinds.items()
        }

    def add(self, batch: pa.RecordBatch) -> None:
        for column, tally in zip(batch.columns, self.columns.values(), strict=True):
            tally.add(column)

    def merge(self, other: _ColumnCollectors) -> None:
        for name, tally in other.columns.items():
            self.columns[name].merge(tally)


def _collect_statistics(
    source: Any,
    columns: list[str] | None,
    threads: int,
    before: Mapping[str, ColumnStatistics] | None = None,
) -> dict[str, _StatisticsCollector]:
    """Counts in this process, or the rows of a Spark DataFrame on its executors; `before` for a
    drift.
    """
    names = _column_names(source)
    if columns is not None:
        refuse_missing_columns(columns, names, "the source")
        names = columns
    if isinstance(source, RowSource):
        kinds = [_statistics_kind_of_type(source.schema.field(name).type) for name in names]
        start = partial(_ColumnCollectors, dict(zip(names, kinds, strict=True)), before or {})
        return accumulate_over_source(source, names, start, threads).columns
    chosen = alias_columns_by_number(source, names)
    types = [field.dataType.typeName() for field in chosen.schema.fields]
    kinds = [_SPARK_KINDS.get(kind, "other") for kind in types]
    start = partial(_ColumnCollectors, dict(zip(names, kinds, strict=True)), before or {})
    return accumulate_on_executors(chosen, names, start, lambda frame: frame.collect()).columns


def _open_source_unless_open(source: Any, reading: dict[str, Any]) -> Any:
    """Returns a source that was opened, or a Spark DataFrame."""
    return (
        source
        if is_spark_dataframe(source) or isinstance(source, RowSource)
        else open_source(source, **reading)
    )


def _column_names(source: Any) -> list[str]:
    return source.schema.names if isinstance(source, RowSource) else source.columns


def _statistics_kind_of_type(kind: Any) -> str:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_number_type(inner) or pa.types.is_temporal(inner):
        return "number"
    if is_text_type(inner) or pa.types.is_boolean(inner):
        return "value"
    return "list" if is_list_type(inner) else "other"


def _column_drift(name: str, before: ColumnStatistics, now: _StatisticsCollector) -> ColumnDrift:
    if before.kind != now.kind:
        raise ValueError(
            f"column {name!r} is a {now.kind} now, in the statistics it is a {before.kind}"
        )
    missing = now.missing / max(now.rows, 1) - before.missing / max(before.rows, 1)
    if before.kind in ("number", "list"):
        return ColumnDrift(_stability_index(before.counts, now.bins), missing)
    if before.kind == "value" and before.distinct is not None:
        known = [(now.values or {}).get(value, 0) for value in before.values]
        others = before.rows - before.missing - sum(before.values.values())
        new = now.rows - now.missing - sum(known)
        share = new / max(now.rows - now.missing, 1) if before.distinct <= _MAX_KEPT_VALUES else 0.0
        return ColumnDrift(
            _stability_index([*before.values.values(), others], [*known, new]), missing, share
        )
    return ColumnDrift(math.nan, missing)


def _stability_index(before: Sequence[int], now: Sequence[int]) -> float:
    """Returns the population stability index of two counts of the same bins; NaN if one has no
    rows.
    """
    if not sum(before) or not sum(now):
        return math.nan
    shares = [
        (max(earlier / sum(before), _MIN_BIN_SHARE), max(later / sum(now), _MIN_BIN_SHARE))
        for earlier, later in zip(before, now, strict=True)
    ]
    return sum((later - earlier) * math.log(later / earlier) for earlier, later in shares)
