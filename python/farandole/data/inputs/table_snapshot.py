# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A Delta or Iceberg table at one version: its columns, its files and their deleted rows.

All readers read tables by this description. A column is found in a file by its number, or by the
name that it has there. A column that a file lacks has one value in all its rows: of the partition,
the column's default, or null. Deleted rows are positions in their file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole._native.reader import Dataset
from farandole.data.inputs.directory_partitions import (
    common_directory,
    partition_dtype,
    partition_text,
)
from farandole.data.lazy_pyarrow import is_list_type, pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

FIELD_ID_KEY = b"PARQUET:field_id"
"""Metadata of a field of Arrow: the number of the column, as pyarrow reads it from a file."""
STORED_NAME_KEY = b"stored_name"
"""Metadata of a field of a table: the name of the column in files without numbers."""
_S3_SCHEME_PATTERN = re.compile("^s3[an]://")
"""Pattern of other names of the scheme s3."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table; the native reader takes it as it is.

    Attributes:
        arrow_field: name and type, in its metadata the number and the stored name, also of fields
            within it.
        stored_names: names in files whose columns have no numbers.
    """

    arrow_field: pa.Field
    stored_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name in the table."""
        return self.arrow_field.name

    @property
    def field_id(self) -> int | None:
        """Number of the column."""
        return _field_id(self.arrow_field)

    @property
    def is_list(self) -> bool:
        """Whether the values are lists."""
        return is_list_type(self.arrow_field.type)

    @property
    def dtype(self) -> str | None:
        """NumPy's name of the elements in batches, `utf8` or `binary`; `None` if no batch can
        contain them.
        """
        kind = self._element_type()
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return "binary"
        if pa.types.is_fixed_size_binary(kind):
            return "binary"
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            return None
        try:
            return partition_dtype(kind)
        except ValueError:
            return None

    @property
    def unit(self) -> str | None:
        """Unit of dates and times in batches."""
        kind = self._element_type()
        if pa.types.is_date(kind):
            return "days"
        return "microseconds" if pa.types.is_temporal(kind) else None

    @property
    def source(self) -> str:
        """Type in the table, for messages."""
        return str(self.arrow_field.type)

    def _element_type(self) -> pa.DataType:
        kind = self.arrow_field.type
        return kind.value_type if is_list_type(kind) else kind


@dataclass(frozen=True)
class TableFile:
    """A data file of a table.

    Attributes:
        path: path or URL.
        defaults: scalars of Arrow by column: the values of columns that the file lacks.
        deleted: ascending positions of deleted rows.
    """

    path: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    deleted: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class TableSnapshot:
    """A table at one version.

    Attributes:
        name: description of the table for messages: `the Delta table /data/t`.
        location: path or URL of its directory.
        version: text that identifies the version.
        columns: columns of the table.
        files: its data files, in the order of the rows.
        fingerprint: identity of its rows.
        is_widened: whether files may have columns in narrower types.
    """

    name: str
    location: str
    version: str
    columns: tuple[TableColumn, ...]
    files: tuple[TableFile, ...]
    fingerprint: str
    is_widened: bool = False

    @property
    def schema(self) -> pa.Schema:
        """Types of the columns."""
        return pa.schema([_plain_field(one.arrow_field) for one in self.columns])

    @property
    def files_match_table(self) -> bool:
        """Whether all columns have their names and types in the files, and no row is deleted."""
        return (
            not self.is_widened
            and bool(self.files)
            and all(one.field_id is None for one in self.columns)
            and all(one.stored_names == (one.name,) for one in self.columns)
            and all(file.deleted is None for file in self.files)
        )

    def open_dataset(self) -> Dataset:
        """Opens the table for the native reader.

        Raises:
            ValueError: Files in several stores, or that contradict the table; no rows.
            OSError: Files that cannot be read.
        """
        base = self.location.rstrip("/")
        if not all(file.path.startswith(f"{base}/") for file in self.files):
            base = common_directory(file.path.rpartition("/")[0] for file in self.files)
            if not base.removesuffix(":/").strip("/"):
                raise ValueError(
                    f"{self.name} has files in several stores, prepare_data reads it: "
                    f"{self.files[0].path}, {self.files[-1].path}"
                )
        kinds = {one.name: one.arrow_field.type for one in self.columns}

        def default_texts(file: TableFile) -> dict[str, str | None]:
            return {
                name: partition_text(value.as_py(), kinds[name], name)
                for name, value in file.defaults.items()
            }

        files = [
            (
                file.path[len(base) + 1 :],
                default_texts(file),
                b"" if file.deleted is None else file.deleted.astype("<u8").tobytes(),
            )
            for file in self.files
        ]
        return Dataset.open_table(base, files, self.columns)


def full_file_path(location: str, path: str) -> str:
    """Returns the path or URL of a file of a table.

    Args:
        location: Location of the table; empty for a path that does not depend on it.
        path: As the table has it: absolute, or relative to the location.
    """
    if path.startswith("file:"):
        return "/" + path.removeprefix("file:").lstrip("/")
    if "://" in path or path.startswith("/"):
        return path
    return f"{location.rstrip('/')}/{path}" if location else str(Path.cwd() / path)


def refuse_files_elsewhere(name: str, location: str, files: Iterable[TableFile]) -> None:
    """Refuses files that are not below the location of a table: credentials of a catalog hold for
    the location alone, and other files would be read with the user's own.

    Args:
        name: Description of the table, for messages.
        location: Location of the table.
        files: Files of the table.

    Raises:
        ValueError: There is such a file.
    """
    base = _S3_SCHEME_PATTERN.sub("s3://", f"{location.rstrip('/')}/")
    for file in files:
        path = _S3_SCHEME_PATTERN.sub("s3://", file.path)
        if not path.startswith(base) or ".." in path.split("/"):
            raise ValueError(f"{name} has a file that is not below its location: {file.path}")


def refuse_local_files(name: str, location: str, files: Iterable[TableFile]) -> None:
    """Refuses files of this host in a table that is elsewhere: a table must not choose them.

    Args:
        name: As for `refuse_files_elsewhere`.
        location: As for `refuse_files_elsewhere`.
        files: As for `refuse_files_elsewhere`.

    Raises:
        ValueError: There is such a file.
    """
    local = next((file for file in files if file.path.startswith("/")), None)
    if local is not None and not location.startswith("/"):
        raise ValueError(f"{name} has a file of this host, which is not read: {local.path}")


class FileBatchConversion:
    """Some columns of a table in one file, and the rows of the file that are left.

    Args:
        snapshot: the table.
        file: file of the table.
        stored: schema of the file.
        names: the wanted columns.

    Attributes:
        stored_names: columns to read from the file.

    Raises:
        ValueError: no column has this name, or the file has another type than the table.
    """

    def __init__(
        self, snapshot: TableSnapshot, file: TableFile, stored: pa.Schema, names: Sequence[str]
    ) -> None:
        columns = {column.name: column for column in snapshot.columns}
        missing = [name for name in names if name not in columns]
        if missing:
            raise ValueError(f"no column {missing[0]!r} in {snapshot.name}")
        has_ids = any(_field_id(column) is not None for column in stored)
        if not has_ids and all(
            column.field_id is not None and not column.stored_names for column in snapshot.columns
        ):
            raise ValueError(
                f"{file.path} has no numbers of columns, and its table has no names for such files "
                "(schema.name-mapping.default): its columns cannot be found"
            )
        self._file = file
        self._chosen = [columns[name] for name in names]
        self._stored = {
            column.name: _find_stored_field(column, list(stored), has_ids=has_ids)
            for column in self._chosen
        }
        found = [column for column in self._stored.values() if column is not None]
        self.stored_names = [column.name for column in found]
        self.stored_schema = pa.schema([column.with_nullable(True) for column in found])

    def convert_batch(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """Returns the rows that are left, with the columns of the table.

        Args:
            batch: Rows of the file.
            first: Position of the first row in the file.

        Raises:
            ValueError: A value that the table's type cannot hold; names column and file.
        """
        keep, rows = self._undeleted_row_indices(first, batch.num_rows), batch.num_rows
        if keep is not None:
            # A batch without columns cannot be filtered: the file has none of the columns.
            rows = keep.true_count
            batch = batch.filter(keep) if batch.num_columns else batch
        arrays, fields = [], []
        for column in self._chosen:
            stored, wanted = self._stored[column.name], _plain_field(column.arrow_field)
            if stored is None:
                value = self._file.defaults.get(column.name)
                arrays.append(
                    pa.nulls(rows, wanted.type) if value is None else pa.repeat(value, rows)
                )
            else:
                try:
                    arrays.append(
                        _convert_to_table_type(
                            batch.column(stored.name), stored, column.arrow_field
                        )
                    )
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise ValueError(
                        f"column {column.name!r} is {stored.type} in {self._file.path}, in the "
                        f"table it is {wanted.type}: {error}"
                    ) from error
            fields.append(wanted.with_nullable(True))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _undeleted_row_indices(self, first: int, rows: int) -> Any:
        if self._file.deleted is None:
            return None
        start, end = np.searchsorted(self._file.deleted, [first, first + rows])
        if start == end:
            return None
        keep = np.ones(rows, bool)
        keep[self._file.deleted[start:end].astype(np.int64) - first] = False
        return pa.array(keep)


def field_name_in_files(field: pa.Field) -> str:
    """Returns the name of a field of a table in files without numbers.

    Args:
        field: Field of a column, or of a field within one.
    """
    name = (field.metadata or {}).get(STORED_NAME_KEY)
    return field.name if name is None else name.decode()


def _field_id(field: pa.Field) -> int | None:
    number = (field.metadata or {}).get(FIELD_ID_KEY)
    return None if number is None else int(number)


def _plain_field(arrow_field: pa.Field) -> pa.Field:
    """Returns a field without metadata, also in the fields within it."""
    return pa.field(
        arrow_field.name, _type_without_metadata(arrow_field.type), arrow_field.nullable
    )


def _type_without_metadata(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(index)) for index in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    return kind


def _find_stored_field(
    column: TableColumn, stored: Sequence[pa.Field], *, has_ids: bool
) -> pa.Field | None:
    if has_ids and column.field_id is not None:
        return next((one for one in stored if _field_id(one) == column.field_id), None)
    for name in column.stored_names:
        for candidate in stored:
            if candidate.name == name:
                return candidate
    return None


def _convert_to_table_type(array: pa.Array, stored: pa.Field, wanted: pa.Field) -> pa.Array:
    """Returns an array of a file in the type of the table; fields within it are found like
    columns.
    """
    kind = wanted.type
    if pa.types.is_struct(kind) and pa.types.is_struct(stored.type):
        inside = [stored.type.field(index) for index in range(stored.type.num_fields)]
        has_ids = any(_field_id(one) is not None for one in inside)
        arrays, fields = [], []
        for index in range(kind.num_fields):
            child = kind.field(index)
            column = TableColumn(child, (field_name_in_files(child),))
            found = _find_stored_field(column, inside, has_ids=has_ids)
            arrays.append(
                pa.nulls(len(array), _type_without_metadata(child.type))
                if found is None
                else _convert_to_table_type(array.field(inside.index(found)), found, child)
            )
            fields.append(_plain_field(child).with_nullable(True))
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())
    if pa.types.is_list(kind) and pa.types.is_list(stored.type):
        values = _convert_to_table_type(array.values, stored.type.value_field, kind.value_field)
        made = pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
        return made.cast(_type_without_metadata(kind))
    return array if array.type == kind else array.cast(_type_without_metadata(kind))
