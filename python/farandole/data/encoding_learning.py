# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Categories and replacements of missing values, which a preparation learns from the rows before
it writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from farandole._native.store import Store as NativeStore
from farandole.data.column_accumulators import ExactMean, MaxListLength, QuantileSketch, ValueCounts
from farandole.data.encoding import (
    ColumnEncoding,
    column_of_feature,
    columns_of_features,
    normalize_categories,
)
from farandole.data.lazy_pyarrow import decode_dictionary, is_number_type, is_text_type, pa, pc
from farandole.data.loader_arguments import fill_argument_by_column
from farandole.data.ragged import (
    RaggedColumn,
    becomes_nested_tensor,
    check_pad_value,
    list_element_dtype,
)
from farandole.stores import small_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from farandole.data.columns import ColumnRoles
    from farandole.data.prepared_directories import PreparedDirectory
    from farandole.data.validation_splits import ValidationSplit

LEARNED_FILL_WORDS = ("mean", "median", "most_frequent")
"""Values of `fill` that are learned."""
_ACCUMULATOR_TYPES: dict[str, Any] = {
    "mean": ExactMean,
    "median": QuantileSketch,
    "most_frequent": ValueCounts,
    "categories": ValueCounts,
}
_ACCUMULATOR_TYPES["longest"] = MaxListLength
_ENCODING_FILE = "_encoding.json"
_TRAINING_WORDS = ("train", "training", "false", "0", "no")
"""Words of a validation column that put a row among the training rows."""


