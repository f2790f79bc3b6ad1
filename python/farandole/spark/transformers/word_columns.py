# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Columns of lists of words and of their labels, on the driver: checks, classes, and JSON for the
store.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, IntegralType, StringType

from farandole.common.counted_noun import format_counted_noun
from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.data.inputs.frames import in_memory_table, is_arrow_dataset
from farandole.data.lazy_pyarrow import is_list_type, pa
from farandole.spark.transformers.word_tokenization import IGNORED_LABEL

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_CLASSES = 10_000
"""Largest number of classes that are looked for in the rows."""


class PackedWords(NamedTuple):
    """Rows for a fit.

    Attributes:
        rows: the rows, with JSON in both columns.
        classes: names of the classes, in the order of their numbers.
    """

    rows: Any
    classes: tuple[str, ...]


def pack_words(
    rows: Any, text_col: str, label_col: str, classes: tuple[Any, ...] | None
) -> PackedWords:
    """Returns rows with JSON in place of lists, and the classes of the labels.

    Args:
        rows: a DataFrame, or a pyarrow, pandas or polars table.
        text_col: column of lists of words.
        label_col: column of lists of labels.
        classes: the classes, if the user named them; else they are the sorted labels.

    Raises:
        ValueError: a column is missing or has another type, rows have not one label per word, or
            there are fewer than two classes.
    """
    pack = _pack_dataframe if hasattr(rows, "mapInArrow") else _pack_table
    packed, found = pack(rows, text_col, label_col, learns=classes is None)
    values = sorted(found - {None, IGNORED_LABEL}) if classes is None else classes
    names = tuple(str(one) for one in values)
    if not 1 < len(names) <= MAX_CLASSES:
        raise ValueError(
            f"label column {label_col!r} has {format_counted_noun(len(names), 'class')}"
            f"{', ' + names[0] if len(names) == 1 else ''}: a classifier takes 2 to {MAX_CLASSES:,}"
        )
    return PackedWords(packed, names)


def check_word_type(kind: Any, column: str) -> None:
    """Refuses a column of Spark that holds no lists of words.

    Args:
        kind: type of the column.
        column: name of the column.

    Raises:
        ValueError: it holds something else.
    """
    if not (isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType)):
        raise ValueError(
            f"text column {column!r} has type {kind.simpleString()}: lists of words are needed, "
            "array<string>"
        )


def _pack_dataframe(
    rows: DataFrame, text_col: str, label_col: str, *, learns: bool
) -> tuple[DataFrame, set[Any]]:
    check_columns_present(ColumnRoles((text_col,), (label_col,)), rows.columns, "DataFrame")
    check_word_type(rows.schema[text_col].dataType, text_col)
    kind = rows.schema[label_col].dataType
    element = getattr(kind, "elementType", None)
    if not isinstance(element, StringType | IntegralType):
        _refuse_labels(label_col, kind.simpleString())
    lists, labels = _column(text_col), _column(label_col)
    found: set[Any] = set()
    if learns:
        distinct = rows.select(sf.explode(sf.array_distinct(labels)).alias("label")).distinct()
        found = {row.label for row in distinct.limit(MAX_CLASSES + 2).collect()}
    packed = rows.withColumn(text_col, sf.to_json(lists)).withColumn(label_col, sf.to_json(labels))
    return packed, found


def _pack_table(
    rows: Any, text_col: str, label_col: str, *, learns: bool
) -> tuple[pa.Table, set[Any]]:
    table = rows.to_table() if is_arrow_dataset(rows) else in_memory_table(rows)
    if table is None:
        raise TypeError(
            "fit takes a Spark DataFrame, or a pyarrow, pandas or polars table, "
            f"this is a {type(rows).__module__}.{type(rows).__qualname__}"
        )
    check_columns_present(ColumnRoles((text_col,), (label_col,)), table.column_names, "table")
    kinds = [table.schema.field(name).type for name in (text_col, label_col)]
    text_element, label_element = (
        kind.value_type if is_list_type(kind) else pa.null() for kind in kinds
    )
    if not _is_text(text_element):
        raise ValueError(f"text column {text_col!r} has type {kinds[0]}: lists of words are needed")
    if not (_is_text(label_element) or pa.types.is_integer(label_element)):
        _refuse_labels(label_col, str(kinds[1]))
    found: set[Any] = set()
    for name in (text_col, label_col):
        values = table.column(name).to_pylist()
        if learns and name == label_col:
            found = {label for row in values for label in row or ()}
        texts = [None if row is None else json.dumps(row) for row in values]
        table = table.set_column(
            table.column_names.index(name), name, pa.array(texts, pa.large_string())
        )
    return table, found


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _refuse_labels(column: str, kind: str) -> None:
    raise ValueError(
        f"label column {column!r} has type {kind}: lists of words or integers are needed, one for "
        "each word"
    )


def _column(name: str) -> Column:
    return sf.col(f"`{name.replace('`', '``')}`")
