# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of single parameter values; each returns the value in its canonical form, or says what was expected."""

# ruff: noqa: PLC0415 - as the store loads the native library

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.spark.common.store import Store


def anything(value: Any) -> Any:
    """Any value is as good as another; a check needs more than the value alone."""
    return value


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


def run_id(value: Any) -> str:
    """A string that is a path below the directory of runs."""
    if any(part in ("", ".", "..") for part in text("run_id")(value).split("/")):
        raise ValueError(f"run_id must name a directory below the store's runs: {value!r}")
    return value


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
                raise ValueError(f"{name} may leave one size of a shape open: {list(shape)}")
        return [[int(size) for size in shape] for shape in value]

    return convert


def validation(value: Any) -> float | str:
    """A share of rows, or the name of a column."""
    if isinstance(value, str):
        return text("validation")(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"validation must be a share of rows or a column name: {value!r}")
    if not 0 <= float(value) < 1:
        raise ValueError(f"validation must be at least 0 and less than 1: {value}")
    return float(value)


def store(value: Any) -> Store:
    """A store, or the path or URL of one."""
    from farandole.spark.common.store import Store

    if isinstance(value, Store):
        return value
    if isinstance(value, str):
        return Store.create(value)
    raise TypeError(f"store must be a Store or a path: {value!r}")