@dataclass(frozen=True)
class EncodingSpec:
    """The request: values, or words for values that are to be learned."""

    categories: Mapping[str, Any] = field(default_factory=dict)
    """By column its categories, or how many there may be; `None`: all that there are."""
    fill: Mapping[str, Any] = field(default_factory=dict)
    labels: frozenset[str] = frozenset()
    learned: Mapping[str, str] = field(default_factory=dict)
    """Values that were learned from other rows, and as what."""
    split: ValidationSplit | None = None
    """The rule that chooses the validation rows, if it needs more than each row alone."""
    ragged: Mapping[str, Any] = field(default_factory=dict)
    """The treatment of lists of different lengths, by column: `Pad`, `Nested`, or `Ragged` if
    all is known.
    """

    @classmethod
    def from_encoding(cls, encoding: ColumnEncoding) -> Self:
        """Returns the encoding spec that encodes other rows in the same way.

        Args:
            encoding: Encoding of rows that were encoded.
        """
        return cls(
            encoding.categories,
            encoding.fill,
            encoding.labels,
            encoding.learned,
            ragged=encoding.ragged,
        )

    @classmethod
    def from_arguments(
        cls,
        categories: Any,
        fill: Any,
        labels: Iterable[str],
        split: ValidationSplit | None = None,
        ragged: Any = None,
    ) -> Self:
        """Returns the request in the arguments of a function.

        Args:
            categories: Names, or a mapping as `categories` above.
            fill: A value for all columns, or values by column.
            labels: Label columns.
            split: Rule that chooses validation rows, if not each row alone decides.
            ragged: A `Pad` or `Nested` by column.

        Raises:
            ValueError: Categories that cannot be.
        """
        by_name = (
            dict(categories)
            if isinstance(categories, Mapping)
            else dict.fromkeys(_category_names(categories))
        )
        for name, value in by_name.items():
            _check_categories(name, value)
        filled = fill_argument_by_column(fill)
        lists = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in by_name.items()
        }
        return cls(lists, filled, frozenset(labels), split=split, ragged=dict(ragged or {}))

    @property
    def writes_rows_unencoded(self) -> bool:
        """Whether rows are written as they arrive, except that plain values replace missing
        ones.
        """
        return (
            not self.categories
            and not self._learned_fill_words()
            and self.split is None
            and not self.ragged
        )

    def prepared_data_key_values(self) -> list[Any]:
        """Returns plain values for keys; an empty list if `fill` determines the encoding."""
        if not self.categories and self.split is None and not self.ragged:
            return []
        split = None if self.split is None else [self.split.by, self.split.column]
        values_by_name = {
            "categories": dict(self.categories),
            "labels": sorted(self.labels),
            "split": split,
        }
        return [
            values_by_name
            | (
                {"ragged": {name: asdict(one) for name, one in self.ragged.items()}}
                if self.ragged
                else {}
            )
        ]

    def encoding_without_learning(self) -> ColumnEncoding | None:
        """Returns the encoding, where there is nothing to learn."""
        if (
            self.split
            or self._learned_fill_words()
            or any(not isinstance(values, list) for values in self.categories.values())
        ):
            return None
        if any(not isinstance(one, RaggedColumn) for one in self.ragged.values()):
            return None
        return ColumnEncoding(
            self.categories, self.fill, self.labels, self.learned, ragged=self.ragged
        )

    def unmet_encoding_spec(self, encoding: ColumnEncoding) -> EncodingSpec:
        """Returns the part of the encoding spec that an encoding does not fulfil.

        Args:
            encoding: Encoding of rows that were encoded already.

        Raises:
            ValueError: They have other categories.
        """
        categories = {
            name: values
            for name, values in self.categories.items()
            if name not in encoding.categories
        }
        for name, values in self.categories.items():
            before = encoding.categories.get(name)
            if isinstance(values, list) and before is not None and values != list(before):
                raise ValueError(
                    f"column {name!r} was prepared with other categories: {list(before)[:5]}"
                )
        fill_words = self._learned_fill_words()
        for name, word in fill_words.items():
            if encoding.learned.get(name, word) != word:
                raise ValueError(
                    f"column {name!r} was prepared with its {encoding.learned[name]}, not with "
                    f"its {word}"
                )
        fill = {name: word for name, word in fill_words.items() if name not in encoding.learned}
        if set(encoding.learned.values()) == {fill.get("*")}:
            del fill["*"]
        ragged = {
            name: layout for name, layout in self.ragged.items() if name not in encoding.ragged
        }
        for name in sorted(self.ragged.keys() & encoding.ragged.keys()):
            nested = encoding.ragged[name].nested
            if becomes_nested_tensor(self.ragged[name]) != nested:
                kinds = ("Nested", "Pad") if nested else ("Pad", "Nested")
                raise ValueError(
                    f"column {name!r} was prepared with {kinds[0]}, not with {kinds[1]}"
                )
        # prepared data is split already, so the spec has no split
        return EncodingSpec(categories, fill, self.labels, ragged=ragged)

    def _learned_fill_words(self) -> dict[str, str]:
        return {
            name: value
            for name, value in self.fill.items()
            if isinstance(value, str) and value in LEARNED_FILL_WORDS
        }

    def plan_learning(self, schema: pa.Schema, roles: ColumnRoles) -> dict[str, list[str]]:
        """Returns the values to learn from each column.

        Args:
            schema: Schema of the rows.
            roles: Roles of the columns.

        Raises:
            ValueError: A value that cannot be learned from a column; the message names the column.
        """
        if self.split is not None and self.split.column not in schema.names:
            raise ValueError(
                f"validation_{self.split.by} names a column that the rows do not have: "
                f"{self.split.column!r}"
            )
        strange = sorted(set(self.categories) - {*roles.features, *roles.labels})
        if strange:
            raise ValueError(
                f"categories must be features or labels; these are neither: {', '.join(strange)}"
            )
        plan: dict[str, list[str]] = {}
        for name, values in self.categories.items():
            normalize_categories(pa.nulls(0, schema.field(name).type), name)  # refuses other types
            if not isinstance(values, list):
                plan.setdefault(name, []).append("categories")
        for name, word in self._fill_words_by_column(schema, roles).items():
            plan.setdefault(name, []).append(word)
        strange = sorted(set(self.ragged) - set(roles.features))
        if strange:
            raise ValueError(
                f"ragged columns must be features; these are not: {', '.join(strange)}"
            )
        for name, pad in self.ragged.items():
            kind = list_element_dtype(schema.field(name).type, name)
            check_pad_value(pad, kind, name)
            # its type comes from the rows, whether its length is known or not
            if not isinstance(pad, RaggedColumn):
                plan.setdefault(name, []).append(f"longest {kind}")
        return plan

    def _fill_words_by_column(self, schema: pa.Schema, roles: ColumnRoles) -> dict[str, str]:
        """Returns the words by column, `"*"` being all features of numbers that have no value of
        their own.
        """
        fill_words = self._learned_fill_words()
        everywhere = fill_words.pop("*", None)
        for name, word in fill_words.items():
            if name in schema.names:
                _check_fill_word(name, word, schema.field(name).type)
        if everywhere is not None:
            own = {*self.fill, *self.categories}
            names = [name for name in roles.features if name in schema.names and name not in own]
            fill_words |= {
                name: everywhere for name in names if is_number_type(schema.field(name).type)
            }
        return fill_words

    def with_split_hash_columns(self, names: Sequence[str]) -> Self:
        """Returns the same, with the columns of rows whose content decides the split.

        Args:
            names: Names of the columns.
        """
        return (
            self
            if self.split is None
            else replace(self, split=replace(self.split, hashed=tuple(names)))
        )

    def columns_to_read(self, plan: Mapping[str, Sequence[str]], roles: ColumnRoles) -> list[str]:
        """Returns the columns that an `EncodingLearner` reads.

        Args:
            plan: The result of `plan_learning`.
            roles: Roles of the columns.
        """
        side = [roles.validation] if isinstance(roles.validation, str) else []
        return list(
            dict.fromkeys(
                [*plan, *side, *(self.split.columns_to_read if self.split is not None else [])]
            )
        )

    def build_encoding(
        self, plan: Mapping[str, Sequence[str]], learner: EncodingLearner
    ) -> ColumnEncoding:
        """Returns the encoding, once rows were looked at.

        Args:
            plan: As `plan` made it.
            learner: A learner that has counted all rows.

        Raises:
            ValueError: A column without a value, or labels without two classes.
        """
        categories = dict(self.categories)
        fill = {
            name: value
            for name, value in self.fill.items()
            if name not in self._learned_fill_words()
        }
        learned: dict[str, str] = {}
        ragged = dict(self.ragged)
        for name, wanted in plan.items():
            for word in wanted:
                tally = learner.accumulators[name, word]
                if word.startswith("longest "):
                    ragged[name] = self.ragged[name].to_ragged_column(
                        word.removeprefix("longest "), tally.value
                    )
                    continue
                if word == "categories":
                    categories[name] = tally.most_frequent_categories(self.categories[name])
                    if not categories[name] and name in self.labels:
                        raise ValueError(f"label column {name!r} has no value in any row")
                    continue
                value = tally.value_at(0.5) if word == "median" else tally.value
                if value is None:
                    raise ValueError(
                        f"column {name!r} has no value in any row: there is no {word} to fill in"
                    )
                fill[name], learned[name] = value, word
        sides = (
            None
            if learner.split_statistics is None
            else learner.split_statistics.make_held_out_rule()
        )
        return ColumnEncoding(categories, fill, self.labels, learned, sides, ragged)


