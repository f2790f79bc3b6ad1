# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Categories and replacements of missing values, which a preparation learns from the rows before
it writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from farandole._native.store import Store as NativeStore
from farandole.data.encoding import Encoding, plain, source_of, sources_of
from farandole.data.ragged import Ragged, check_value, element, is_nested
from farandole.data.tallies import Longest, Mean, Quantile, Values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from farandole.data.columns import Roles
    from farandole.data.inputs.sources import Source, Unit
    from farandole.data.places import Place
    from farandole.data.splits import Split

WORDS = ("mean", "median", "most_frequent")
"""Values of `fill` that are learned."""
_TALLIES: dict[str, Any] = {
    "mean": Mean,
    "median": Quantile,
    "most_frequent": Values,
    "categories": Values,
}
_TALLIES["longest"] = Longest
_ENCODING = "_encoding.json"
_TRAINING = ("train", "training", "false", "0", "no")
"""Words of a validation column that put a row among the training rows."""


@dataclass(frozen=True)
class Wish:
    """The request: values, or words for values that are to be learned."""

    categories: Mapping[str, Any] = field(default_factory=dict)
    """By column its categories, or how many there may be; `None`: all that there are."""
    fill: Mapping[str, Any] = field(default_factory=dict)
    labels: frozenset[str] = frozenset()
    learned: Mapping[str, str] = field(default_factory=dict)
    """Values that were learned from other rows, and as what."""
    split: Split | None = None
    """The rule that chooses the validation rows, if it needs more than each row alone."""
    ragged: Mapping[str, Any] = field(default_factory=dict)
    """The treatment of lists of different lengths, by column: `Pad`, `Nested`, or `Ragged` if
    all is known.
    """

    @classmethod
    def like(cls, encoding: Encoding) -> Self:
        """Returns the wish that encodes other rows in the same way.

        Args:
            encoding: Of rows that were encoded.
        """
        return cls(
            encoding.categories,
            encoding.fill,
            encoding.labels,
            encoding.learned,
            ragged=encoding.ragged,
        )

    @classmethod
    def of(
        cls,
        categories: Any,
        fill: Any,
        labels: Iterable[str],
        split: Split | None = None,
        ragged: Any = None,
    ) -> Self:
        """Returns the request in the arguments of a function.

        Args:
            categories: Names, or a mapping as `categories` above.
            fill: A value for all columns, or values by column.
            labels: Label columns.
            split: How validation rows are chosen, if not by rows alone.
            ragged: A `Pad` or `Nested` by column.

        Raises:
            ValueError: Categories that cannot be.
        """
        by_name = (
            dict(categories)
            if isinstance(categories, Mapping)
            else dict.fromkeys(_names(categories))
        )
        for name, value in by_name.items():
            _check(name, value)
        filled = {} if fill is None else dict(fill) if isinstance(fill, Mapping) else {"*": fill}
        lists = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in by_name.items()
        }
        return cls(lists, filled, frozenset(labels), split=split, ragged=dict(ragged or {}))

    @property
    def is_plain(self) -> bool:
        """Whether rows are written as they arrive, except that plain values replace missing
        ones.
        """
        return not self.categories and not self._words() and self.split is None and not self.ragged

    def told(self) -> list[Any]:
        """Returns plain values, for keys; nothing if `fill` says all of it."""
        if not self.categories and self.split is None and not self.ragged:
            return []
        split = None if self.split is None else [self.split.by, self.split.column]
        told = {"categories": dict(self.categories), "labels": sorted(self.labels), "split": split}
        return [
            told
            | (
                {"ragged": {name: asdict(one) for name, one in self.ragged.items()}}
                if self.ragged
                else {}
            )
        ]

    def known(self) -> Encoding | None:
        """Returns the encoding, where there is nothing to learn."""
        if (
            self.split
            or self._words()
            or any(not isinstance(values, list) for values in self.categories.values())
        ):
            return None
        if any(not isinstance(one, Ragged) for one in self.ragged.values()):
            return None
        return Encoding(self.categories, self.fill, self.labels, self.learned, ragged=self.ragged)

    def without(self, encoding: Encoding) -> Wish:
        """Returns the part of the wish that an encoding does not fulfil.

        Args:
            encoding: Of rows that were encoded already.

        Raises:
            ValueError: They have other categories.
        """
        categories = {
            name: one for name, one in self.categories.items() if name not in encoding.categories
        }
        for name, values in self.categories.items():
            before = encoding.categories.get(name)
            if isinstance(values, list) and before is not None and values != list(before):
                raise ValueError(
                    f"column {name!r} was prepared with other categories: {list(before)[:5]}"
                )
        words = self._words()
        for name, word in words.items():
            if encoding.learned.get(name, word) != word:
                raise ValueError(
                    f"column {name!r} was prepared with its {encoding.learned[name]}, not with "
                    f"its {word}"
                )
        fill = {name: word for name, word in words.items() if name not in encoding.learned}
        if set(encoding.learned.values()) == {fill.get("*")}:
            del fill["*"]
        ragged = {name: one for name, one in self.ragged.items() if name not in encoding.ragged}
        for name in sorted(self.ragged.keys() & encoding.ragged.keys()):
            nested = encoding.ragged[name].nested
            if is_nested(self.ragged[name]) != nested:
                kinds = ("Nested", "Pad") if nested else ("Pad", "Nested")
                raise ValueError(
                    f"column {name!r} was prepared with {kinds[0]}, not with {kinds[1]}"
                )
        # what is split already has no split
        return Wish(categories, fill, self.labels, ragged=ragged)

    def _words(self) -> dict[str, str]:
        return {
            name: value
            for name, value in self.fill.items()
            if isinstance(value, str) and value in WORDS
        }

    def plan(self, schema: pa.Schema, roles: Roles) -> dict[str, list[str]]:
        """Returns the values to learn from each column.

        Args:
            schema: Of the rows.
            roles: Of the columns.

        Raises:
            ValueError: What cannot be learned of a column; the message names it.
        """
        import pyarrow as pa  # noqa: PLC0415 - a process that only trains needs none

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
            plain(pa.nulls(0, schema.field(name).type), name)  # refuses other types
            if not isinstance(values, list):
                plan.setdefault(name, []).append("categories")
        for name, word in self._expanded(schema, roles).items():
            plan.setdefault(name, []).append(word)
        strange = sorted(set(self.ragged) - set(roles.features))
        if strange:
            raise ValueError(
                f"ragged columns must be features; these are not: {', '.join(strange)}"
            )
        for name, pad in self.ragged.items():
            kind = element(schema.field(name).type, name)
            check_value(pad, kind, name)
            # its type comes from the rows, whether its length is known or not
            if not isinstance(pad, Ragged):
                plan.setdefault(name, []).append(f"longest {kind}")
        return plan

    def _expanded(self, schema: pa.Schema, roles: Roles) -> dict[str, str]:
        """Returns the words by column, `"*"` being all features of numbers that have no value of
        their own.
        """
        words = self._words()
        everywhere = words.pop("*", None)
        for name, word in words.items():
            if name in schema.names:
                _check_word(name, word, schema.field(name).type)
        if everywhere is not None:
            own = {*self.fill, *self.categories}
            names = [name for name in roles.features if name in schema.names and name not in own]
            words |= {name: everywhere for name in names if _is_number(schema.field(name).type)}
        return words

    def of_rows(self, names: Sequence[str]) -> Self:
        """Returns the same, with the columns of rows whose content decides the split.

        Args:
            names: Of the columns.
        """
        return (
            self
            if self.split is None
            else replace(self, split=replace(self.split, hashed=tuple(names)))
        )

    def reads(self, plan: Mapping[str, Sequence[str]], roles: Roles) -> list[str]:
        """Returns the columns that a `Learner` looks at.

        Args:
            plan: As `plan` made it.
            roles: Of the columns.
        """
        side = [roles.validation] if isinstance(roles.validation, str) else []
        return list(
            dict.fromkeys([*plan, *side, *(self.split.reads if self.split is not None else [])])
        )

    def fulfilled(self, plan: Mapping[str, Sequence[str]], learner: Learner) -> Encoding:
        """Returns the encoding, once rows were looked at.

        Args:
            plan: As `plan` made it.
            learner: That has counted all rows.

        Raises:
            ValueError: A column without a value, or labels without two classes.
        """
        categories = dict(self.categories)
        fill = {name: value for name, value in self.fill.items() if name not in self._words()}
        learned: dict[str, str] = {}
        ragged = dict(self.ragged)
        for name, wanted in plan.items():
            for word in wanted:
                tally = learner.tallies[name, word]
                if word.startswith("longest "):
                    ragged[name] = self.ragged[name].known(
                        word.removeprefix("longest "), tally.value
                    )
                    continue
                if word == "categories":
                    categories[name] = tally.categories(self.categories[name])
                    if not categories[name] and name in self.labels:
                        raise ValueError(f"label column {name!r} has no value in any row")
                    continue
                value = tally.at(0.5) if word == "median" else tally.value
                if value is None:
                    raise ValueError(
                        f"column {name!r} has no value in any row: there is no {word} to fill in"
                    )
                fill[name], learned[name] = value, word
        sides = None if learner.sides is None else learner.sides.sides()
        return Encoding(categories, fill, self.labels, learned, sides, ragged)


