# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Dates, times and decimals as the numbers of batches, as prepared data and the reader have them.

Dates are days since 1970. Timestamps, times and durations are microseconds, for any unit of
their source: nanoseconds are rounded down, and coarser units that do not fit are refused.
Decimals are the nearest float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole.data.lazy_pyarrow import pa

_MICROSECONDS_PER_UNIT = {"s": 1_000_000, "ms": 1000, "us": 1}
_NANOSECONDS_PER_MICROSECOND = 1000
_MILLISECONDS_PER_DAY = 86_400_000


def dates_and_decimals_to_numbers(column: Any, name: str) -> Any:
    """Returns a column whose dates, times and decimals are numbers; other columns as they are.

    Args:
        column: An array of Arrow.
        name: Name of the column, for messages.

    Returns:
        An array with the same nulls: int64 or float64.

    Raises:
        ValueError: A time is more microseconds than an int64 can hold; naming column and row.
    """
    kind = column.type
    if pa.types.is_decimal(kind):
        # Arrow's own conversion multiplies by a rounded power of ten.
        return column.cast(pa.string()).cast(pa.float64())
    is_temporal = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return _times_as_integers(column, name) if is_temporal else column


def _times_as_integers(column: Any, name: str) -> Any:
    """Returns dates as days, and other times as microseconds."""
    kind = column.type
    narrow = column.cast(pa.int32()) if kind.bit_width == pa.int32().bit_width else column
    stored = narrow.cast(pa.int64())
    if pa.types.is_date32(kind):
        return stored
    if pa.types.is_date64(kind):
        return _map_integers(stored, lambda values: values // _MILLISECONDS_PER_DAY)
    if kind.unit == "ns":
        return _map_integers(stored, lambda values: values // _NANOSECONDS_PER_MICROSECOND)
    factor = _MICROSECONDS_PER_UNIT[kind.unit]
    if factor == 1:
        return stored
    _check_product_range(stored, factor, name, kind)
    return _map_integers(stored, lambda values: values * factor)


def _map_integers(column: Any, convert: Any) -> Any:
    """Returns an int64 array with converted values and the same nulls."""
    values = convert(column.fill_null(0).to_numpy(zero_copy_only=False))
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return pa.array(values, pa.int64(), mask=missing)


def _check_product_range(stored: Any, factor: int, name: str, kind: Any) -> None:
    values = stored.fill_null(0).to_numpy(zero_copy_only=False)
    limits = np.iinfo(np.int64)
    max_value = int(limits.max) // factor
    odd = np.flatnonzero((values < -max_value) | (values > max_value))
    if odd.size:
        raise ValueError(
            f"column {name!r}, row {odd[0]}: {values[odd[0]]} of {kind} are more microseconds than "
            "an int64 can hold"
        )
