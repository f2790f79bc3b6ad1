# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns whose values are in the names of directories, or in the log of a table.

One rule gives their types in all readers, see `farandole._native.reader.partition_dtype`. If a
column is in the names and in the files, the names count, as in Spark and DuckDB.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from farandole._native import reader as native
from farandole.data.inputs.number_conversion import dates_and_decimals_to_numbers
from farandole.data.lazy_pyarrow import ds, is_text_type, pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ARROW_TYPES = {"int64": "int64", "float64": "float64", "utf8": "string"}
_FLOAT_DTYPES = {"halffloat": "float32", "float": "float32", "double": "float64"}


def common_directory(bases: Iterable[str]) -> str:
    """Returns the deepest directory that contains all others.

    Args:
        bases: Paths or URLs of directories.
    """
    parts = zip(*(base.rstrip("/").split("/") for base in bases), strict=False)
    same = itertools.takewhile(lambda names: len(set(names)) == 1, parts)
    return "/".join(names[0] for names in same)


def partitioned_dataset(
    paths: Sequence[str],
    base: str,
    file_format: Any,
    filesystem: Any,
    types: Mapping[str, pa.DataType],
) -> Any:
    """Returns a pyarrow dataset of files, with the columns that the names of directories form.

    Args:
        paths: Paths of the files.
        base: Directory that contains all files. Its own name, and the names above, mean nothing.
        file_format: File format of pyarrow.
        filesystem: File system of pyarrow, for all files.
        types: Types of some columns of directories.

    Raises:
        ValueError: A value of a directory is not of the column's type; names column and file.
    """
    prefix = len(base.rstrip("/")) + 1
    values = [native.partition_values(path[prefix:]) for path in paths]
    names = sorted({name for one in values for name in one})
    kinds = {}
    for name in names:
        known = [text for one in values if (text := one.get(name)) is not None]
        rule = pa.type_for_alias(_ARROW_TYPES[native.partition_dtype(known)])
        kinds[name] = types.get(name, rule)
    fragments = []
    for path, found in zip(paths, values, strict=True):
        guarantee = ds.scalar(True)
        for name, text in found.items():
            field = ds.field(name)
            value = _parse_partition_value(text, kinds[name], name, path)
            guarantee &= field.is_null() if value is None else field == value
        fragments.append(file_format.make_fragment(path, filesystem, guarantee))
    inside = ds.dataset(paths[:1], format=file_format, filesystem=filesystem).schema
    fields = [field for field in inside if field.name not in kinds]
    fields += [pa.field(name, kind) for name, kind in kinds.items()]
    return ds.FileSystemDataset(fragments, pa.schema(fields), file_format, filesystem)


def _parse_partition_value(text: str | None, kind: pa.DataType, name: str, path: str) -> Any:
    if text is None:
        return None
    try:
        return pa.array([text]).cast(kind)[0]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"column {name!r} is {kind}, and the directory of {path} has another value: {text!r}"
        ) from error


def fragment_partition_values(fragment: Any) -> dict[str, Any]:
    """Returns the values that all rows of a fragment have, by column.

    Args:
        fragment: Fragment of a pyarrow dataset.
    """
    return ds.get_partition_keys(fragment.partition_expression)


def partition_column_names(dataset: Any) -> list[str]:
    """Returns the columns whose values are not in the files of a pyarrow dataset.

    Args:
        dataset: Result of `partitioned_dataset`.
    """
    return sorted(
        {
            name
            for fragment in dataset.get_fragments()
            for name in fragment_partition_values(fragment)
        }
    )


def partition_text(value: Any, kind: pa.DataType, name: str) -> str | None:
    """Returns a value of a table's log as text for the native reader: the number of batches, or the
    text itself.

    Args:
        value: As pyarrow has it in Python.
        kind: Type of the column.
        name: Name of the column, for messages.
    """
    number = dates_and_decimals_to_numbers(pa.array([value], kind), name)[0].as_py()
    if number is None:
        return None
    return str(number).lower() if isinstance(number, bool) else str(number)


def partition_dtype(kind: pa.DataType) -> str:
    """Returns the dtype that a column of this type has in batches.

    Args:
        kind: Type of a column of a table.

    Raises:
        ValueError: No batch has such values.
    """
    if is_text_type(kind):
        return "utf8"
    number = dates_and_decimals_to_numbers(pa.array([], kind), "").type
    if not (
        pa.types.is_boolean(number) or pa.types.is_integer(number) or pa.types.is_floating(number)
    ):
        raise ValueError(f"no batch has values of the type {kind}")
    return _FLOAT_DTYPES.get(str(number), str(number))
