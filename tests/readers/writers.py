# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs that write Parquet, each with its own layout of pages and types."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

Writer = Callable[[pa.Table, Path], None]


def _arrow_writer(**options: object) -> Writer:
    def write(table: pa.Table, path: Path) -> None:
        pq.write_table(table, path, **options)  # pyright: ignore[reportArgumentType]

    return write


def _innermost_type(kind: pa.DataType) -> pa.DataType:
    return _innermost_type(kind.value_type) if pa.types.is_list(kind) else kind


def _write_with_polars(table: pa.Table, path: Path) -> None:
    if any(pa.types.is_decimal256(_innermost_type(field.type)) for field in table.schema):
        raise ValueError("polars has no decimals of 256 bits, and ends with a panic")
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    frame.write_parquet(path)


def _write_with_duckdb(table: pa.Table, path: Path) -> None:
    with duckdb.connect() as connection:
        connection.register("rows", table)
        connection.execute(f"copy (select * from rows) to '{path}' (format parquet)")


WRITERS: dict[str, Writer] = {
    "arrow": _arrow_writer(),
    "arrow_v1": _arrow_writer(version="1.0", use_dictionary=False, compression="none"),
    "arrow_v2_pages": _arrow_writer(data_page_version="2.0", compression="zstd"),
    "arrow_gzip": _arrow_writer(compression="gzip"),
    "arrow_brotli": _arrow_writer(compression="brotli", use_dictionary=False),
    "arrow_decimals_as_integers": _arrow_writer(store_decimal_as_integer=True),
    "arrow_int96": _arrow_writer(use_deprecated_int96_timestamps=True),
    "arrow_int96_gzip": _arrow_writer(use_deprecated_int96_timestamps=True, compression="gzip"),
    "arrow_milliseconds": _arrow_writer(coerce_timestamps="ms", allow_truncated_timestamps=True),
    "arrow_no_schema": _arrow_writer(store_schema=False),
    "arrow_two_groups": _arrow_writer(row_group_size=3),
    "arrow_tiny_pages": _arrow_writer(
        data_page_size=64, write_batch_size=2, use_dictionary=False, write_page_index=True
    ),
    "polars": _write_with_polars,
    "duckdb": _write_with_duckdb,
}
