# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks of the values of estimators' parameters, besides the general ones of
`farandole.common.argument_checks`.
"""

# ruff: noqa: PLC0415 - as the store loads the native library

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from farandole.common.argument_checks import (
    check_byte_count,
    check_column_names,
    check_nonempty_text,
    check_positive_number,
)
from farandole.stores import run_names

if TYPE_CHECKING:
    from farandole.stores.store import Store


def check_backend(name: str, value: Any) -> Any:
    """Checks that a value can run functions in several processes."""
    if not callable(getattr(value, "run", None)) or not callable(
        getattr(value, "num_processes", None)
    ):
        raise TypeError(
            f"{name} must be a Backend, such as SparkBackend(2) or LocalBackend(2): {value!r}"
        )
    return value


def check_compression(name: str, value: Any) -> Any:
    """Returns one of `Compression`, or a compressor with a residual."""
    wanted = ("compress", "decompress"), ("rounds", "reduce")
    if not any(
        all(callable(getattr(value, method, None)) for method in methods) for methods in wanted
    ):
        raise TypeError(
            f"{name} must be a member of Compression, such as fp16, or a compressor: {value!r}"
        )
    return value


def check_fill(name: str, value: Any) -> Any:
    """Returns one value for all columns, or values by column; `None` for none."""
    plain = (bool, Real, str)
    if isinstance(value, Mapping):
        wrong = [
            column
            for column, entry in value.items()
            if not isinstance(column, str) or not isinstance(entry, plain)
        ]
        if wrong:
            raise TypeError(f"{name} needs numbers, texts or booleans by column: {value!r}")
        return dict(value)
    if value is not None and not isinstance(value, plain):
        raise TypeError(f"{name} must be a value, or values by column: {value!r}")
    return value


def check_categories(name: str, value: Any) -> dict[str, Any]:
    """Returns names of columns, or by name their categories or the greatest number of these;
    `None` for all.
    """
    if isinstance(value, str):
        raise TypeError(f"{name} must be a list of column names, or a dict by name: {value!r}")
    by_name = dict(value) if isinstance(value, Mapping) else dict.fromkeys(value or ())
    for column, categories in by_name.items():
        is_count = isinstance(categories, Integral) and not isinstance(categories, bool)
        if not isinstance(column, str) or not (
            categories is None or is_count or isinstance(categories, list | tuple)
        ):
            raise TypeError(
                f"{name} of a column must be a list of values, a number of values, or None: "
                f"{column!r}: {categories!r}"
            )
    return {
        column: list(entry) if isinstance(entry, tuple) else entry
        for column, entry in by_name.items()
    }


def check_ragged(name: str, value: Any) -> dict[str, Any]:
    """Returns a `Pad` or `Nested` by column."""
    from farandole.data.ragged import Nested, Pad, RaggedColumn

    kinds = (Pad, Nested, RaggedColumn, Mapping)
    if not isinstance(value, Mapping) or not all(
        isinstance(entry, kinds) for entry in value.values()
    ):
        raise TypeError(f"{name} must be a dict of Pad or Nested by column: {value!r}")
    return dict(value)


def check_statistics(name: str, value: Any) -> dict[str, Any] | None:
    """Returns `Statistics` as plain values by column, which can be saved."""
    from farandole.data.statistics import Statistics

    if value is None:
        return None
    if not isinstance(value, Statistics | Mapping):
        raise TypeError(f"{name} must be of farandole.data.statistics_of: {value!r}")
    return value.to_values() if isinstance(value, Statistics) else dict(value)


def check_run_id(name: str, value: Any) -> str:
    """Returns a string that is a path below the directory of runs."""
    run_names.check_run_id(check_nonempty_text(name, value), name)
    return value


_AGE_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def parse_age(name: str, value: Any) -> float:
    """Returns an age, such as "30d", as seconds.

    Args:
        name: name of the parameter.
        value: a number with a unit, a `timedelta`, or seconds.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        number, unit = value[:-1].strip(), _AGE_UNIT_SECONDS.get(value[-1:])
        if unit is None or not (number.isascii() and number.isdigit()):
            raise ValueError(
                f"{name} must be an age with a unit, such as 90s, 30m, 12h, 7d or 4w: {value!r}"
            )
        value = int(number) * unit
    return check_positive_number(name, value)


_BYTES_PER_UNIT = {"B": 1}
_BYTES_PER_UNIT |= {f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)}
_BYTES_PER_UNIT |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}


