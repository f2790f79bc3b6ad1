# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`frame_loader`: from a frame to batches of tensors, without an estimator and without prepared
data.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from farandole.data.columns import refuse_missing_columns
from farandole.data.inputs.frames import is_spark_dataframe
from farandole.data.inputs.number_conversion import dates_and_decimals_to_numbers
from farandole.data.inputs.sources import open_source
from farandole.data.inputs.spark_vectors import decode_spark_vectors
from farandole.data.inputs.tensor_columns import nested_lists_as_tensors
from farandole.data.lazy_pyarrow import pa, pq
from farandole.data.loader import ParquetLoader
from farandole.data.ragged import Nested, Pad, check_pad_value, list_element_dtype
from farandole.data.statistics_passes import quote_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from farandole.data.ragged import RaggedColumn

_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
ROW_GROUP_ROWS = 16384
"""Rows of a row group that is written here."""
_MAX_BINARY_BYTES = 1 << 30
"""Bytes of a column of a record batch, at most; Arrow's `binary` has less than 2 GiB of them."""
_UNLIMITED_LIST_LENGTH = 1 << 40
"""Length of a list that none reaches, for lists that are kept whole."""


def frame_loader(
    frame: Any,
    batch_size: int,
    columns: Sequence[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    ragged: Mapping[str, Pad | Nested] | None = None,
    types: Mapping[str, Any] | None = None,
    **options: Any,
) -> ParquetLoader:
    """Returns a loader of the rows of a frame.

    The rows are written once, as plain Parquet, to a directory of their own. It is removed when the
    loader is, or when this process ends. Only the user of this process may enter the directory, so
    Spark's executors must run as the same user. Processes that get the loader by pickle read the
    same files: call `follow_world()` there.

    Args:
        frame: A Spark DataFrame, which its executors write, or any source of
            `farandole.data.prepare_data`. Spark ML vectors, dense or sparse, become float64 of
            shape `(rows, length)`.
        batch_size: Rows of one batch of each rank.
        columns: Columns to read; default: all that a batch can hold. Rank 0 logs a warning that
            names the others.
        cache: The directory for the rows, which all processes that read or write them must see;
            default: the one for temporary files. A path or a `file://` URL.
        ragged: Treatment of columns of lists of different lengths, as for `prepare_data`:
            `{"tokens": Pad(max_length=512, buckets=8)}` pads them, and `{"tokens": Nested()}` makes
            nested tensors.
        types: Types of columns, as for `prepare_data`; not for a Spark DataFrame.
        options: Options of `ParquetLoader`.

    Raises:
        ValueError: A column that the frame does not have or has twice, or of a type that Parquet
            or a tensor cannot hold, such as matrices of Spark ML; ragged columns that are no lists
            of numbers; a frame without rows, a URL of a remote store as `cache`, or executors on
            other hosts that write to a disk of their own.
        TypeError: A frame that holds no rows, or a ragged column that is neither `Pad` nor
            `Nested`.
    """
    if not isinstance(ragged, Mapping | None):
        raise TypeError(f"ragged must be a dict of Pad or Nested by column: {ragged!r}")
    wanted = dict(ragged or {})
    directory = _resolve_cache_argument(cache) / f"farandole-frame-{uuid.uuid4().hex}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The parent may be shared by users. Spark would create a directory that all of them can read.
    directory.mkdir(mode=0o700)
    rows_directory = directory / "rows"
    try:
        if is_spark_dataframe(frame):
            _check_column_names(columns, frame.columns, wanted)
            chosen = frame if columns is None else frame.select(*map(quote_column, columns))
            rows, lists = _write_from_executors(
                _spark_frame_as_numbers(chosen, columns), rows_directory, wanted
            )
        else:
            rows, lists = None, _write_rows(frame, columns, rows_directory, wanted, types)
        loader = _FrameLoader(rows_directory, batch_size, columns, lists, **options)
        if rows is not None:
            _check_row_count(rows, loader.dataset.rows, rows_directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(loader, _remove_rows_of_process, directory, os.getpid())
    return loader


class _FrameLoader(ParquetLoader):
    """A loader of rows that `frame_loader` has written."""

    def __init__(
        self,
        directory: Path,
        batch_size: int,
        columns: Sequence[str] | None,
        lists: Mapping[str, RaggedColumn],
        **options: Any,
    ) -> None:
        self._stored = dict(lists)
        super().__init__(directory, batch_size, columns, **options)

    def _source_description(self) -> str:
        return "frame_loader"

    def _stored_ragged_columns(self) -> dict[str, RaggedColumn]:
        return dict(self._stored)


def _resolve_cache_argument(cache: str | os.PathLike[str] | None) -> Path:
    """Returns the directory that `cache` means."""
    text = tempfile.gettempdir() if cache is None else os.fspath(cache)
    if not _URL_PATTERN.match(text):
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"cache must be a directory that all processes see as a file system, not {text}: "
            "write the rows to the "
            "remote store with prepare_data, and read them with ParquetLoader"
        )
    return Path(unquote(parts.path))


def _spark_frame_as_numbers(frame: Any, columns: Sequence[str] | None) -> Any:
    """Returns a DataFrame of Spark whose dates and times are the numbers of batches, and whose
    vectors are arrays.

    As dates and times, Spark would write them as the session's settings say: cut to milliseconds,
    as nanoseconds that wrap, or in an old calendar.

    Args:
        frame: The DataFrame.
        columns: The requested columns, which batches must be able to hold.

    Raises:
        ValueError: A requested column has a user-defined type that is no vector.
    """
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415 - only where there is Spark
    from pyspark.sql import functions, types  # noqa: PLC0415 - as above

    def count_microseconds(value: Any) -> Any:
        start = functions.to_timestamp_ntz(functions.lit("1970-01-01 00:00:00"))
        return functions.timestamp_diff("MICROSECOND", start, value)

    converters: dict[str, Callable[[Any], Any]] = {
        "vectorudt": lambda value: functions.when(value.isNotNull(), vector_to_array(value)),
        "date": lambda value: functions.unix_date(value).cast("long"),
        "timestamp": functions.unix_micros,
        "timestamp_ntz": count_microseconds,
    }

    def convert_column(value: Any, kind: Any) -> Any:
        """Returns the converted column; `None` if it stays as it is."""
        if isinstance(kind, types.ArrayType) and not _is_user_defined(kind):
            probe = convert_column(functions.lit(None), kind.elementType)
            if probe is None:
                return None
            return functions.transform(value, lambda each: convert_column(each, kind.elementType))
        convert = converters.get(kind.typeName())
        return None if convert is None else convert(value)

    converted, changed = [], False
    for field in frame.schema:
        if columns is not None and _is_user_defined(field.dataType):
            raise ValueError(
                f"column {field.name!r} of the frame has type {field.dataType.simpleString()}, "
                "which no tensor can hold: make numbers, arrays of numbers or Spark ML vectors of "
                "it, or leave it out of columns=[...]"
            )
        value = functions.col(quote_column(field.name))
        number = convert_column(value, field.dataType)
        changed = changed or number is not None
        converted.append(value if number is None else number.alias(field.name))
    return frame.select(*converted) if changed else frame


def _is_user_defined(kind: Any) -> bool:
    """Returns whether a type of Spark is, or is an array of, a user-defined type; vectors are
    plain.
    """
    from pyspark.sql import types  # noqa: PLC0415 - only where there is Spark

    if isinstance(kind, types.ArrayType):
        inner = kind.elementType
        return isinstance(inner, types.UserDefinedType) or _is_user_defined(inner)
    return isinstance(kind, types.UserDefinedType) and kind.typeName() != "vectorudt"


def _write_from_executors(
    frame: Any, directory: Path, wanted: Mapping[str, Pad | Nested]
) -> tuple[int, dict[str, RaggedColumn]]:
    """Lets Spark write the rows, and returns their number and their ragged columns."""
    from pyspark.sql import Observation, functions, types  # noqa: PLC0415 - only where there is Spark

    seen = Observation()
    longest = [
        functions.max(functions.size(functions.col(quote_column(name)))).alias(f"longest {number}")
        for number, name in enumerate(wanted)
    ]
    kinds = _element_dtypes(frame.limit(0).toArrow().schema, wanted) if wanted else {}
    counted = frame.observe(seen, functions.count(functions.lit(1)).alias("rows"), *longest)
    if wanted:
        # mapInArrow takes no names with dots or backticks: columns travel by number.
        numbers = [f"column{index}" for index in range(len(frame.columns))]
        fields = [
            types.StructField(
                number, types.BinaryType() if field.name in wanted else field.dataType
            )
            for number, field in zip(numbers, frame.schema, strict=True)
        ]
        encode = partial(
            _encode_numbered_batches,
            names=frame.columns,
            lists=_unbounded_ragged_columns(wanted, kinds),
        )
        counted = counted.toDF(*numbers).mapInArrow(encode, types.StructType(fields))
        counted = counted.toDF(*frame.columns)
    counted.write.parquet(directory.absolute().as_uri())
    observed = seen.get
    if not any(directory.glob("*.parquet")):
        _check_row_count(observed["rows"], 0, directory)
    lengths = [max(1, observed[f"longest {number}"] or 0) for number in range(len(wanted))]
    known = zip(wanted.items(), lengths, strict=True)
    return observed["rows"], {
        name: option.to_ragged_column(kinds[name], length) for (name, option), length in known
    }


def _element_dtypes(schema: pa.Schema, wanted: Mapping[str, Pad | Nested]) -> dict[str, str]:
    """Returns the type of the values in each ragged column."""
    for name, layout in wanted.items():
        if not isinstance(layout, Pad | Nested):
            raise TypeError(
                f"ragged must be a dict of Pad or Nested by column: {name!r} is {layout!r}"
            )
    kinds = {name: list_element_dtype(schema.field(name).type, name) for name in wanted}
    for name, layout in wanted.items():
        check_pad_value(layout, kinds[name], name)
    return kinds


def _unbounded_ragged_columns(
    wanted: Mapping[str, Pad | Nested], kinds: Mapping[str, str]
) -> dict[str, RaggedColumn]:
    """Returns ragged columns as they are written, before the length of the longest row is known."""
    return {
        name: option.to_ragged_column(kinds[name], _UNLIMITED_LIST_LENGTH)
        for name, option in wanted.items()
    }


def _encode_numbered_batches(
    batches: Iterable[pa.RecordBatch], names: list[str], lists: Mapping[str, RaggedColumn]
) -> Iterator[pa.RecordBatch]:
    """Record batches as `_encode_ragged_batches` returns them, with columns by number outside."""
    numbers: list[str] = []

    def named_batches() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers[:] = batch.schema.names
            yield batch.rename_columns(names)

    for encoded in _encode_ragged_batches(named_batches(), lists):
        yield encoded.rename_columns(numbers)


def _encode_ragged_batches(
    batches: Iterable[pa.RecordBatch], lists: Mapping[str, RaggedColumn]
) -> Iterator[pa.RecordBatch]:
    """Record batches whose ragged columns are the bytes of each row's values."""
    for batch in batches:
        columns = {
            name: lists[name].encode_arrow_column(column, name) if name in lists else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        large = [name for name in lists if columns[name].nbytes > _MAX_BINARY_BYTES]
        if large and batch.num_rows == 1:
            raise ValueError(
                f"column {large[0]!r} has a list of more than {_MAX_BINARY_BYTES} bytes in one "
                f"row: "
                "give Pad or Nested a max_length"
            )
        if large:
            half = batch.num_rows // 2
            yield from _encode_ragged_batches([batch.slice(0, half), batch.slice(half)], lists)
            continue
        plain = [
            column.cast(pa.binary()) if name in lists else column
            for name, column in columns.items()
        ]
        yield pa.RecordBatch.from_arrays(plain, names=batch.schema.names)


def _check_row_count(written: int, found: int, directory: Path) -> None:
    if found != written:
        raise ValueError(
            f"Spark wrote {written} rows to {directory}, and {found} of them are here: its "
            "executors are on other "
            "hosts; give cache= a directory that all hosts share"
        )


def _check_column_names(
    columns: Sequence[str] | None, present: Sequence[str], wanted: Iterable[str]
) -> None:
    refuse_missing_columns(columns or (), present, "the frame")
    counts = Counter(present)
    twice = [name for name in columns or present if counts[name] > 1]
    if twice:
        raise ValueError(f"the frame has more than one column {twice[0]!r}: rename them")
    strange = [name for name in wanted if name not in (columns or present)]
    if strange:
        raise ValueError(
            f"ragged names a column that is not read: {strange[0]!r}; read: "
            f"{', '.join(columns or present)}"
        )


def _write_rows(
    frame: Any,
    columns: Sequence[str] | None,
    directory: Path,
    wanted: Mapping[str, Pad | Nested],
    types: Mapping[str, Any] | None,
) -> dict[str, RaggedColumn]:
    """Writes the rows, and returns their ragged columns."""
    source = decode_spark_vectors(open_source(frame, types=types))
    names = source.schema.names if columns is None else list(columns)
    _check_column_names(names, source.schema.names, wanted)
    kinds = _element_dtypes(source.schema, wanted)
    unbounded, longest = _unbounded_ragged_columns(wanted, kinds), dict.fromkeys(wanted, 1)
    directory.mkdir()
    writer = None
    try:
        for unit in source.units(names):
            for batch in unit.batches():
                if not batch.num_rows:
                    continue
                for name, layout in unbounded.items():
                    longest[name] = max(
                        longest[name], int(layout.arrow_row_lengths(batch.column(name)).max())
                    )
                packed = _batch_for_parquet(batch)
                for stored in (
                    _encode_ragged_batches([packed], unbounded) if unbounded else [packed]
                ):
                    try:
                        writer = writer or pq.ParquetWriter(
                            directory / "rows.parquet", stored.schema, compression="none"
                        )
                        rows = pa.Table.from_batches([stored])
                        writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
                    except pa.ArrowException as error:
                        raise _unwritable_column_error(stored, error) from error
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError("the frame has no rows")
    return {name: one.to_ragged_column(kinds[name], longest[name]) for name, one in wanted.items()}


def _batch_for_parquet(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a batch whose times are the numbers of batches, and whose nested lists are tensors:
    Parquet has no seconds, and the reader no nested lists.
    """
    columns, fields = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        stored = nested_lists_as_tensors(column)
        if pa.types.is_dictionary(field.type) and pa.types.is_string_view(field.type.value_type):
            stored = column.dictionary.cast(pa.string()).take(column.indices)
        if pa.types.is_temporal(field.type) and not pa.types.is_interval(field.type):
            stored = dates_and_decimals_to_numbers(column, field.name)
        columns.append(stored)
        fields.append(field.with_type(stored.type))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _unwritable_column_error(batch: pa.RecordBatch, error: Exception) -> ValueError:
    """Returns the error for rows that cannot be written, which names the first column that
    cannot.
    """
    for name in batch.schema.names:
        try:
            pq.write_table(pa.Table.from_batches([batch.select([name])]), pa.BufferOutputStream())
        except pa.ArrowException as column_error:
            return ValueError(
                f"column {name!r} of the frame is {batch.schema.field(name).type}, which Parquet "
                "cannot hold: cast it to numbers or strings, or leave it out of columns=[...] "
                f"({column_error})"
            )
    return ValueError(f"the rows of the frame cannot be written as Parquet: {error}")


def _remove_rows_of_process(directory: Path, process: int) -> None:
    """Removes the rows, but not from a process that was forked from the one that wrote them."""
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
