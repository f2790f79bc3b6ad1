# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns of a Parquet file by the leaves that its footer describes, and their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole.data.lazy_pyarrow import ds, pa

if TYPE_CHECKING:
    from collections.abc import Iterator


def columns_of_leaf(path: str, schema: pa.Schema) -> list[str]:
    """Returns the columns to which a leaf may belong.

    A footer joins the names of a leaf with dots, so `a.b` is a column of that name, or a field of a
    column `a`. If a file has both, both are returned.

    Args:
        path: Path of the leaf, as the footer has it.
        schema: Schema of the file.
    """
    return [
        field.name
        for field in schema
        if path == field.name
        or (path.startswith(f"{field.name}.") and not is_flat_type(field.type))
    ]


def is_flat_type(kind: pa.DataType) -> bool:
    """Returns whether a column of this type is its own leaf."""
    return not (pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType))


def unnest_values(column: Any) -> Any:
    """Returns the values of an array of Arrow that are in lists, tensors and dictionaries.

    Args:
        column: An array. An array without lists, tensors and dictionaries, or of structs, is
            returned unchanged.
    """
    while True:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        elif isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        elif hasattr(column.type, "value_type") and not pa.types.is_map(column.type):
            column = column.flatten()
        else:
            return column


def file_fragments(dataset: Any) -> Iterator[Any]:
    """Yields the files of a dataset and of its children, with all rows: a filtered dataset does not
    tell its fragments.

    Args:
        dataset: Dataset of pyarrow.
    """
    for child in getattr(dataset, "children", ()):
        yield from file_fragments(child)
    if isinstance(dataset, ds.FileSystemDataset):
        whole: Any = dataset.replace_schema(dataset.schema)
        whole._scan_options = {}  # noqa: SLF001 - there is no public API to remove a filter
        yield from whole.get_fragments()
