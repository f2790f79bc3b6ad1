# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The encoding of categories and missing values, which is the same in preparation, in a loader and
in `transform`.

A column of categories becomes int32 indices: 0 for a missing value, 1 for an unknown value, and 2
and higher for the categories in their order. A label of categories becomes the index of its class,
from 0 on. If the rows have no column `age__missing`, a feature of that name is true in rows in
which `age` is missing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from farandole.data.lazy_pyarrow import decode_dictionary, is_text_type, pa, pc
from farandole.data.loader_arguments import fill_argument_by_column
from farandole.data.ragged import RaggedColumn
from farandole.stores import small_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from farandole.data.validation_splits import HeldOutRule

VALIDATION_FLAG_COLUMN = "__validation"
"""Column that gives the native writer the side of each row."""
MISSING_INDEX = 0
"""Index of a missing value in a column of categories."""
UNKNOWN_INDEX = 1
"""Index of a value that is not among the categories."""
FIRST_CATEGORY_INDEX = 2
"""Index of the first category."""
MISSING_FLAG_SUFFIX = "__missing"


def column_of_feature(name: str, present: Iterable[str]) -> str:
    """Returns the column that a feature is computed from: `age` for `age__missing`; every other
    feature is its own source.

    Args:
        name: Name of a feature.
        present: Columns of the rows.
    """
    base = name.removesuffix(MISSING_FLAG_SUFFIX)
    return base if base != name and name not in present and base in present else name


def columns_of_features(names: Iterable[str], present: Iterable[str]) -> list[str]:
    """Returns the columns to read for the given features, without duplicates.

    Args:
        names: Names of features; a `<column>__missing` feature is computed from its column.
        present: Columns of the rows.
    """
    known = set(present)
    return list(dict.fromkeys(column_of_feature(name, known) for name in names))


