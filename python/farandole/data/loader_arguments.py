# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Arguments of loaders as the native reader takes them."""

from __future__ import annotations

import decimal
import numbers
from collections.abc import Mapping
from typing import Any

_NAMES_OF_READER = {
    "string": "utf8",
    "str": "utf8",
    "large_string": "utf8",
    "string_view": "utf8",
    "double": "float64",
    "float": "float32",
    "halffloat": "float16",
    "boolean": "bool",
}


def fill_argument_by_column(fill: Any) -> dict[str, Any]:
    """Returns the argument `fill` as values by column.

    Args:
        fill: Values by column; or one value, for `"*"`: all columns; or `None`.
    """
    if fill is None:
        return {}
    return dict(fill) if isinstance(fill, Mapping) else {"*": fill}


def numeric_fill_by_column(fill: Mapping[str, Any] | float | None) -> dict[str, Any]:
    """Returns the values that replace missing ones, by column.

    Args:
        fill: A value for all columns that can hold it, or values by column.

    Raises:
        ValueError: A value is no number; names the column.
    """
    values = fill_argument_by_column(fill)
    for name, value in values.items():
        if not isinstance(value, numbers.Number | decimal.Decimal) and not hasattr(
            value, "__float__"
        ):
            column = "all columns" if name == "*" else f"column {name!r}"
            raise ValueError(
                f"the fill of {column} must be a number of batches, such as days or microseconds "
                f"since 1970 for dates and times: {value!r}. Means, medians and words are for "
                "prepare_data, which learns and writes them"
            )
    return values


def native_reader_types(types: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the types of columns of names of directories, as the native reader names them.

    Args:
        types: Names of types of NumPy or Arrow, or types of Arrow, by column.
    """
    names = {name: str(kind) for name, kind in (types or {}).items()}
    return {name: _NAMES_OF_READER.get(kind, kind) for name, kind in names.items()}
