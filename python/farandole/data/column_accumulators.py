# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Statistics of a column, gathered batch by batch and merged from tasks.

Batches and tasks do not change a bit of the result, so data that is prepared again with other
partitions is the same data. Nulls, NaN and infinities count as missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.number_conversion import dates_and_decimals_to_numbers
from farandole.data.lazy_pyarrow import pa, pc

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_CATEGORY_VALUES = 1_000_000
"""Distinct values that a column of categories may have."""
_MAX_QUANTILE_CELLS = 1 << 20
"""Distinct numbers that a quantile sketch keeps before it merges neighbouring numbers."""
_LOW_BITS = 26
_MANTISSA_BITS = 53
_MIN_EXPONENT = -1200
"""Lower bound of the exponent of every float64 whose mantissa is scaled to an integer."""


def finite_numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Returns the finite values of a column of numbers as float64.

    Args:
        column: integers, floats, booleans, decimals, dates or times.
    """
    column = dates_and_decimals_to_numbers(column.drop_null(), "of numbers")
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values[np.isfinite(values)]


@dataclass
class ExactMean:
    """The mean of numbers, by their exact sum."""

    count: int = 0
    total: int = 0
    """The sum, in units of the least float64."""

    def add(self, column: pa.Array) -> None:
        """Counts the values of a batch.

        Args:
            column: Column of numbers.
        """
        values = finite_numbers(column)
        self.count += len(values)
        mantissas, exponents = np.frexp(values)
        whole = (mantissas * 2.0**_MANTISSA_BITS).astype(np.int64)
        kinds, owners = np.unique(exponents, return_inverse=True)
        for part, shift in ((whole >> _LOW_BITS, _LOW_BITS), (whole & (1 << _LOW_BITS) - 1, 0)):
            # Sums of a batch's halves of mantissas are below 2**53: floats hold them exactly.
            sums = np.bincount(owners, part.astype(np.float64), len(kinds))
            for exponent, some in zip(kinds.tolist(), sums.tolist(), strict=True):
                self.total += int(some) << (shift + exponent - _MANTISSA_BITS - _MIN_EXPONENT)

    def merge(self, other: ExactMean) -> None:
        """Adds the counts of another task."""
        self.count, self.total = self.count + other.count, self.total + other.total

    @property
    def value(self) -> float | None:
        """The mean, rounded once; `None` without values."""
        from fractions import Fraction  # noqa: PLC0415 - rarely needed

        return float(Fraction(self.total, self.count << -_MIN_EXPONENT)) if self.count else None


@dataclass
class QuantileSketch:
    """A quantile of numbers: exact up to a million distinct ones, else to about six digits."""

    cells: dict[int, int] = field(default_factory=dict)
    """Rows by number, as an integer of the same order without its lowest bits."""
    dropped: int = 0
    """The number of those bits: as few as the cells allow. It depends only on the set of all
    rows.
    """
    max_cells: int = _MAX_QUANTILE_CELLS
    """Cells, at most."""

    def add(self, column: pa.Array) -> None:
        """Counts the values of a batch.

        Args:
            column: Column of numbers.
        """
        bits = (finite_numbers(column) + 0.0).view(np.int64)  # one zero
        ordered = np.where(bits < 0, np.int64(-(2**63)) - bits, bits)
        keys, counts = np.unique(ordered >> self.dropped, return_counts=True)
        self._add_counts(zip(keys.tolist(), counts.tolist(), strict=True))

    def merge(self, other: QuantileSketch) -> None:
        """Adds the counts of another task."""
        self._coarsen_cells(max(0, other.dropped - self.dropped))
        shift = self.dropped - other.dropped
        self._add_counts((key >> shift, count) for key, count in other.cells.items())

    def value_at(self, share: float) -> float | None:
        """Returns the number below or at which a share of the rows is; between two of them, their
        mean.

        Args:
            share: 0.5 is the median.
        """
        total = sum(self.cells.values())
        if not total:
            return None
        target = share * total
        seen, lower = 0, None
        for key in sorted(self.cells):
            if lower is not None:
                return (lower + self._cell_key_to_float(key)) / 2
            seen += self.cells[key]
            if seen > target:
                return self._cell_key_to_float(key)
            if seen == target:
                lower = self._cell_key_to_float(key)
        return lower

    def sorted_numbers(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the numbers in their order, and the rows of each."""
        keys = sorted(self.cells)
        return np.array([self._cell_key_to_float(key) for key in keys]), np.array(
            [self.cells[key] for key in keys], np.int64
        )

    def quantile_split_point(self, share: float) -> float | None:
        """Returns the number at or below which about a share of the rows is, and above which there
        is a row.

        Args:
            share: Share of the rows.

        Returns:
            The number; `None` where all rows have the same one.
        """
        keys = sorted(self.cells)
        target, seen = share * sum(self.cells.values()), 0
        for key in keys[:-1]:
            seen += self.cells[key]
            if seen >= target:
                return self._cell_maximum(key)
        return self._cell_maximum(keys[-2]) if len(keys) > 1 else None

    def least_cell_end_covering(self, share: float) -> float | None:
        """Returns the least number that ends a cell and that at least a share of the rows does not
        exceed.

        Args:
            share: Share of the rows.
        """
        target, seen = share * sum(self.cells.values()), 0
        for key in sorted(self.cells):
            seen += self.cells[key]
            if seen >= target:
                return self._cell_maximum(key)
        return None

    def _cell_maximum(self, key: int) -> float:
        """Returns the largest number of a cell."""
        return self._cell_key_to_float((key << self.dropped) + (1 << self.dropped) - 1, whole=True)

    def _add_counts(self, pairs: Any) -> None:
        for key, count in pairs:
            self.cells[key] = self.cells.get(key, 0) + count
        while len(self.cells) > self.max_cells:
            self._coarsen_cells(1)

    def _coarsen_cells(self, bits: int) -> None:
        if not bits:
            return
        before, self.cells = self.cells, {}
        self.dropped += bits
        for key, count in before.items():
            self.cells[key >> bits] = self.cells.get(key >> bits, 0) + count

    def _cell_key_to_float(self, key: int, *, whole: bool = False) -> float:
        ordered = key if whole else key << self.dropped
        bits = ordered if ordered >= 0 else -(2**63) - ordered
        return float(np.array([bits], np.int64).view(np.float64)[0])