def parse_size(name: str, value: Any) -> int:
    """Returns a size, such as "20GiB", as bytes.

    Args:
        name: name of the parameter.
        value: a number with a unit, or bytes.
    """
    if isinstance(value, str):
        given = value.strip()
        digits = given.rstrip("BiKMGT")
        unit, number = _BYTES_PER_UNIT.get(given[len(digits) :]), digits.strip()
        if unit is None or not (number.isascii() and number.isdigit()):
            raise ValueError(
                f"{name} must be a size with a unit, such as 500MB, 20GiB or 1TB: {value!r}"
            )
        value = int(number) * unit
    return check_byte_count(name, value)


FeatureColumns = list[str | list[str]] | dict[str, Any]
"""Columns of a model's inputs by position, or by the name of the argument."""


def check_feature_cols(name: str, value: Any) -> FeatureColumns:
    """Returns a list whose items are column names, or lists of names whose columns become one
    input; or a dict of such items by argument, which may contain dicts.
    """
    if isinstance(value, Mapping):
        found = _copy_feature_mapping(name, value)
        check_column_names(name, [column for one in feature_groups(found) for column in one])
        return found
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise TypeError(f"{name} must be a list of column names, or of lists of them: {value!r}")
    listed = [item if isinstance(item, str) else check_column_names(name, item) for item in items]
    check_column_names(name, [column for one in feature_groups(listed) for column in one])
    return listed


def feature_groups(value: FeatureColumns | None) -> list[list[str]]:
    """Returns the columns of each input: `["a", ["b", "c"]]` and `{"x": "a", "y": ["b", "c"]}` have
    two inputs.

    Args:
        value: a result of `check_feature_cols`.
    """
    items = [item for _, item in _feature_items(value)]
    return [[item] if isinstance(item, str) else list(item) for item in items]


def feature_arguments(value: FeatureColumns | None) -> list[tuple[str, ...]]:
    """Returns the path of each input: the name of the model's argument, and the keys of dicts
    below it. If the model takes its inputs by position, all paths are empty.

    Args:
        value: a result of `check_feature_cols`.
    """
    return [path for path, _ in _feature_items(value)]


def _feature_items(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, Mapping):
        return [((), item) for item in value or ()]
    found: list[tuple[tuple[str, ...], Any]] = []
    for argument, item in value.items():
        below = (*path, argument)
        found += _feature_items(item, below) if isinstance(item, Mapping) else [(below, item)]
    return found


def _copy_feature_mapping(name: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    if not value:
        raise ValueError(f"{name} must name at least one column in each dict")
    made: dict[str, Any] = {}
    for argument, item in value.items():
        if not isinstance(argument, str):
            raise TypeError(f"{name} needs names of the model's arguments as keys: {argument!r}")
        if isinstance(item, Mapping):
            made[argument] = _copy_feature_mapping(name, item)
        else:
            made[argument] = item if isinstance(item, str) else check_column_names(name, item)
    return made


def check_output_names(name: str, value: Any) -> list[str]:
    """Returns a list of names of fields; one name alone stands for a list of one."""
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(one, str) and one for one in names)
    ):
        raise TypeError(
            f'{name} must be the name of a field, such as "logits", or a list of them: {value!r}'
        )
    return list(names)


def check_edit_fields(name: str, value: Any) -> list[tuple[str, str, tuple[int, ...] | None, bool]]:
    """Returns a list of (name, NumPy type, shape, whether nulls are allowed), as Petastorm's
    edit fields. The shape `None` allows all shapes, `()` is a number.
    """
    import numpy as np

    if not isinstance(value, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 4  # noqa: PLR2004 - four parts
        for entry in value
    ):
        raise TypeError(f"{name} must be a list of (name, numpy type, shape, nullable): {value!r}")
    return [
        (
            str(column),
            np.dtype(kind).name,
            None if shape is None else tuple(int(size) for size in shape),
            bool(nullable),
        )
        for column, kind, shape, nullable in value
    ]


def check_validation_value(name: str, value: Any) -> float | str:
    """Returns a share of rows, or the name of a column."""
    if isinstance(value, str):
        return check_nonempty_text(name, value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a share of rows or a column name: {value!r}")
    if not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1: {value}")
    return float(value)


def check_store(name: str, value: Any) -> Store:
    """Returns a store, or the path or URL of one."""
    from farandole.stores.store import Store

    if isinstance(value, Store):
        return value
    if isinstance(value, str):
        return Store.create(value)
    raise TypeError(f"{name} must be a Store or a path: {value!r}")
