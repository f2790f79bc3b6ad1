# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Deleted rows of Iceberg tables: positions, deletion vectors, and rows by their values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.inputs.file_discovery import arrow_filesystem
from farandole.data.inputs.iceberg_values import (
    identity_partition_values,
    require_parquet_format,
    schema_columns,
)
from farandole.data.inputs.table_snapshot import (
    TableColumn,
    TableFile,
    TableSnapshot,
    full_file_path,
)
from farandole.data.lazy_pyarrow import pa, pc, pq

if TYPE_CHECKING:
    import numpy.typing as npt

_POSITION_COLUMNS = ("file_path", "pos")


@dataclass
class _EqualityDelete:
    """A file with values; rows of older files that have them are deleted."""

    sequence: int
    spec_id: int
    partition: Any
    field_ids: tuple[int, ...]
    path: str
    values: pa.Table | None = field(default=None, repr=False)


class DeleteFiles:
    """The delete files of a snapshot.

    Args:
        table: table of pyiceberg.
        name: name of the table, for messages.
    """

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name
        self._positions: dict[str, list[tuple[int, npt.NDArray[np.uint64]]]] = defaultdict(list)
        self._vectors: dict[str, list[tuple[int, npt.NDArray[np.uint64]]]] = defaultdict(list)
        self._equality: list[_EqualityDelete] = []
        self._seen_puffins: set[str] = set()

    def read_delete_file(self, entry: Any) -> None:
        """Reads a delete file.

        Args:
            entry: Entry of a manifest.

        Raises:
            ValueError: A file of a format that is not read.
        """
        from pyiceberg.manifest import DataFileContent  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        file = entry.data_file
        sequence = entry.sequence_number or 0
        if file.content == DataFileContent.EQUALITY_DELETES:
            require_parquet_format(file, self._name)
            self._equality.append(
                _EqualityDelete(
                    sequence,
                    file.spec_id,
                    file.partition,
                    tuple(file.equality_ids),
                    full_file_path("", file.file_path),
                )
            )
        elif str(file.file_format).upper().endswith("PUFFIN"):
            self._read_deletion_vectors(file.file_path, sequence)
        else:
            require_parquet_format(file, self._name)
            self._read_position_deletes(file.file_path, sequence)

    def _read_deletion_vectors(self, path: str, sequence: int) -> None:
        # A file has the vectors of several data files, and an entry for each.
        if path in self._seen_puffins:
            return
        self._seen_puffins.add(path)
        from pyiceberg.table.deletion_vector import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
            deletion_vectors_from_puffin_file,
        )
        from pyiceberg.table.puffin import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
            PuffinFile,
        )

        with self._table.io.new_input(path).open() as stream:
            puffin = PuffinFile(stream.read())
        for vector in deletion_vectors_from_puffin_file(puffin):
            positions = np.asarray(vector.to_vector().to_numpy(), np.uint64)
            self._vectors[vector.referenced_data_file].append((sequence, positions))

    def _read_position_deletes(self, path: str, sequence: int) -> None:
        rows = _read_parquet(full_file_path("", path), list(_POSITION_COLUMNS))
        paths, positions = (rows[name].combine_chunks() for name in _POSITION_COLUMNS)
        for data_file in pc.unique(paths).to_pylist():
            chosen = positions.filter(pc.equal(paths, data_file))
            found = chosen.to_numpy(zero_copy_only=False).astype(np.uint64)
            self._positions[data_file].append((sequence, found))

    def deleted_row_positions(self, entry: Any) -> npt.NDArray[np.uint64] | None:
        """Returns the ascending positions of the deleted rows of a data file; `None` if there are
        none.

        Args:
            entry: Entry of the data file, in a manifest.

        Raises:
            ValueError: A data file or delete file that cannot be read.
        """
        file, sequence = entry.data_file, entry.sequence_number or 0
        # A vector replaces all positions that were deleted before it.
        listed = self._vectors.get(file.file_path) or self._positions.get(file.file_path, [])
        found = [rows for number, rows in listed if number >= sequence]
        older = [
            deletion
            for deletion in self._equality
            if deletion.sequence > sequence and self._applies_to_partition(deletion, file)
        ]
        groups: dict[tuple[int, ...], list[_EqualityDelete]] = defaultdict(list)
        for deletion in older:
            groups[deletion.field_ids].append(deletion)
        found += [self._rows_equal_to_deleted(file, ids, ones) for ids, ones in groups.items()]
        deleted = np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
        return deleted if deleted.size else None

    def _applies_to_partition(self, deletion: _EqualityDelete, file: Any) -> bool:
        is_global = not self._table.specs()[deletion.spec_id].fields
        return is_global or (deletion.spec_id, deletion.partition) == (file.spec_id, file.partition)

    def _rows_equal_to_deleted(
        self, file: Any, field_ids: tuple[int, ...], deletes: list[_EqualityDelete]
    ) -> npt.NDArray[np.uint64]:
        """Returns the positions of rows whose columns have the values of some deleted row."""
        columns = tuple(self._find_column(number) for number in field_ids)
        for deletion in deletes:
            if deletion.values is None:
                deletion.values = self._read_columns(deletion.path, {}, columns)
        values = pa.concat_tables(
            [deletion.values for deletion in deletes if deletion.values is not None]
        )
        defaults = identity_partition_values(self._table, file, columns)
        rows = self._read_columns(full_file_path("", file.file_path), defaults, columns)
        return np.flatnonzero(mask_of_matching_rows(rows, values)).astype(np.uint64)

    def _find_column(self, number: int) -> TableColumn:
        """Returns a column of the newest schema that has it; it may have been dropped."""
        schemas = self._table.schemas()
        current = self._table.metadata.current_schema_id
        for schema_id in sorted(
            schemas, key=lambda column: (column == current, column), reverse=True
        ):
            for column in schema_columns(self._table, schemas[schema_id]):
                if column.field_id == number:
                    return column
        raise ValueError(
            f"{self._name} has rows deleted by column number {number}, which is not one of its "
            "columns or is within a struct: read it with Spark, and fit on the DataFrame"
        )

    def _read_columns(
        self, path: str, defaults: dict[str, Any], columns: tuple[TableColumn, ...]
    ) -> pa.Table:
        from farandole.data.inputs.sources import table_source  # noqa: PLC0415 - it imports this module

        # Two columns of different schemas may have one name.
        unique = tuple(
            TableColumn(column.arrow_field.with_name(str(column.field_id)), column.stored_names)
            for column in columns
        )
        named = {str(column.field_id): column.name for column in columns}
        file = TableFile(
            path, {number: defaults[name] for number, name in named.items() if name in defaults}
        )
        snapshot = TableSnapshot(self._name, "", "", unique, (file,), "")
        units = table_source(snapshot).units([column.name for column in unique])
        batches = [batch for unit in units for batch in unit.batches()]
        schema = pa.schema([column.with_nullable(True) for column in snapshot.schema])
        return pa.Table.from_batches(batches, schema)


