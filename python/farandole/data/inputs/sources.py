# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sources of rows to prepare: files, tables, frames and streams, as record batches in bounded
memory.

A source is a list of units, each a stream of record batches: a bundle of row groups of a Parquet
file, another file, a table. Units are read separately, so a preparation can continue with missing
units, and an error names the file. pyarrow reads the files.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from farandole.data.inputs.catalog_names import resolve_source_options
from farandole.data.inputs.directory_partitions import (
    common_directory,
    fragment_partition_values,
    partition_column_names,
    partitioned_dataset,
)
from farandole.data.inputs.file_discovery import arrow_filesystem, file_extensions, find_files
from farandole.data.inputs.frames import frame_source, is_arrow_dataset, is_spark_dataframe
from farandole.data.inputs.int96 import (
    check_int96_files,
    check_int96_range,
    fragment_with_int96_unit,
    read_int96_as_microseconds,
)
from farandole.data.inputs.legacy_calendar import refuse_ambiguous_files, refuse_ambiguous_times
from farandole.data.inputs.run_end_encoding import decode_run_ends
from farandole.data.inputs.source_units import MAX_BATCH_ROWS, RowSource, SourceUnit
from farandole.data.inputs.table_snapshot import FileBatchConversion
from farandole.data.inputs.tables import open_if_table
from farandole.data.inputs.tensor_columns import decode_tensors
from farandole.data.lazy_pyarrow import ds, pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from farandole.data.inputs.table_snapshot import TableSnapshot

UNIT_TARGET_BYTES = 128 << 20
"""Bytes of Parquet, encoded, that are one unit."""
_BATCH_TARGET_BYTES = 4 << 20
_TEXT_BLOCK_BYTES = 4 << 20
_FORMAT_BY_SUFFIX = {
    "parquet": "parquet",
    "pq": "parquet",
    "csv": "csv",
    "tsv": "csv",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "arrow": "ipc",
    "ipc": "ipc",
    "feather": "ipc",
}
_SELF_DESCRIBING_FORMATS = ("parquet", "ipc")
"""Formats whose files contain a schema. For other formats, the types are guessed from the first
block of each file.
"""


