# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Run-end-encoded columns, which are read as the values that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.source_units import convert_source_columns
from farandole.data.lazy_pyarrow import pa, pc

if TYPE_CHECKING:
    from farandole.data.inputs.source_units import RowSource


def decode_run_ends(source: RowSource) -> RowSource:
    """Returns the source with plain columns instead of run-end-encoded ones.

    Args:
        source: As it was opened.
    """
    return convert_source_columns(source, _type_of_runs, _decode_run_end_column)


def _decode_run_end_column(column: Any, _name: str) -> Any:
    """Returns the value of each row; other columns as they are."""
    if not pa.types.is_run_end_encoded(column.type):
        return column
    try:
        decoded = pc.run_end_decode(column)
    except pa.ArrowNotImplementedError:  # categories and views
        count, first = column.find_physical_length(), column.find_physical_offset()
        ends = column.run_ends.to_numpy()[first : first + count].astype(np.int64) - column.offset
        lengths = np.diff(np.minimum(ends, len(column)), prepend=0)
        values = column.values.cast(_type_of_runs(column.type))
        decoded = values.take(pa.array(np.repeat(np.arange(first, first + count), lengths)))
    return decoded.cast(_type_of_runs(column.type))


def _type_of_runs(kind: Any) -> pa.DataType:
    """Returns the type of the values that runs become; views, which Arrow cannot take, are plain
    texts.
    """
    if not pa.types.is_run_end_encoded(kind):
        return kind
    if pa.types.is_string_view(kind.value_type):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind.value_type) else kind.value_type