def _read_parquet(path: str, columns: list[str]) -> pa.Table:
    # pq.read_table would make columns of names of directories.
    return pq.ParquetFile(path, filesystem=arrow_filesystem(path)).read(columns=columns)


def mask_of_matching_rows(rows: pa.Table, values: pa.Table) -> npt.NDArray[np.bool_]:
    """Returns which rows have the values of some row of other rows; nulls and NaN are equal to
    themselves.

    Args:
        rows: The rows.
        values: The other rows, of the same columns.
    """
    if not values.num_rows:
        return np.zeros(rows.num_rows, bool)
    codes = np.zeros(rows.num_rows, np.int64)
    wanted = np.zeros(values.num_rows, np.int64)
    possible = np.ones(rows.num_rows, bool)
    for name in values.schema.names:
        known = pc.unique(values[name])
        mine, theirs = (
            pc.index_in(table[name], value_set=known).combine_chunks() for table in (rows, values)
        )
        possible &= np.asarray(mine.is_valid())
        # Codes are renumbered for each column, so that their product with the next ones fits.
        merged = np.unique(wanted)
        at = np.searchsorted(merged, codes).clip(max=len(merged) - 1)
        possible &= merged[at] == codes
        codes = at * len(known) + mine.fill_null(0).to_numpy()
        wanted = np.searchsorted(merged, wanted) * len(known) + theirs.to_numpy()
    return possible & np.isin(codes, wanted)
