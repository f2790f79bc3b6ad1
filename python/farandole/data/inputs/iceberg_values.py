# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns, partition values and file formats in the metadata of Iceberg tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.inputs.table_snapshot import FIELD_ID_KEY, TableColumn
from farandole.data.lazy_pyarrow import pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def schema_columns(table: Any, schema: Any) -> Iterator[TableColumn]:
    """Yields the columns of a schema of a table.

    Args:
        table: Table of pyiceberg.
        schema: One of its schemas.
    """
    from pyiceberg.io.pyarrow import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        schema_to_pyarrow,
    )

    mapping = table.name_mapping()
    names = {one.field_id: tuple(one.names) for one in mapping.root} if mapping else {}
    for field in schema_to_pyarrow(schema, include_field_ids=True):
        yield TableColumn(field, names.get(int(field.metadata[FIELD_ID_KEY]), ()))


def identity_partition_values(
    table: Any, file: Any, columns: Iterable[TableColumn]
) -> dict[str, Any]:
    """Returns the values of the columns whose values partition a file as they are, by name.

    Args:
        table: Table of pyiceberg.
        file: A data file.
        columns: Columns of the table.
    """
    from pyiceberg.transforms import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        IdentityTransform,
    )

    known, values = {column.field_id: column for column in columns}, {}
    for index, field in enumerate(table.specs()[file.spec_id].fields):
        column = known.get(field.source_id)
        if isinstance(field.transform, IdentityTransform) and column is not None:
            kind = column.arrow_field.type
            values[column.name] = scalar_of_column_type(file.partition[index], kind)
    return values


def scalar_of_column_type(value: Any, kind: pa.DataType) -> Any:
    """Returns a value of Iceberg's metadata in the type of its column.

    Args:
        value: As pyiceberg has it: dates are days, and times are microseconds.
        kind: Type of the column.
    """
    if pa.types.is_temporal(kind) and isinstance(value, int):
        stored = pa.int32() if kind.bit_width == pa.int32().bit_width else pa.int64()
        return pa.scalar(value, stored).cast(kind)
    return pa.scalar(value, kind)


def require_parquet_format(file: Any, name: str) -> None:
    """Refuses a data file or delete file of another format.

    Args:
        file: File of a manifest.
        name: Name of the table, for messages.

    Raises:
        ValueError: Another format than Parquet.
    """
    kind = str(file.file_format).rpartition(".")[2].upper()
    if kind != "PARQUET":
        raise ValueError(
            f"{name} has files that are not Parquet, read it with Spark and fit on the DataFrame: "
            f"{file.file_path} is {kind}"
        )
