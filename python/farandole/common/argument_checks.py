# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of arguments.

A check is a function of an argument's name and value. It returns the value in its canonical form,
or raises an error that names the argument. `make_minimum_check`, `make_choice_check`,
`make_optional_check`, `make_deprecated_check` and `make_conversion_check` return a check.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

Check = Callable[[str, Any], Any]


def accept_any_value(name: str, value: Any) -> Any:
    """Any value: whether it is good depends on other arguments."""
    del name
    return value


def make_minimum_check(minimum: int) -> Callable[[str, Any], int]:
    """Returns a whole number, `minimum` or more."""

    def check_integer(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number: {value!r}")
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}: {value}")
        return int(value)

    return check_integer


def check_whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """Returns a whole number, `minimum` or more; anything else is a `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} must be a whole number, {minimum} or more: {value!r}")
    return int(value)


def check_byte_count(name: str, value: Any) -> int:
    """Returns a whole number of bytes, which fits 63 bits."""
    number = make_minimum_check(0)(name, value)
    if number >= 1 << 63:
        raise ValueError(f"{name} must be less than 2**63 bytes: {value}")
    return number


def check_positive_number(name: str, value: Any) -> float:
    """Returns a number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number: {value!r}")
    if not float(value) > 0:
        raise ValueError(f"{name} must be above 0: {value}")
    return float(value)


def check_open_share(name: str, value: Any) -> float:
    """Returns a number above 0 and below 1."""
    if not check_positive_number(name, value) < 1:
        raise ValueError(f"{name} must be above 0 and below 1: {value}")
    return float(value)


def check_number_list(name: str, value: Any) -> list[float]:
    """Returns a list of numbers."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, Real) for item in value):
        raise TypeError(f"{name} must be a list of numbers: {value!r}")
    return [float(item) for item in value]


def check_boolean_flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False: {value!r}")
    return value


def check_nonempty_text(name: str, value: Any) -> str:
    """Returns a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string: {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def make_choice_check(*options: str) -> Callable[[str, Any], str]:
    """Returns one of a few words."""

    def check_choice(name: str, value: Any) -> str:
        if value not in options:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}: {value!r}")
        return value

    return check_choice


def check_column_names(name: str, value: Any) -> list[str]:
    """Returns a list of column names; one name alone stands for a list of one."""
    columns = [value] if isinstance(value, str) else value
    if not isinstance(columns, list | tuple) or not all(
        isinstance(column, str) for column in columns
    ):
        raise TypeError(f"{name} must be a list of column names: {value!r}")
    if not columns:
        raise ValueError(f"{name} must name at least one column")
    twice = sorted({column for column in columns if list(columns).count(column) > 1})
    if twice:
        raise ValueError(f"{name} names a column twice: {', '.join(twice)}")
    return list(columns)


def check_optional_column_names(name: str, value: Any) -> list[str]:
    """Returns a list of column names, which may be empty."""
    return [] if isinstance(value, list | tuple) and not value else check_column_names(name, value)


def check_name_list(name: str, value: Any) -> list[str]:
    """Returns a list of names, which may be empty; one name alone stands for a list of one."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(item, str) for item in names):
        raise TypeError(f"{name} must be a list of names: {value!r}")
    return list(names)


def check_value_list(name: str, value: Any) -> list[Any]:
    """Returns a list of anything; one object alone stands for a list of one."""
    if isinstance(value, str | dict):
        raise TypeError(f"{name} must be a list: {value!r}")
    return list(value) if isinstance(value, list | tuple) else [value]


def check_callable_value(name: str, value: Any) -> Any:
    """Checks that a value can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function: {value!r}")
    return value


def check_callable_list(name: str, value: Any) -> list[Any]:
    """Returns a list of functions of (output, label), or of one list of them per label."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    for item in items:
        if not callable(item) and not (
            isinstance(item, list | tuple) and all(callable(one) for one in item)
        ):
            raise TypeError(f"{name} must be functions of (output, label): {item!r}")
    return items


def check_shape_list(name: str, value: Any) -> list[list[int]]:
    """Returns a list of shapes, one per column."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(shape, list | tuple) for shape in value
    ):
        raise TypeError(f"{name} must be a list of shapes, one per column: {value!r}")
    for shape in value:
        if not all(isinstance(size, Integral) and (int(size) > 0 or size == -1) for size in shape):
            raise ValueError(f"{name} must hold positive sizes or -1: {list(shape)}")
        if list(shape).count(-1) > 1:
            raise ValueError(f"{name} may contain -1 only once in a shape: {list(shape)}")
    return [[int(size) for size in shape] for shape in value]


def make_optional_check(check: Check) -> Check:
    """`None`, or what another check accepts."""
    return lambda name, value: None if value is None else check(name, value)


def make_conversion_check(convert: Callable[[Any], Any]) -> Check:
    """Returns a check that converts the value; a `ValueError` of the conversion gets the
    argument's name.
    """

    def check_conversion(name: str, value: Any) -> Any:
        try:
            return convert(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return check_conversion


def make_deprecated_check(reason: str) -> Check:
    """Any value, with a warning that it does nothing."""

    def warn_deprecated(name: str, value: Any) -> Any:
        warnings.warn(
            f"{name} is deprecated and ignored: {reason}", DeprecationWarning, stacklevel=2
        )
        return value

    return warn_deprecated