class Learner:
    """Gathers the counts that a plan needs, batch by batch; learners of several tasks are
    merged.
    """

    def __init__(
        self,
        plan: Mapping[str, Sequence[str]],
        validation: float | str | None = None,
        split: Split | None = None,
    ) -> None:
        """Starts without rows.

        Args:
            plan: Of `Wish.plan`.
            validation: A column that tells validation rows, which are left out; a share tells
                nothing here.
            split: How validation rows are chosen, if not by rows alone.
        """
        self.sides: Any = None if split is None else split.tally()
        self._validation = validation if isinstance(validation, str) else None
        self.tallies: dict[tuple[str, str], Any] = {
            (name, word): _TALLIES[word.partition(" ")[0]]()
            for name, words in plan.items()
            for word in words
        }

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts the rows of a batch.

        Args:
            batch: With the plan's columns, and the one of validation.

        Raises:
            ValueError: A column that has too many categories.
        """
        if self._validation is not None:
            batch = batch.filter(_is_training(batch.column(self._validation)))
        if self.sides is not None:
            self.sides.add(batch)
        for (name, word), tally in self.tallies.items():
            column = batch.column(name)
            try:
                tally.add(plain(column, name) if word == "categories" else _decoded(column))
            except ValueError as error:
                raise ValueError(
                    f"column {name!r} {error}" if name not in str(error) else str(error)
                ) from None

    def merge(self, other: Learner) -> None:
        """Adds the counts of another learner of the same plan."""
        if self.sides is not None:
            self.sides.merge(other.sides)
        for key, tally in self.tallies.items():
            try:
                tally.merge(other.tallies[key])
            except ValueError as error:
                raise ValueError(f"column {key[0]!r} {error}") from None


def learn(source: Source, roles: Roles, wish: Wish, threads: int = 2) -> Encoding:
    """Reads the rows of a source if values must be learned from them.

    Args:
        source: The rows.
        roles: The columns.
        wish: The request.
        threads: Files read at the same time.

    Raises:
        ValueError: What cannot be learned; the message names the column.
    """
    wish = wish.of_rows(sources_of(roles.kept, source.schema.names))
    plan = wish.plan(source.schema, roles)
    known = wish.known()
    if known is not None:
        return known
    if not source.again:
        raise ValueError(
            "a stream can be read only once, so nothing can be learned from it before it is "
            "written: give the values for "
            f"{', '.join(plan) or 'validation'}, or write the stream to files first"
        )
    names = wish.reads(plan, roles)

    def count(unit: Unit) -> Learner:
        learner = Learner(plan, roles.validation, wish.split)
        for batch in unit.batches():
            learner.add(batch)
        return learner

    whole = Learner(plan, split=wish.split)
    with ThreadPoolExecutor(threads, "farandole-learn") as pool:
        for learner in pool.map(count, source.units(names)):
            whole.merge(learner)
    return wish.fulfilled(plan, whole)


def note_encoding(place: Place, encoding: Encoding | None, *, validates: bool) -> None:
    """Stores the encoding of categories and missing values with prepared data.

    Args:
        place: Of the data.
        encoding: If rows are encoded.
        validates: Whether there is validation data.
    """
    if encoding is not None:
        for url in [place.train_url, *([place.val_url] if validates else [])]:
            NativeStore(url).write(_ENCODING, encoding.to_json().encode())


def encoding_at(url: str) -> Encoding | None:
    """Returns the encoding that `note_encoding` stored.

    Args:
        url: Of training or validation data.
    """
    try:
        return Encoding.of_json(NativeStore(url).read(_ENCODING))
    except FileNotFoundError:
        return None


def _names(categories: Any) -> list[str]:
    if categories is None:
        return []
    if isinstance(categories, str):
        raise ValueError(f"categories must be a list of names or a dict by name: {categories!r}")
    return list(categories)


def _check(name: str, value: Any) -> None:
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


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - as above

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _check_word(name: str, word: str, kind: pa.DataType) -> None:
    import pyarrow as pa  # noqa: PLC0415 - as above

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = (
        pa.types.is_string(inner) or pa.types.is_large_string(inner) or inner == pa.string_view()
    )
    if not _is_number(inner) and not (
        word == "most_frequent" and (is_text or pa.types.is_boolean(inner))
    ):
        hint = "; most_frequent is for strings, too" if is_text else ""
        raise ValueError(f"column {name!r} is {kind}, which has no {word} to fill in{hint}")


def _decoded(column: Any) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - as above

    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_training(column: Any) -> Any:
    """Returns which rows a validation column assigns to training."""
    import pyarrow as pa  # noqa: PLC0415 - as above
    import pyarrow.compute as pc  # noqa: PLC0415

    compute: Any = pc
    column = _decoded(column)
    if pa.types.is_boolean(column.type):
        found = compute.invert(column)
    elif _is_number(column.type):
        found = compute.equal(column.cast(pa.float64()), 0.0)
    else:
        words = compute.utf8_lower(compute.utf8_trim_whitespace(column.cast(pa.large_string())))
        found = compute.is_in(words, value_set=pa.array(_TRAINING, pa.large_string()))
    return compute.fill_null(found, False)


def needed(wish: Wish, names: Iterable[str], present: Iterable[str]) -> bool:
    """Returns whether rows must be encoded before they are written.

    Args:
        wish: The request.
        names: Of the columns that are wanted.
        present: Columns that the rows have.
    """
    known = set(present)
    return not wish.is_plain or any(source_of(name, known) != name for name in names)