@dataclass
class MaxListLength:
    """The length of the longest list."""

    value: int = 1

    def add(self, column: pa.Array) -> None:
        """Looks at the lists of a batch.

        Args:
            column: Column of lists.
        """
        self.value = max(self.value, pc.max(column.value_lengths()).as_py() or 0)

    def merge(self, other: MaxListLength) -> None:
        """Adds the result of another task."""
        self.value = max(self.value, other.value)


@dataclass
class ValueCounts:
    """The number of occurrences of each value of a column."""

    counts: dict[Any, int] = field(default_factory=dict)

    def add(self, column: pa.Array) -> None:
        """Counts the values of a batch.

        Args:
            column: Column of texts, integers, booleans, floats or decimals.

        Raises:
            ValueError: More distinct values than categories can have.
        """
        whole = column.drop_null()
        if pa.types.is_floating(whole.type) or pa.types.is_decimal(whole.type):
            whole = pa.array(finite_numbers(whole))
        found = whole.value_counts()
        self._add_counts(
            zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True)
        )

    def merge(self, other: ValueCounts) -> None:
        """Adds the counts of another task."""
        self._add_counts(other.counts.items())

    @property
    def value(self) -> Any:
        """Returns the most frequent value, of several the least; `None` without values."""
        return min(self.counts, key=lambda value: (-self.counts[value], value), default=None)

    def most_frequent_categories(self, max_count: int | None) -> list[Any]:
        """Returns the categories in ascending order.

        Args:
            max_count: Number of categories; only the most frequent values are kept.
        """
        chosen = sorted(self.counts, key=lambda value: (-self.counts[value], value))[:max_count]
        return sorted(chosen)

    def _add_counts(self, pairs: Any) -> None:
        for value, count in pairs:
            self.counts[value] = self.counts.get(value, 0) + count
        if len(self.counts) > MAX_CATEGORY_VALUES:
            raise ValueError(
                f"has more than {MAX_CATEGORY_VALUES:,} different values, which is too many for "
                f"categories"
            )
