# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of single parameter values. Each returns the value in its canonical form, or raises an error."""

# ruff: noqa: PLC0415 - as the store loads the native library

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.spark.common.store import Store


def anything(value: Any) -> Any:
    """Any value is as good as another; a check needs more than the value alone."""
    return value


def backend(value: Any) -> Any:
    """Something that runs functions in several processes."""
    if not callable(getattr(value, "run", None)) or not callable(getattr(value, "num_processes", None)):
        raise TypeError(f"backend must be a Backend, such as SparkBackend(2) or LocalBackend(2): {value!r}")
    return value


def compression(value: Any) -> Any:
    """One of `Compression`, or a compressor that keeps what it has left out."""
    wanted = ("compress", "decompress"), ("rounds", "reduce")
    if not any(all(callable(getattr(value, name, None)) for name in names) for names in wanted):
        raise TypeError(
            f"gradient_compression must be a member of Compression, such as fp16, or a compressor: {value!r}"
        )
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


def fill(value: Any) -> Any:
    """One value for all columns, or values by column; `None` for none."""
    plain = (bool, Real, str)
    if isinstance(value, Mapping):
        wrong = [name for name, one in value.items() if not isinstance(name, str) or not isinstance(one, plain)]
        if wrong:
            raise TypeError(f"fill needs numbers, texts or booleans by column: {value!r}")
        return dict(value)
    if value is not None and not isinstance(value, plain):
        raise TypeError(f"fill must be a value, or values by column: {value!r}")
    return value


def categories(value: Any) -> dict[str, Any]:
    """Names of columns, or by name their categories, or how many there may be; `None` for all."""
    if isinstance(value, str):
        raise TypeError(f"categories must be a list of column names, or a dict by name: {value!r}")
    by_name = dict(value) if isinstance(value, Mapping) else dict.fromkeys(value or ())
    for name, one in by_name.items():
        is_count = isinstance(one, Integral) and not isinstance(one, bool)
        if not isinstance(name, str) or not (one is None or is_count or isinstance(one, list | tuple)):
            raise TypeError(
                f"categories of a column must be a list of values, a number of values, or None: {name!r}: {one!r}"
            )
    return {name: list(one) if isinstance(one, tuple) else one for name, one in by_name.items()}


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


def ragged(value: Any) -> dict[str, Any]:
    """A `Pad` or `Nested` by column."""
    from farandole.spark.common.ragged import Nested, Pad, Ragged

    kinds = (Pad, Nested, Ragged, Mapping)
    if not isinstance(value, Mapping) or not all(isinstance(one, kinds) for one in value.values()):
        raise TypeError(f"ragged must be a dict of Pad or Nested by column: {value!r}")
    return dict(value)


def statistics(value: Any) -> dict[str, Any] | None:
    """`Statistics` as plain values by column, which can be saved."""
    from farandole.data.statistics import Statistics

    if value is None:
        return None
    if not isinstance(value, Statistics | Mapping):
        raise TypeError(f"statistics must be of farandole.data.statistics_of: {value!r}")
    return value.to_values() if isinstance(value, Statistics) else dict(value)


def optional(name: str) -> Callable[[Any], str | None]:
    """A string with something in it, or `None`."""
    return lambda value: None if value is None else text(name)(value)


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


def features(value: Any) -> list[str | list[str]]:
    """A list whose items are column names, or lists of names whose columns become one input."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise TypeError(f"feature_cols must be a list of column names, or of lists of them: {value!r}")
    found = [item if isinstance(item, str) else names("feature_cols")(item) for item in items]
    names("feature_cols")([name for item in found for name in ([item] if isinstance(item, str) else item)])
    return found


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


def edit_fields(value: Any) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """A list of (name, NumPy type, shape, whether nulls are allowed), as Petastorm's edit fields."""
    import numpy as np

    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 4 for one in value):  # noqa: PLR2004 - four parts
        raise TypeError(f"transformation_edit_fields must be a list of (name, numpy type, shape, nullable): {value!r}")
    return [
        (str(name), np.dtype(kind).name, tuple(int(size) for size in shape or ()), bool(nullable))
        for name, kind, shape, nullable in value
    ]


def deprecated(name: str, why: str) -> Callable[[Any], Any]:
    """Any value, with a warning that it does nothing."""

    def convert(value: Any) -> Any:
        import warnings

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