def open_source(
    source: Any,
    *,
    format: str | None = None,  # noqa: A002 - as pyarrow calls it
    types: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RowSource:
    """Opens a source and finds its columns and units.

    Args:
        source: See `farandole.data.prepare_data`.
        format: Format of files.
        types: Types by column, for formats that have none.
        options: Options of CSV and JSON.
        storage_options: Options of its paths, as for a store.

    Returns:
        Its columns and units; nothing but the beginnings or the footers of files has been read.

    Raises:
        ImportError: pyarrow, or the client of a Delta or Iceberg table, is not installed.
        FileNotFoundError: There is no such file.
        ValueError: Files that cannot be read, or that disagree; the message names the file.
        TypeError: Nothing that holds rows.
    """
    found = resolve_source_options(source, storage_options)
    opened = _open_rows(found, format, types, options)
    if opened is not None:
        return decode_tensors(decode_run_ends(opened))  # types that only Arrow has
    kind = type(source)
    if is_spark_dataframe(source):
        raise TypeError(
            "a Spark DataFrame is prepared by estimator.fit, or by "
            "farandole.spark.common.util.prepare_data"
        )
    raise TypeError(
        "a source must be a path or a list of paths, a pyarrow, pandas, polars, Delta or Iceberg "
        "table, a "
        "pyarrow or Ray dataset, "
        f"or anything with __arrow_c_stream__: {kind.__module__}.{kind.__qualname__}"
    )


def _open_rows(
    source: Any,
    given: str | None,
    types: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> RowSource | None:
    table = open_if_table(source)
    if table is not None:
        return table_source(table)
    found = open_files(source, given, types, options)
    if found is not None:
        return _fragments_source(*found)
    return _dataset_source(source) if is_arrow_dataset(source) else frame_source(source)


def open_files(
    source: Any,
    given: str | None,
    types: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
) -> tuple[Any, str, bool] | None:
    """Returns the pyarrow dataset behind a path or a list of paths; `None` for other values.

    Args:
        source: Perhaps a path.
        given: The format, or `None` to take it from the file names.
        types: Types by column.
        options: Options of the format.

    Returns:
        The dataset, a text that identifies its files and their versions, and whether the files
        contain a schema.
    """
    given_paths = list(source) if isinstance(source, list | tuple) else [source]
    if not given_paths or not all(isinstance(one, str | os.PathLike) for one in given_paths):
        return None
    paths = [os.fspath(one) for one in given_paths]
    locations = [find_files(path) for path in paths]
    everything = [file for location in locations for file in location.files]
    kind, endings = given, file_extensions(everything)
    if kind is None:
        kinds = {_FORMAT_BY_SUFFIX.get(suffix) for suffix in endings}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None:
            shown = ", ".join(sorted(f".{suffix}" for suffix in endings))
            raise ValueError(f"the format is unknown for names that end in {shown}: pass format=")
    if kind not in _FORMAT_BY_SUFFIX.values():
        raise ValueError(
            f"format must be one of {', '.join(sorted(set(_FORMAT_BY_SUFFIX.values())))}: {kind}"
        )
    tabs = {"delimiter": "\t"} if endings == {"tsv"} else {}
    reading = _file_format(kind, types or {}, {**tabs, **(options or {})})
    # pyarrow takes a text without a line for a mistake; here it is a file without rows.
    files = [file for file in everything if file.size > 0 or kind in _SELF_DESCRIBING_FORMATS]
    if not files:
        raise ValueError(f"all files are empty: {', '.join(paths)}")
    base = common_directory(location.base for location in locations)
    chosen = sorted({file.path for file in files})
    dataset = _open_dataset_files(chosen, base, kind, reading, types or {})
    version_parts = [
        kind,
        repr(sorted((types or {}).items())),
        repr(sorted((options or {}).items())),
    ]
    version_parts += sorted(file.file_version_text for file in everything)
    print_ = "files " + hashlib.sha256("\n".join(version_parts).encode()).hexdigest()
    return dataset, print_, kind in _SELF_DESCRIBING_FORMATS


def _open_dataset_files(
    paths: list[str], base: str, kind: str, reading: Any, types: Mapping[str, Any]
) -> Any:
    given = types if kind in _SELF_DESCRIBING_FORMATS else {}
    try:
        opened = partitioned_dataset(
            paths, base, reading, arrow_filesystem(paths[0]), _arrow_types(given)
        )
    except (pa.ArrowException, OSError) as error:
        raise _source_read_error(paths[0], error) from error
    inside = sorted(set(given) - set(partition_column_names(opened)))
    if inside:
        raise ValueError(
            f"files of {kind} contain their types, which cannot be set: {', '.join(inside)}; "
            "types= is for columns of names of directories"
        )
    return opened


def _arrow_types(types: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, given_type in types.items():
        try:
            found[name] = (
                pa.type_for_alias(given_type) if isinstance(given_type, str) else given_type
            )
        except ValueError as error:
            raise ValueError(
                f"the type of column {name!r} is no type of Arrow: {given_type!r}"
            ) from error
    return found


_CSV_READ_OPTIONS = (
    "column_names",
    "autogenerate_column_names",
    "skip_rows",
    "skip_rows_after_names",
    "encoding",
)
_CSV_PARSE_OPTIONS = (
    "delimiter",
    "quote_char",
    "double_quote",
    "escape_char",
    "newlines_in_values",
    "ignore_empty_lines",
)
_CSV_CONVERT_OPTIONS = (
    "null_values",
    "true_values",
    "false_values",
    "decimal_point",
    "strings_can_be_null",
    "quoted_strings_can_be_null",
    "timestamp_parsers",
)


def _file_format(kind: str, types: Mapping[str, Any], options: dict[str, Any]) -> Any:
    import pyarrow.csv as csv  # noqa: PLC0415, PLR0402 - as above
    import pyarrow.json as json  # noqa: PLC0415, PLR0402 - as above

    known = {
        "csv": (*_CSV_READ_OPTIONS, *_CSV_PARSE_OPTIONS, *_CSV_CONVERT_OPTIONS),
        "json": ("newlines_in_values",),
    }.get(kind, ())
    strange = sorted(set(options) - set(known))
    if strange:
        raise ValueError(
            f"unknown option of {kind} (known: {', '.join(known) or 'none'}): {', '.join(strange)}"
        )
    kinds = _arrow_types(types)

    def select_options(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: options[name] for name in names if name in options}

    if kind == "csv":
        return ds.CsvFileFormat(
            parse_options=csv.ParseOptions(**select_options(_CSV_PARSE_OPTIONS)),
            read_options=csv.ReadOptions(
                block_size=_TEXT_BLOCK_BYTES, **select_options(_CSV_READ_OPTIONS)
            ),
            convert_options=csv.ConvertOptions(
                column_types=kinds, **select_options(_CSV_CONVERT_OPTIONS)
            ),
        )
    if kind == "json":
        explicit = pa.schema(list(kinds.items())) if kinds else None
        parsing = json.ParseOptions(
            explicit_schema=explicit, **select_options(("newlines_in_values",))
        )
        return ds.JsonFileFormat(
            parse_options=parsing, read_options=json.ReadOptions(block_size=_TEXT_BLOCK_BYTES)
        )
    if kind == "parquet":
        return ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    return ds.IpcFileFormat()


def _dataset_source(dataset: Any) -> RowSource:
    """Returns a dataset of pyarrow: by its files, unless it leaves some rows out."""
    filesystem = getattr(dataset, "filesystem", None)
    if filesystem is None or getattr(dataset, "_scan_options", None):
        chosen = read_int96_as_microseconds(dataset)

        def list_units(columns: list[str]) -> list[SourceUnit]:
            check_int96_files(chosen, columns)
            refuse_ambiguous_files(chosen, columns)
            options: dict[str, Any] = _read_ahead_options()
            read = partial(chosen.to_batches, columns=_column_expressions(columns), **options)
            return [SourceUnit("the dataset", read)]

        return RowSource(chosen.schema, None, list_units)
    infos = filesystem.get_file_info(dataset.files)
    versions = sorted(f"{info.path} {info.size} {info.mtime_ns}" for info in infos)
    version_text = "\n".join(
        [filesystem.type_name, str(dataset.format), str(dataset.schema), *versions]
    )
    return _fragments_source(
        dataset,
        "files " + hashlib.sha256(version_text.encode()).hexdigest(),
        typed=False,
        declared=True,
    )


def table_source(table: TableSnapshot) -> RowSource:
    """Returns the rows of a Delta or Iceberg table.

    Args:
        table: At one version.
    """
    reading = _file_format("parquet", {}, {})

    def list_units(columns: list[str]) -> list[SourceUnit]:
        fragments = [
            reading.make_fragment(file.path, arrow_filesystem(file.path)) for file in table.files
        ]
        with ThreadPoolExecutor(8) as pool:
            schemas = list(pool.map(_fragment_schema, fragments))
        units: list[SourceUnit] = []
        for file, fragment, schema in zip(table.files, fragments, schemas, strict=True):
            chosen = FileBatchConversion(table, file, schema, columns)
            stored, names = chosen.stored_schema, chosen.stored_names
            units += _fragment_units(fragment, stored, names, chosen.convert_batch)
        return units

    return RowSource(table.schema, table.fingerprint, list_units)


def table_as_plain_dataset(table: TableSnapshot) -> Any:
    """Returns a table as a pyarrow dataset, if its files alone tell its rows; else `None`.

    Args:
        table: At one version.
    """
    if not table.files_match_table:
        return None
    reading = _file_format("parquet", {}, {})
    fragments = []
    for file in table.files:
        guarantee = ds.scalar(True)
        for name, value in file.defaults.items():
            known = ds.field(name)
            guarantee &= known == value if value.is_valid else known.is_null()
        fragments.append(reading.make_fragment(file.path, arrow_filesystem(file.path), guarantee))
    filesystem = arrow_filesystem(table.files[0].path)
    return ds.FileSystemDataset(fragments, table.schema, reading, filesystem)


def _fragments_source(
    dataset: Any, fingerprint: str, typed: bool, *, declared: bool = False
) -> RowSource:
    """Returns the rows of files; with `declared`, a column of the schema that a file lacks is null
    there.
    """
    fragments = [fragment_with_int96_unit(fragment, "us") for fragment in dataset.get_fragments()]

    def list_units(columns: list[str]) -> list[SourceUnit]:
        whole = _common_schema(fragments, dataset.schema, columns, typed=typed, declared=declared)
        return [
            unit for fragment in fragments for unit in _fragment_units(fragment, whole, columns)
        ]

    return RowSource(dataset.schema, fingerprint, list_units)


def _common_schema(
    fragments: list[Any], known: pa.Schema, columns: list[str], *, typed: bool, declared: bool
) -> pa.Schema:
    """Returns the types of columns in all files; if the files have no schema, types that can hold
    the guessed types of all files.
    """
    with ThreadPoolExecutor(8) as pool:
        schemas = list(pool.map(_fragment_schema, fragments))
    files = list(zip(fragments, schemas, strict=True))
    partitions = [fragment_partition_values(fragment) for fragment in fragments]
    fields = {}
    for name in columns:
        if any(name in values for values in partitions):
            _refuse_partly_partitioned_column(name, files, partitions)
            fields[name] = known.field(name)
        elif declared and name in known.names:
            having = [file for file in files if name in file[1].names]
            declared_field = known.field(name)
            fields[name] = _common_field(name, having, typed=typed) if having else declared_field
        else:
            fields[name] = _common_field(name, files, typed=typed)
    return pa.schema([field.with_nullable(True) for field in fields.values()])


def _refuse_partly_partitioned_column(
    name: str, files: list[tuple[Any, pa.Schema]], partitions: list[dict[str, Any]]
) -> None:
    for (fragment, schema), values in zip(files, partitions, strict=True):
        if name not in values and name in schema.names:
            raise ValueError(
                f"column {name!r} is in {_fragment_path(fragment)}, and in the names of the "
                "directories of other files: read them one by one, or put all files into such "
                "directories"
            )


def _common_field(name: str, files: list[tuple[Any, pa.Schema]], *, typed: bool) -> pa.Field:
    """Returns the type of a column in all files."""
    inside = [(fragment, schema) for fragment, schema in files if name in schema.names]
    if not inside:
        raise ValueError(f"no column {name!r} in {_fragment_path(files[0][0])}")
    first, field = inside[0][0], inside[0][1].field(name)
    for fragment, schema in files:
        if name not in schema.names:
            raise ValueError(
                f"no column {name!r} in {_fragment_path(fragment)}, it is in "
                f"{_fragment_path(first)}"
            )
        other = schema.field(name)
        if other.type == field.type:
            continue
        merged = (
            _field_of_equal_values(field, other) if typed else _field_for_both_guesses(field, other)
        )
        if merged is None:
            raise ValueError(
                f"column {name!r} is {other.type} in {_fragment_path(fragment)}, in "
                f"{_fragment_path(first)} it "
                f"is {field.type}"
            )
        field = merged
    return field


def _field_of_equal_values(first: pa.Field, second: pa.Field) -> pa.Field | None:
    """Returns a type for values that differ only in Arrow's storage or time zone."""
    plain, other_plain = (
        each.type.value_type if pa.types.is_dictionary(each.type) else each.type
        for each in (first, second)
    )
    for kinds in (
        (pa.string(), pa.large_string(), pa.string_view()),
        (pa.binary(), pa.large_binary(), pa.binary_view()),
    ):
        if plain in kinds and other_plain in kinds:
            return first.with_type(kinds[1])
    is_zoned = all(pa.types.is_timestamp(kind) and kind.tz for kind in (plain, other_plain))
    if is_zoned and plain.unit == other_plain.unit:
        return first.with_type(pa.timestamp(plain.unit, "UTC"))  # zones only change how it is shown
    return first.with_type(plain) if plain == other_plain else None


def _field_for_both_guesses(first: pa.Field, second: pa.Field) -> pa.Field | None:
    """Returns a type that holds both guesses."""
    try:
        return pa.unify_schemas(
            [pa.schema([first]), pa.schema([second])], promote_options="permissive"
        ).field(0)
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def _fragment_path(fragment: Any) -> str:
    return getattr(fragment, "path", None) or "the dataset"


def _fragment_schema(fragment: Any) -> pa.Schema:
    try:
        return fragment.physical_schema
    except (pa.ArrowException, OSError) as error:
        raise _source_read_error(_fragment_path(fragment), error) from error


def _fragment_units(
    fragment: Any,
    schema: pa.Schema,
    columns: list[str],
    convert_batch: Callable[[pa.RecordBatch, int], pa.RecordBatch] | None = None,
) -> Iterator[SourceUnit]:
    """Yields the units of a file. `convert_batch` gets each batch and the position of its first
    row in the file.
    """
    name = _fragment_path(fragment)

    def make_unit(part: Any, rows: int, first: int, *, whole: bool) -> SourceUnit:
        def read_batches() -> Iterator[pa.RecordBatch]:
            batches = part.to_batches(
                schema=schema, columns=_column_expressions(columns), **_read_ahead_options(rows)
            )
            checked = check_int96_range(_translate_read_errors(name, batches), part, name, rows)
            checked = refuse_ambiguous_times(checked, part, name)
            if convert_batch is None:
                return checked
            return convert_batches(convert_batch, checked, first)

        return SourceUnit(name, read_batches, whole)

    def convert_batches(
        convert: Callable[[pa.RecordBatch, int], pa.RecordBatch],
        batches: Iterable[pa.RecordBatch],
        first: int,
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield convert(batch, first)
            first += batch.num_rows

    if not hasattr(fragment, "row_groups"):
        yield make_unit(fragment, MAX_BATCH_ROWS, 0, whole=False)
        return
    ids: list[int] = []
    rows = size = first = 0
    groups = list(fragment.row_groups)
    for group in groups:
        ids.append(group.id)
        rows, size = rows + group.num_rows, size + group.total_byte_size
        if size >= UNIT_TARGET_BYTES or group is groups[-1]:
            each = max(256, min(MAX_BATCH_ROWS, _BATCH_TARGET_BYTES * max(rows, 1) // max(size, 1)))
            yield make_unit(fragment.subset(row_group_ids=list(ids)), each, first, whole=True)
            ids, rows, size, first = [], 0, 0, first + rows


def _column_expressions(columns: Sequence[str]) -> dict[str, Any]:
    return {name: ds.field(name) for name in columns}  # as texts, names with dots would be paths


def _read_ahead_options(rows: int = MAX_BATCH_ROWS) -> dict[str, int]:
    return {"batch_size": rows, "batch_readahead": 2, "fragment_readahead": 1}


def _translate_read_errors(
    name: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        raise _source_read_error(name, error) from error


def _source_read_error(name: str, error: Exception) -> Exception:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{name} is gone: {error}")
    hint = "; types={...} says what a column is" if "conversion error" in str(error) else ""
    kind = OSError if isinstance(error, OSError) else ValueError
    return kind(f"cannot read {name}: {error}{hint}")
