# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Validation rows chosen by a column: a share of each class, whole groups, or the latest rows.

As with a plain share, the choice depends only on the content of the rows and the seed, not on
files, batches and tasks. Each side gets at least one row if the column allows it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from farandole.data.column_accumulators import QuantileSketch, finite_numbers
from farandole.data.lazy_pyarrow import decode_dictionary, is_list_type, pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    Hashes = npt.NDArray[Any]

_HASH_SPACE = 1 << 64
_MAX_KEPT_HASHES = 1 << 16
"""Least hashes of a class that are kept: up to so many validation rows of a class, their number
is exact.
"""
_MAX_CLASSES = 1000
_MIX_CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_NULL_HASH = 0xA5A5A5A5A5A5A5A5


@dataclass(frozen=True)
class ValidationSplit:
    """The rule that chooses the validation rows."""

    by: Literal["stratify", "group", "time"]
    column: str
    share: float
    seed: int = 0
    hashed: tuple[str, ...] = ()
    """Columns whose content decides, with `stratify`."""

    def make_split_collector(self) -> Any:
        """Returns the facts about all rows that the split needs."""
        return {
            "stratify": _ClassHashCollector,
            "group": _GroupHashRange,
            "time": _TimeQuantileCollector,
        }[self.by](self)

    @property
    def columns_to_read(self) -> list[str]:
        """The columns that are looked at."""
        return list(dict.fromkeys([self.column, *self.hashed]))


def resolve_validation_split(
    share: float | str | None, stratify: str | None, group: str | None, time: str | None, seed: int
) -> ValidationSplit | None:
    """Returns the split that three arguments ask for; `None` where rows alone decide.

    Args:
        share: Share of the rows, or a column.
        stratify: Column of classes.
        group: Column of groups.
        time: Column of times.
        seed: Seed of the choice.

    Raises:
        ValueError: More than one of them, or no share.
    """
    given = {"stratify": stratify, "group": group, "time": time}
    chosen = {name: column for name, column in given.items() if column is not None}
    if not chosen:
        return None
    chosen_text = " and ".join(f"validation_{name}" for name in chosen)
    if len(chosen) > 1:
        raise ValueError(
            f"at most one of validation_stratify, validation_group, validation_time: {chosen_text}"
        )
    if isinstance(share, str) or not share:
        raise ValueError(
            f"{chosen_text} chooses a share of the rows: validation must be a number above 0: "
            f"{share!r}"
        )
    ((by, column),) = chosen.items()
    return ValidationSplit(by, column, float(share), seed)  # pyright: ignore[reportArgumentType] - of three words


def row_hashes(batch: pa.RecordBatch, columns: Sequence[str], seed: int) -> Hashes:
    """Returns a hash of each row.

    Args:
        batch: The rows.
        columns: Columns that the hash includes.
        seed: Seed of the hash.
    """
    found = np.full(
        batch.num_rows, _mix_hashes(np.array([seed % _HASH_SPACE], np.uint64))[0], np.uint64
    )
    for name in columns:
        found = _mix_hashes(found ^ _hash_column(batch.column(name)))
    return found


def _mix_hashes(values: Hashes) -> Hashes:
    with np.errstate(over="ignore"):
        values = values + np.uint64(_MIX_CONSTANTS[0])
        values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_CONSTANTS[1])
        values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_CONSTANTS[2])
    return values ^ (values >> np.uint64(31))


def _hash_column(column: Any) -> Hashes:
    column = decode_dictionary(column)
    kind = column.type
    if pa.types.is_struct(kind):
        found = np.zeros(len(column), np.uint64)
        for part in column.flatten():
            found = _mix_hashes(found ^ _hash_column(part))
        return found
    if is_list_type(kind):
        return _hash_lists(column)
    if pa.types.is_floating(kind):
        found = _mix_hashes(
            (column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0).view(
                np.uint64
            )
        )
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        whole = column.cast(pa.uint64() if kind == pa.uint64() else pa.int64()).fill_null(0)
        found = _mix_hashes(whole.to_numpy(zero_copy_only=False).astype(np.uint64))
    else:
        coded = column.dictionary_encode()
        own = [_hash_text(str(value.as_py())) for value in coded.dictionary]
        found = np.array([*own, 0], np.uint64)[
            coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        ]
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _NULL_HASH
    return found


def _hash_lists(column: Any) -> Hashes:
    """Sums of the hashes of values and their places; lengths count too."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(
        ends - lengths, lengths
    )
    values = _mix_hashes(_hash_column(column.flatten()) ^ _mix_hashes(places.astype(np.uint64)))
    with np.errstate(over="ignore"):
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        return _mix_hashes(sums[ends] - sums[ends - lengths] + lengths.astype(np.uint64))


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _distinct_texts_and_indices(column: Any) -> tuple[list[str | None], Hashes]:
    """Returns the values of a column as texts, and which of them each row has."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = [None if value is None else str(value) for value in coded.dictionary.to_pylist()]
    places = coded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False).astype(np.int64)
    return [*values, None], places


