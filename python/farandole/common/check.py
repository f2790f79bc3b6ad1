# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of single arguments. Each returns the value in its canonical form, or raises an error.

Most functions here take the name of the argument, for the error's message, and return the check.
"""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def anything(value: Any) -> Any:
    """Any value is as good as another; a check needs more than the value alone."""
    return value


def named(name: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What `convert` makes of a value; what is wrong with one is told with the parameter's name."""

    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return checked


def at_least(name: str, least: int) -> Callable[[Any], int]:
    """A whole number, `least` or more."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number: {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}: {value}")
        return int(value)

    return convert


def flag(name: str) -> Callable[[Any], bool]:
    """True or False."""

    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False: {value!r}")
        return value

    return convert


def text(name: str) -> Callable[[Any], str]:
    """A string with something in it."""

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string: {value!r}")
        if not value:
            raise ValueError(f"{name} must not be empty")
        return value

    return convert


def optional(name: str) -> Callable[[Any], str | None]:
    """A string with something in it, or `None`."""
    return lambda value: None if value is None else text(name)(value)


def names(name: str) -> Callable[[Any], list[str]]:
    """A list of column names; one name alone stands for a list of one."""

    def convert(value: Any) -> list[str]:
        columns = [value] if isinstance(value, str) else value
        if not isinstance(columns, list | tuple) or not all(isinstance(column, str) for column in columns):
            raise TypeError(f"{name} must be a list of column names: {value!r}")
        if not columns:
            raise ValueError(f"{name} must name at least one column")
        twice = sorted({column for column in columns if list(columns).count(column) > 1})
        if twice:
            raise ValueError(f"{name} names a column twice: {', '.join(twice)}")
        return list(columns)

    return convert


def choice(name: str, *options: str) -> Callable[[Any], str]:
    """One of a few words."""

    def convert(value: Any) -> str:
        if value not in options:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}: {value!r}")
        return value

    return convert


def function(name: str) -> Callable[[Any], Any]:
    """Something to call."""

    def convert(value: Any) -> Any:
        if not callable(value):
            raise TypeError(f"{name} must be a function: {value!r}")
        return value

    return convert


def listed(name: str) -> Callable[[Any], list[Any]]:
    """A list of anything; one object alone stands for a list of one."""

    def convert(value: Any) -> list[Any]:
        if isinstance(value, str | dict):
            raise TypeError(f"{name} must be a list: {value!r}")
        return list(value) if isinstance(value, list | tuple) else [value]

    return convert


def text_list(name: str) -> Callable[[Any], list[str]]:
    """A list of names, which may be empty."""

    def convert(value: Any) -> list[str]:
        return [] if isinstance(value, list | tuple) and not value else names(name)(value)

    return convert


def deprecated(name: str, why: str) -> Callable[[Any], Any]:
    """Any value, with a warning that it does nothing."""

    def convert(value: Any) -> Any:
        warnings.warn(f"{name} is deprecated and ignored: {why}", DeprecationWarning, stacklevel=2)
        return value

    return convert


def numbers(name: str) -> Callable[[Any], list[float]]:
    """A list of numbers."""

    def convert(value: Any) -> list[float]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, Real) for item in value):
            raise TypeError(f"{name} must be a list of numbers: {value!r}")
        return [float(item) for item in value]

    return convert


def callables(name: str) -> Callable[[Any], list[Any]]:
    """A list of functions, or of one list of functions per label."""

    def convert(value: Any) -> list[Any]:
        items = list(value) if isinstance(value, list | tuple) else [value]
        for item in items:
            if not callable(item) and not (isinstance(item, list | tuple) and all(callable(one) for one in item)):
                raise TypeError(f"{name} must be functions of (output, label): {item!r}")
        return items

    return convert


def shapes(name: str) -> Callable[[Any], list[list[int]]]:
    """A list of shapes, one per column."""

    def convert(value: Any) -> list[list[int]]:
        if not isinstance(value, list | tuple) or not all(isinstance(shape, list | tuple) for shape in value):
            raise TypeError(f"{name} must be a list of shapes, one per column: {value!r}")
        for shape in value:
            if not all(isinstance(size, Integral) and (int(size) > 0 or size == -1) for size in shape):
                raise ValueError(f"{name} must hold positive sizes or -1: {list(shape)}")
            if list(shape).count(-1) > 1:
                raise ValueError(f"{name} may contain -1 only once in a shape: {list(shape)}")
        return [[int(size) for size in shape] for shape in value]

    return convert