class EncodingLearner:
    """Gathers the counts that a plan needs, batch by batch; learners of several tasks are
    merged.
    """

    def __init__(
        self,
        plan: Mapping[str, Sequence[str]],
        validation: float | str | None = None,
        split: ValidationSplit | None = None,
    ) -> None:
        """Starts without rows.

        Args:
            plan: The result of `EncodingSpec.plan_learning`.
            validation: A column that marks validation rows, which are left out; a share has no
                effect here.
            split: The rule that chooses validation rows, unless a hash of each row alone does.
        """
        self.split_statistics: Any = None if split is None else split.make_split_collector()
        self._validation = validation if isinstance(validation, str) else None
        self.accumulators: dict[tuple[str, str], Any] = {
            (name, word): _ACCUMULATOR_TYPES[word.partition(" ")[0]]()
            for name, kinds in plan.items()
            for word in kinds
        }

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch.

        Args:
            batch: With the plan's columns, and the one of validation.

        Raises:
            ValueError: A column that has too many categories.
        """
        if self._validation is not None:
            batch = batch.filter(_training_rows_mask(batch.column(self._validation)))
        if self.split_statistics is not None:
            self.split_statistics.add(batch)
        for (name, word), tally in self.accumulators.items():
            column = batch.column(name)
            try:
                tally.add(
                    normalize_categories(column, name)
                    if word == "categories"
                    else decode_dictionary(column)
                )
            except ValueError as error:
                raise ValueError(
                    f"column {name!r} {error}" if name not in str(error) else str(error)
                ) from None

    def merge(self, other: EncodingLearner) -> None:
        """Adds the counts of another learner of the same plan."""
        if self.split_statistics is not None:
            self.split_statistics.merge(other.split_statistics)
        for key, tally in self.accumulators.items():
            try:
                tally.merge(other.accumulators[key])
            except ValueError as error:
                raise ValueError(f"column {key[0]!r} {error}") from None


def learn_encoding(
    schema: pa.Schema,
    roles: ColumnRoles,
    spec: EncodingSpec,
    count: Callable[[list[str], Callable[[], EncodingLearner]], EncodingLearner],
    *,
    is_rereadable: bool = True,
) -> ColumnEncoding:
    """Returns the encoding of rows, which are counted if values must be learned from them.

    Args:
        schema: Schema of the rows.
        roles: The columns.
        spec: The request.
        count: Counts some columns of all rows, given a function that starts a learner.
        is_rereadable: Whether the rows can be read once more, to write them.

    Raises:
        ValueError: A value cannot be learned; the message names the column.
    """
    spec = spec.with_split_hash_columns(columns_of_features(roles.stored_columns, schema.names))
    plan = spec.plan_learning(schema, roles)
    known = spec.encoding_without_learning()
    if known is not None:
        return known
    if not is_rereadable:
        raise ValueError(
            "a stream can be read only once, so nothing can be learned from it before it is "
            "written: give the values for "
            f"{', '.join(plan) or 'validation'}, or write the stream to files first"
        )
    start = partial(EncodingLearner, plan, roles.validation, spec.split)
    return spec.build_encoding(plan, count(spec.columns_to_read(plan, roles), start))


def write_encoding(
    directory: PreparedDirectory, encoding: ColumnEncoding | None, *, validates: bool
) -> None:
    """Stores the encoding of categories and missing values with prepared data.

    Args:
        directory: Directory of the data.
        encoding: If rows are encoded.
        validates: Whether there is validation data.

    Raises:
        RuntimeError: The lease of the directory is gone, so another process may own it.
    """
    if encoding is not None:
        directory.check_lease()
        for url in [directory.train_url, *([directory.val_url] if validates else [])]:
            NativeStore(url).write(_ENCODING_FILE, encoding.to_json().encode())


def read_encoding(url: str) -> ColumnEncoding | None:
    """Returns the encoding that `write_encoding` stored.

    Args:
        url: Directory of training or validation data.
    """
    text = small_files.read_small_file(
        NativeStore(url), _ENCODING_FILE, small_files.MAX_TABLE_FILE_BYTES
    )
    return None if text is None else ColumnEncoding.from_json(text, f"{url}/{_ENCODING_FILE}")


def _category_names(categories: Any) -> list[str]:
    if categories is None:
        return []
    if isinstance(categories, str):
        raise ValueError(f"categories must be a list of names or a dict by name: {categories!r}")
    return list(categories)


def _check_categories(name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        if not value or len(set(value)) != len(value):
            raise ValueError(
                f"categories of column {name!r} must be at least one value, without duplicates: "
                f"{list(value)[:5]}"
            )
    elif value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(
            f"categories of column {name!r} must be a list of values, a number of values, or "
            f"None: {value!r}"
        )


def _check_fill_word(name: str, word: str, kind: pa.DataType) -> None:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = is_text_type(inner)
    if not is_number_type(inner) and not (
        word == "most_frequent" and (is_text or pa.types.is_boolean(inner))
    ):
        hint = "; most_frequent is for strings, too" if is_text else ""
        raise ValueError(f"column {name!r} is {kind}, which has no {word} to fill in{hint}")


def _training_rows_mask(column: Any) -> Any:
    """Returns which rows a validation column assigns to training."""
    column = decode_dictionary(column)
    if pa.types.is_boolean(column.type):
        found = pc.invert(column)
    elif is_number_type(column.type):
        found = pc.equal(column.cast(pa.float64()), 0.0)
    else:
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(column.cast(pa.large_string())))
        found = pc.is_in(texts, value_set=pa.array(_TRAINING_WORDS, pa.large_string()))
    return pc.fill_null(found, False)


def needs_encoding(spec: EncodingSpec, names: Iterable[str], present: Iterable[str]) -> bool:
    """Returns whether rows must be encoded before they are written.

    Args:
        spec: The request.
        names: Names of the columns that are wanted.
        present: Columns that the rows have.
    """
    known = set(present)
    return not spec.writes_rows_unencoded or any(
        column_of_feature(name, known) != name for name in names
    )
