# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cells of the matrix: a type, a writer, a shape and a reader, and what the reader makes of it."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from writers import WRITERS

from farandole.data import ParquetLoader, frame_loader, prepare_data
from farandole.spark.common.model.arrow_arrays import ColumnFill, column_to_array

FILE = "rows_of_the_cell.parquet"
FILL = 1
SHAPES = ("plain", "nulls", "lists", "lists_with_nulls", "chunked")
READERS = ("ParquetLoader", "prepare_data", "frame_loader", "column_to_array")


@dataclass(frozen=True)
class Cell:
    """One column in one file, read by all readers."""

    kind: kinds.Kind
    writer: str
    shape: str

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.kind.name}-{self.writer}-{self.shape}"

    def table(self) -> pa.Table:
        """Returns the rows."""
        values = self.kind.array(nulls="nulls" in self.shape)
        if "lists" in self.shape:
            values = pa.FixedSizeListArray.from_arrays(values, 2)
            values = values.cast(pa.list_(self.kind.type))
        if self.shape == "chunked":
            values = pa.concat_arrays([values] * 50)
        return pa.table({"c": values})


def all_cells() -> list[Cell]:
    """Returns all cells."""
    every = itertools.product(kinds.KINDS, WRITERS, SHAPES)
    return [Cell(kind, writer, shape) for kind, writer, shape in every]


def read_cell(reader: str, path: Path, fill: int | None) -> Any:
    """Returns the column as one reader reads it."""
    filled = {} if fill is None else {"fill": {"c": fill}}
    if reader == "ParquetLoader":
        (batch,) = ParquetLoader(path, 1000, columns=["c"], shuffle=False, **filled)
    elif reader == "prepare_data":
        with tempfile.TemporaryDirectory() as store:
            prepared = prepare_data(path, store, feature_cols=["c"], reuse=False, **filled)
            (batch,) = ParquetLoader(prepared.train_url, 1000, shuffle=False)
    elif reader == "frame_loader":
        (batch,) = frame_loader(str(path), 1000, ["c"], shuffle=False, **filled)
    else:
        column = pq.read_table(path, coerce_int96_timestamp_unit="us")["c"].combine_chunks()
        return column_to_array(column, "c", None if fill is None else ColumnFill(str(fill), True))
    return batch["c"]


def judge_cell(cell: Cell, home: Path) -> list[str]:
    """Returns the faults of all readers of a cell."""
    path = home / FILE
    path.unlink(missing_ok=True)
    try:
        WRITERS[cell.writer](cell.table(), path)
        stored = pq.read_table(path, coerce_int96_timestamp_unit="us")["c"].combine_chunks()
    except Exception:  # noqa: BLE001 - a program that cannot write this type writes no file
        return []
    fill = FILL if "nulls" in cell.shape else None
    inner = flat_type(stored.type)
    is_text = pa.types.is_string(inner) or pa.types.is_binary(inner)
    if is_text or pa.types.is_fixed_size_binary(inner):  # a type that the writer lacks
        return []
    expected = kinds.batch_numbers(stored, filled_number(fill, stored.type))
    flat = np.array(expected, object).reshape(-1).tolist()
    is_beyond = any(isinstance(one, int) and not -(2**63) <= one < 2**64 for one in flat)
    if "int96" in cell.writer and pa.types.is_timestamp(flat_type(stored.type)):
        # pyarrow wraps around in microseconds, and never in milliseconds.
        wide = pq.read_table(path, coerce_int96_timestamp_unit="ms")["c"].combine_chunks()
        coarse = kinds.batch_numbers(wide, filled_number(fill, stored.type))
        pairs = zip(np.array(coarse, object).reshape(-1), flat, strict=True)
        is_beyond = any(abs(one - other) >= 1000 for one, other in pairs)
    faults = []
    for reader in READERS:
        try:
            found = read_cell(reader, path, fill)
        except Exception as error:  # noqa: BLE001 - judged below
            if not is_beyond:
                faults.append(f"{cell.name}-{reader}: refused: {type(error).__name__}: {error}")
            elif not isinstance(error, ValueError | OSError) or "c" not in str(error):
                faults.append(f"{cell.name}-{reader}: names no column: {error!r}")
            elif reader in ("ParquetLoader", "prepare_data") and FILE not in str(error):
                faults.append(f"{cell.name}-{reader}: names no file: {error}")
            continue
        if not same_numbers(found, expected):
            faults.append(f"{cell.name}-{reader}: {found.tolist()[:6]} instead of {expected[:6]}")
    return faults


def flat_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values, in a list or not."""
    return kind.value_type if pa.types.is_nested(kind) else kind


def filled_number(fill: int | None, kind: pa.DataType) -> Any:
    """Returns the number that a batch has instead of a null."""
    inner = flat_type(kind)
    if fill is None or pa.types.is_boolean(inner):
        return None if fill is None else bool(fill)
    return float(fill) if pa.types.is_floating(inner) or pa.types.is_decimal(inner) else fill


def same_numbers(found: Any, expected: list[Any]) -> bool:
    """Returns whether a batch has exactly these numbers, bit by bit."""
    told = found.tolist()
    if found.dtype == np.float32:
        expected = np.array(expected, np.float32).tolist()
    return repr(told) == repr(expected)