@dataclass(frozen=True)
class ColumnEncoding:
    """Categories and replacements of missing values, all of them known."""

    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    """Values by column; `"*"` stands for all others."""
    labels: frozenset[str] = frozenset()
    """Labels, whose categories are classes."""
    learned: Mapping[str, str] = field(default_factory=dict)
    """The learned values and the kind of each: `{"age": "mean"}`."""
    sides: HeldOutRule | None = field(default=None, compare=False)
    """The validation rows, if not chosen by a share or a column alone. It is not kept with the
    data.
    """
    ragged: Mapping[str, RaggedColumn] = field(default_factory=dict)
    """The storage and padding of lists of different lengths."""

    @classmethod
    def from_model(
        cls,
        categories: Mapping[str, Sequence[Any]] | None,
        fill: Any,
        learned: Mapping[str, str] | None = None,
        ragged: Mapping[str, Any] | None = None,
    ) -> Self:
        """Returns the encoding in a fitted model.

        Args:
            categories: By column.
            fill: A value for all columns, or values by column.
            learned: Word of each learned value, by column.
            ragged: Padding of lists of different lengths, by column.
        """
        lists = {
            name: RaggedColumn.from_fields_or_instance(column)
            for name, column in (ragged or {}).items()
        }
        return cls(
            categories or {}, fill_argument_by_column(fill), learned=learned or {}, ragged=lists
        )

    def to_json(self) -> str:
        """Returns the encoding as text for a file."""
        categories = {name: list(values) for name, values in self.categories.items()}
        values_by_name = {
            "categories": categories,
            "fill": dict(self.fill),
            "labels": sorted(self.labels),
        }
        ragged = {name: asdict(one) for name, one in self.ragged.items()}
        return json.dumps({**values_by_name, "learned": dict(self.learned), "ragged": ragged})

    @classmethod
    def from_json(cls, text: str | bytes, source_name: str = "an encoding") -> Self:
        """Inverts `to_json`.

        Args:
            text: Text of the file.
            source_name: Name of the text, for messages.

        Raises:
            DamagedFileError: The text is not what `to_json` returned.
        """
        values_by_name = small_files.parse_json(text, source_name)
        with small_files.raise_as_damaged_file(source_name):
            ragged = {
                name: RaggedColumn.from_fields_or_instance(layout)
                for name, layout in values_by_name.get("ragged", {}).items()
            }
            return cls(
                values_by_name["categories"],
                values_by_name["fill"],
                frozenset(values_by_name["labels"]),
                values_by_name["learned"],
                ragged=ragged,
            )

    @property
    def fill_of_uncategorized_columns(self) -> dict[str, Any]:
        """Replacements in columns that are no categories."""
        return {name: value for name, value in self.fill.items() if name not in self.categories}

    def encode_batch(self, batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
        """Returns a batch with columns as they are written; numbers are not filled yet.

        Args:
            batch: A batch with the columns that `columns_of_features` returns.
            names: Names of the columns to encode.

        Raises:
            ValueError: A column that cannot hold its categories, or a label that is none of its
                classes.
        """
        present = batch.schema.names
        columns = [self.encode_column(name, present, batch.column) for name in names]
        if self.sides is None:
            return pa.RecordBatch.from_arrays(columns, names=list(names))
        return pa.RecordBatch.from_arrays(
            [*columns, self.sides.validation_mask(batch)], names=[*names, VALIDATION_FLAG_COLUMN]
        )

    @property
    def native_split_arguments(self) -> dict[str, Any]:
        """Arguments for the native writer about the split, if the spec does not contain all of
        it.
        """
        return {} if self.sides is None else {"validation": {"column": VALIDATION_FLAG_COLUMN}}

    def encode_column(
        self, name: str, present: Iterable[str], get: Callable[[str], pa.Array]
    ) -> pa.Array:
        """Returns one column as it is written; numbers are not filled yet.

        Args:
            name: Name of the column.
            present: Columns that there are.
            get: Gives one of them.

        Raises:
            ValueError: As `encode`.
        """
        source = column_of_feature(name, present)
        column = get(source)
        if source != name:
            return pc.is_null(column, nan_is_null=True)
        if name in self.categories:
            return self._category_indices(name, column)
        if name in self.ragged:
            return self.ragged[name].encode_arrow_column(column, name)
        if (
            name in self.learned
            and pa.types.is_integer(column.type)
            and isinstance(self.fill[name], float)
        ):
            return _integers_as_floats(column, name)
        return column

    def _category_indices(self, name: str, column: Any) -> Any:
        column = normalize_categories(column, name)
        values = self.categories[name]
        try:
            known = pa.array(values, column.type)
            if name in self.fill:
                column = pc.fill_null(column, pa.scalar(self.fill[name], column.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ValueError(
                f"column {name!r} is {column.type}, which its categories or its fill do not "
                f"match: {error}"
            ) from None
        found = pc.index_in(column, value_set=known)
        if name in self.labels:
            if found.null_count:
                strange = column.filter(pc.is_null(found))
                fault = (
                    "nulls"
                    if strange.null_count
                    else f"values that are no class, such as {strange[0].as_py()!r},"
                )
                raise ValueError(
                    f"label column {name!r} has {fault} in {found.null_count} of {len(found)} rows"
                )
            return found.cast(pa.int32())
        indices = pc.add(found.cast(pa.int32()), pa.scalar(FIRST_CATEGORY_INDEX, pa.int32()))
        indices = pc.fill_null(indices, UNKNOWN_INDEX)
        return pc.if_else(pc.is_null(column), pa.scalar(MISSING_INDEX, pa.int32()), indices)


def normalize_categories(column: Any, name: str) -> Any:
    """Returns a column of categories as one of large texts, int64 or booleans.

    Args:
        column: The column as it was read.
        name: Name of the column.

    Raises:
        ValueError: It is of another type.
    """
    column = decode_dictionary(column)
    kind = column.type
    if pa.types.is_boolean(kind):
        return column
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if is_text_type(kind) or pa.types.is_null(kind):
        return column.cast(pa.large_string())
    raise ValueError(f"column {name!r} is {kind}: categories are strings, integers or booleans")


def _integers_as_floats(column: Any, name: str) -> Any:
    try:
        return column.cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"column {name!r} becomes float64, because a mean or a median fills it, and has an "
            f"integer of more than 53 bits: {error}"
        ) from error
