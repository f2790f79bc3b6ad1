# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Predicates choose rows: of a dict in `make_reader`, of a pandas frame in `make_batch_reader`."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class PredicateBase(ABC):
    """Base class of predicates."""

    @abstractmethod
    def get_fields(self) -> set[str]:
        """Returns the fields that the predicate tests."""

    @abstractmethod
    def do_include(self, values: Any) -> Any:
        """Returns whether a row is included; a mask of the rows if the values are a frame.

        Args:
            values: The values of the fields, by name.
        """


class in_lambda(PredicateBase):  # noqa: N801 - petastorm's name
    """Rows for which a function is true."""

    def __init__(
        self,
        predicate_fields: list[str],
        predicate_func: Callable[..., Any],
        state_arg: Any = None,
    ) -> None:
        """Creates a predicate.

        Args:
            predicate_fields: The fields that the function gets, in this order.
            predicate_func: The function.
            state_arg: A further argument, unless it is `None`.
        """
        if not isinstance(predicate_fields, list):
            raise ValueError("Predicate fields should be a list")
        self._fields, self._function = predicate_fields, predicate_func
        self._state = () if state_arg is None else (state_arg,)

    def get_fields(self) -> set[str]:
        """Returns the fields of the function."""
        return set(self._fields)

    def do_include(self, values: Any) -> Any:
        """Returns what the function returns."""
        return self._function(*(values[name] for name in self._fields), *self._state)


class in_set(in_lambda):  # noqa: N801 - petastorm's name
    """Rows whose value is in a set."""

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        """Creates a predicate of a field."""
        values = set(inclusion_values)
        super().__init__([predicate_field], lambda value: value in values)


class in_negate(PredicateBase):  # noqa: N801 - petastorm's name
    """Rows that another predicate excludes."""

    def __init__(self, predicate: PredicateBase) -> None:
        """Creates the opposite of a predicate."""
        self._predicate = _check_predicate(predicate)

    def get_fields(self) -> set[str]:
        """Returns the fields of the other predicate."""
        return self._predicate.get_fields()

    def do_include(self, values: Any) -> Any:
        """Returns the opposite of the other predicate."""
        included = self._predicate.do_include(values)
        return ~included if hasattr(included, "dtype") else not included


class in_reduce(PredicateBase):  # noqa: N801 - petastorm's name
    """Rows for which a function of several predicates is true."""

    def __init__(
        self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[Any]], Any]
    ) -> None:
        """Creates a predicate of predicates, with a function such as `all` or `any`."""
        self._predicates = [_check_predicate(predicate) for predicate in predicate_list]
        self._function = reduce_func

    def get_fields(self) -> set[str]:
        """Returns the fields of all predicates."""
        return set().union(*(predicate.get_fields() for predicate in self._predicates))

    def do_include(self, values: Any) -> Any:
        """Returns what the function makes of the results of all predicates."""
        return self._function([predicate.do_include(values) for predicate in self._predicates])


class in_pseudorandom_split(in_lambda):  # noqa: N801 - petastorm's name
    """Rows of one part of a split by the hash of a field: the same rows each time."""

    def __init__(
        self, fraction_list: Sequence[float], subset_index: int, predicate_field: str
    ) -> None:
        """Creates a predicate.

        Args:
            fraction_list: Size of each part; all of them are 1 together.
            subset_index: Number of the part.
            predicate_field: The field.
        """
        if subset_index >= len(fraction_list):
            raise ValueError("subset_index is out of range")
        low, high = (
            sum(fraction_list[:end]) * (sys.maxsize - 1) for end in (subset_index, subset_index + 1)
        )

        def is_in_part(value: Any) -> bool:
            digest = hashlib.md5(str(value).encode(), usedforsecurity=False).hexdigest()
            return low <= int(digest, 16) % sys.maxsize < high

        super().__init__([predicate_field], is_in_part)


def _check_predicate(predicate: Any) -> PredicateBase:
    if not isinstance(predicate, PredicateBase):
        raise ValueError("Predicate is not derived from PredicateBase")
    return predicate
