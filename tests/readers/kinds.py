# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Types of columns with values at their limits, and the numbers that batches must have.

The numbers are computed from pyarrow's own values in plain Python, not by Farandole.
"""

import decimal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_UNITS = {"s": 10**6, "ms": 10**3, "us": 1}
_INT64_LIMIT = 2**63
DAY_US = 86_400_000_000
DAY_2024 = 19_782
YEAR_9999_US = 253_402_300_799_000_000


@dataclass(frozen=True)
class Kind:
    """A type of a column, and its values."""

    name: str
    type: pa.DataType
    stored: list[Any]
    """Six values, as integers of the unit where the type is a time."""
    refused: bool = False
    """Whether a value is not representable, so that every reader must refuse the column."""

    def array(self, *, nulls: bool = False) -> pa.Array:
        """Returns the values; with `nulls`, the second and the last are null."""
        values = [None if nulls and at in (1, 5) else one for at, one in enumerate(self.stored)]
        if pa.types.is_temporal(self.type):
            wide = pa.int32() if self.type.bit_width == 32 else pa.int64()
            return pa.array(values, wide).cast(self.type)
        return pa.array(values, self.type)


def batch_number(value: Any, kind: pa.DataType) -> Any:
    """Returns the number of a batch; `value` is a scalar of pyarrow."""
    if pa.types.is_date32(kind):
        return value.cast(pa.int32()).as_py()
    if pa.types.is_date64(kind):
        return value.cast(pa.int64()).as_py() // 86_400_000
    if pa.types.is_temporal(kind):
        wide = pa.int32() if kind.bit_width == 32 else pa.int64()
        number = value.cast(wide).as_py()
        return number // 1000 if kind.unit == "ns" else number * _UNITS[kind.unit]
    if pa.types.is_decimal(kind):
        return float(value.as_py())
    if pa.types.is_floating(kind):
        return float(value.as_py())
    return value.as_py()


def batch_numbers(column: Any, fill: Any = None) -> Any:
    """Returns the numbers of a column in nested lists; nulls become `fill`."""
    if pa.types.is_nested(column.type):
        return [batch_numbers(row.values, fill) for row in column]
    return [fill if not one.is_valid else batch_number(one, column.type) for one in column]


def _decimals(digits: int, scale: int) -> list[decimal.Decimal]:
    most = 10**digits - 1
    numbers = (0, most, -most, most // 3, -(most // 7), 1)
    with decimal.localcontext() as context:
        context.prec = 80
        return [decimal.Decimal(number).scaleb(-scale) for number in numbers]


def _integers(name: str, kind: pa.DataType, bits: int, *, signed: bool) -> Kind:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return Kind(name, kind, [0, low, high, high // 3, 1, high - 1])


def _times(name: str, kind: pa.DataType, unit_per_second: int) -> list[Kind]:
    """Returns moments of all centuries, and a column with one that no int64 can hold."""
    day = 86_400 * unit_per_second
    last = YEAR_9999_US * unit_per_second // 10**6
    if unit_per_second == 10**9:
        last = 2**63 - 1
        ordinary = [0, -1, last, DAY_2024 * day + 123_456_789, -(10**17), 1999]
        return [Kind(name, kind, ordinary)]
    ordinary = [0, -1, last, DAY_2024 * day + unit_per_second // 3, -141_427 * day, -719_162 * day]
    kinds = [Kind(name, kind, ordinary)]
    if unit_per_second < 10**6:
        kinds.append(Kind(f"{name}_beyond", kind, [0, 1, 2, 3, 4, 2**62], refused=True))
    return kinds


def _all_kinds() -> list[Kind]:
    kinds = [
        Kind("bool", pa.bool_(), [True, False, True, True, False, False]),
        *(_integers(f"int{b}", getattr(pa, f"int{b}")(), b, signed=True) for b in (8, 16, 32, 64)),
        *(
            _integers(f"uint{b}", getattr(pa, f"uint{b}")(), b, signed=False)
            for b in (8, 16, 32, 64)
        ),
        Kind("half", pa.float16(), [np.float16(x) for x in (0, 1.5, -65504, 6e-8, 0.1, 2)]),
        Kind("float", pa.float32(), [0.0, 1.5, -3.4e38, 1e-45, 0.1, 16777217.0]),
        Kind("double", pa.float64(), [0.0, 1.5, -1.7e308, 5e-324, 0.1, 2.0**53 + 2]),
        Kind("date32", pa.date32(), [0, -1, DAY_2024, 2_932_896, -141_428, -719_162]),
        Kind("date64", pa.date64(), [day * 86_400_000 for day in (0, -1, DAY_2024, -9, 7, 2)]),
        Kind("time32_s", pa.time32("s"), [0, 1, 86_399, 43_200, 5, 9]),
        Kind("time32_ms", pa.time32("ms"), [0, 1, 86_399_999, 43_200_000, 5, 9]),
        Kind("time64_us", pa.time64("us"), [0, 1, DAY_US - 1, 5, 7, 9]),
        Kind("time64_ns", pa.time64("ns"), [0, 1, DAY_US * 1000 - 1, 5, 1999, 9]),
    ]
    for digits, scale in ((4, 2), (9, 2), (9, 9), (15, 3), (18, 2), (18, 18), (28, 5), (38, 10)):
        kinds.append(
            Kind(
                f"decimal_{digits}_{scale}", pa.decimal128(digits, scale), _decimals(digits, scale)
            )
        )
    kinds.append(Kind("decimal256", pa.decimal256(60, 20), _decimals(60, 20)))
    for unit, per_second in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        kinds += _times(f"timestamp_{unit}", pa.timestamp(unit), per_second)
        kinds += _times(f"utc_{unit}", pa.timestamp(unit, "UTC"), per_second)
        kinds += _times(f"zoned_{unit}", pa.timestamp(unit, "Asia/Tokyo"), per_second)
        kinds += _times(f"duration_{unit}", pa.duration(unit), per_second)
    return kinds


KINDS = _all_kinds()