@dataclass
class _ClassHashCollector:
    """Rows of each class, and the least of their hashes."""

    split: ValidationSplit
    counts: dict[str | None, int] = field(default_factory=dict)
    smallest: dict[str | None, Any] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch."""
        values, places = _distinct_texts_and_indices(batch.column(self.split.column))
        found = row_hashes(batch, self.split.hashed, self.split.seed)
        for index, value in enumerate(values):
            own = found[places == index]
            if len(own):
                self._add_class_hashes(value, len(own), own)

    def merge(self, other: _ClassHashCollector) -> None:
        """Adds the counts of another task."""
        for value, count in other.counts.items():
            self._add_class_hashes(value, count, other.smallest[value])

    def _add_class_hashes(self, value: str | None, count: int, own: Hashes) -> None:
        self.counts[value] = self.counts.get(value, 0) + count
        whole = np.sort(
            np.concatenate([self.smallest[value], own]) if value in self.smallest else own
        )
        self.smallest[value] = whole[:_MAX_KEPT_HASHES]
        if len(self.counts) > _MAX_CLASSES:
            raise ValueError(
                f"column {self.split.column!r} has more than {_MAX_CLASSES} classes to hold rows "
                f"out of"
            )

    def make_held_out_rule(self) -> HeldOutRule:
        """Returns the rule for each row's side. If a class has two rows or more, both sides get at
        least one.

        Raises:
            ValueError: no class has two rows that differ.
        """
        bounds: dict[str | None, int] = {}
        for value, count in self.counts.items():
            wanted = min(max(1, round(self.split.share * count)), count - 1)
            hashes = self.smallest[value]
            exact = wanted < len(hashes)
            bounds[value] = (
                int(hashes[wanted])
                if exact
                else int(self.split.share * _HASH_SPACE)
                if wanted
                else 0
            )
        if not any(bounds[value] > int(self.smallest[value][0]) for value in bounds):
            raise ValueError(
                f"column {self.split.column!r} has no class with two rows, so none can be held out"
            )
        return HeldOutRule(self.split, bounds=bounds)


@dataclass
class _GroupHashRange:
    """The hashes of groups."""

    split: ValidationSplit
    smallest: int = _HASH_SPACE
    largest: int = -1

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch."""
        if batch.num_rows:
            found = row_hashes(batch, [self.split.column], self.split.seed)
            self.smallest, self.largest = (
                min(self.smallest, int(found.min())),
                max(self.largest, int(found.max())),
            )

    def merge(self, other: _GroupHashRange) -> None:
        """Adds the counts of another task."""
        self.smallest, self.largest = (
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    def make_held_out_rule(self) -> HeldOutRule:
        """Returns the rule for each group's side.

        Raises:
            ValueError: there are no two groups.
        """
        if self.smallest >= self.largest:
            raise ValueError(f"column {self.split.column!r} has one group, so none can be held out")
        bound = min(max(int(self.split.share * _HASH_SPACE), self.smallest + 1), self.largest)
        return HeldOutRule(self.split, bound=bound)


@dataclass
class _TimeQuantileCollector:
    """The split of rows by their time."""

    split: ValidationSplit
    quantile: QuantileSketch = field(default_factory=QuantileSketch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch.

        Raises:
            ValueError: rows without a time.
        """
        self.quantile.add(_require_no_nulls(batch.column(self.split.column), self.split.column))

    def merge(self, other: _TimeQuantileCollector) -> None:
        """Adds the counts of another task."""
        self.quantile.merge(other.quantile)

    def make_held_out_rule(self) -> HeldOutRule:
        """Returns the rule that holds out the latest rows.

        Raises:
            ValueError: all rows are of one time.
        """
        cut = self.quantile.quantile_split_point(1.0 - self.split.share)
        if cut is None:
            raise ValueError(
                f"column {self.split.column!r} has one time, so no rows are later than others"
            )
        return HeldOutRule(self.split, cut=cut)


def _require_no_nulls(column: Any, name: str) -> Any:
    if column.null_count:
        raise ValueError(
            f"column {name!r} has nulls in {column.null_count} rows, so these rows cannot be "
            "ordered"
        )
    return column


@dataclass(frozen=True)
class HeldOutRule:
    """The rule that holds out rows, made by a pass over all rows."""

    split: ValidationSplit
    bounds: Mapping[str | None, int] = field(default_factory=dict)
    bound: int = 0
    cut: float = 0.0

    def validation_mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns for each row whether it is for validation.

        Args:
            batch: With the columns that the split reads.
        """
        split = self.split
        if split.by == "time":
            return pa.array(
                finite_numbers(_require_no_nulls(batch.column(split.column), split.column))
                > self.cut
            )
        if split.by == "group":
            return pa.array(row_hashes(batch, [split.column], split.seed) < np.uint64(self.bound))
        values, places = _distinct_texts_and_indices(batch.column(split.column))
        bounds = np.array([self.bounds.get(value, 0) for value in values], np.uint64)[places]
        return pa.array(row_hashes(batch, split.hashed, split.seed) < bounds)
