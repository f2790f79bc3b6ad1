# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rows as their codecs decode them."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from petastorm.errors import DecodeFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from petastorm.unischema import Unischema, UnischemaField

__all__ = ["DecodeFieldError", "decode_row"]


def decode_row(row: Mapping[str, Any], schema: Unischema) -> dict[str, Any]:
    """Returns the decoded values of a row; names that the schema lacks are left out.

    Args:
        row: Stored values by name.
        schema: The fields with their codecs.

    Raises:
        DecodeFieldError: A value that its codec cannot decode; names the field.
    """
    fields = schema.fields
    return {
        name: None if value is None else _decode_value(fields[name], value)
        for name, value in row.items()
        if name in fields
    }


def _decode_value(field: UnischemaField, value: Any) -> Any:
    try:
        if field.codec is not None:
            return field.codec.decode(field, value)
        kind = field.numpy_dtype
        if isinstance(kind, type) and issubclass(kind, np.generic | Decimal):
            return kind(value)
    except Exception as error:
        raise DecodeFieldError(f'Decoding field "{field.name}" failed: {error}') from error
    return value
