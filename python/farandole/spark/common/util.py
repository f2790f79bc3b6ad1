# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's helpers for prepared data, for code that prepares data itself and trains with
`fit_on_parquet`.
"""

# ruff: noqa: PLC0415 - Spark is imported only by the functions that need it

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from typing import TYPE_CHECKING, Any

from farandole.common import argument_checks
from farandole.data.columns import ColumnRoles, check_columns_present
from farandole.spark.common import param_checks
from farandole.spark.common.data.schema import check_types
from farandole.spark.common.data.types import (
    data_type_to_numpy,
    data_type_to_str,
    get_output_cols,
    get_spark_df_output_schema,
    numpy_type_to_str,
    pyarrow_to_spark_data_type,
    spark_scalar_to_python_type,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from farandole.stores.store import AbstractFilesystemStore

__all__ = [
    "check_shape_compatibility",
    "check_validation",
    "clear_training_cache",
    "data_type_to_numpy",
    "data_type_to_str",
    "get_dataset_properties",
    "get_output_cols",
    "get_simple_meta_from_parquet",
    "get_spark_df_output_schema",
    "host_hash",
    "is_databricks",
    "numpy_type_to_str",
    "prepare_data",
    "pyarrow_to_spark_data_type",
    "spark_scalar_to_python_type",
    "to_list",
]

_DATASET_PROPERTIES: dict[int | None, tuple[int, int, dict[str, Any], float]] = {}


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: AbstractFilesystemStore,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    *,
    fill: Mapping[str, Any] | float | str | None = None,
    allow_nan: bool = False,
) -> Iterator[int | None]:
    """Writes columns of a DataFrame to the store, for training.

    Args:
        num_processes: training processes.
        store: store that receives the data.
        df: the rows.
        label_columns: columns the outputs are compared with.
        feature_columns: columns for the model; default: all that have no other role.
        validation: share of rows held out, or a column.
        sample_weight_col: column with each row's weight.
        compress_sparse: whether to compress vectors, which are written dense.
        partitions_per_process: most files per process.
        verbose: whether to report the preparation.
        fill: replacement of nulls and NaN, for all columns or a dict by column; without it they are
            errors.
        allow_nan: takes NaN and infinities as values like any others.

    Yields:
        The number of the data set, which is not overwritten inside the context.

    Raises:
        ValueError: a column is missing or of no use, or a number is out of range.
    """
    from farandole.spark.common.data import prepare

    argument_checks.make_minimum_check(1)("num_processes", num_processes)
    argument_checks.make_minimum_check(1)("partitions_per_process", partitions_per_process)
    check_validation(validation, df)
    taken = {*label_columns, sample_weight_col, validation}
    features = (
        [name for name in df.columns if name not in taken]
        if feature_columns is None
        else list(feature_columns)
    )
    roles = ColumnRoles(
        tuple(features),
        tuple(argument_checks.check_column_names("label_columns", label_columns)),
        sample_weight_col,
        validation,
    )
    check_columns_present(roles, df.columns, "DataFrame")
    check_types(roles, df.schema)
    with prepare.prepare_data(
        num_processes,
        store,
        df,
        roles,
        0,
        partitions_per_process,
        fill=param_checks.check_fill("fill", fill),
        allow_nan=allow_nan,
        compress_sparse=compress_sparse,
    ) as prepared:
        _DATASET_PROPERTIES[prepared.index] = _dataset_properties(store, roles, prepared.index)
        if verbose:
            print(f"train_rows={prepared.train_rows} val_rows={prepared.val_rows}")  # noqa: T201 - `verbose` requests it
        yield prepared.index


def get_dataset_properties(dataset_idx: int | None) -> tuple[int, int, dict[str, Any], float]:
    """Returns the same as `get_simple_meta_from_parquet`, for a data set that this process
    prepared.

    Args:
        dataset_idx: as `prepare_data` yielded it.
    """
    return _DATASET_PROPERTIES[dataset_idx]


def get_simple_meta_from_parquet(
    store: AbstractFilesystemStore,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, dict[str, Any], float]:
    """Returns the metadata of the data set in a store.

    Args:
        store: store of the data.
        label_columns: columns the outputs are compared with.
        feature_columns: columns for the model; default: all others.
        sample_weight_col: column with each row's weight.
        dataset_idx: its number.

    Returns:
        Training rows, validation rows, the description of the columns as of `column_metadata`, and
        bytes of a row on the average.
    """
    from farandole.data.datasets import open_dataset

    if feature_columns is None:
        present = [one.name for one in open_dataset(store.get_train_data_path(dataset_idx)).columns]
        feature_columns = [
            name for name in present if name not in {*label_columns, sample_weight_col}
        ]
    return _dataset_properties(
        store,
        ColumnRoles(tuple(feature_columns), tuple(label_columns), sample_weight_col),
        dataset_idx,
    )


def _dataset_properties(
    store: AbstractFilesystemStore, roles: ColumnRoles, idx: int | None
) -> tuple[int, int, dict[str, Any], float]:
    import numpy as np

    from farandole._native import prepare as native
    from farandole.spark.common.data.column_metadata import column_metadata
    from farandole.spark.common.data.prepare import find_existing_data

    found = find_existing_data(store, roles, idx)
    metadata = column_metadata(
        column for name, column in found.columns.items() if name in roles.stored_columns
    )
    manifest = native.read_manifest(found.train_url)
    if manifest is not None:
        size = json.loads(manifest)["bytes"] / max(found.train_rows, 1)
    else:
        size = float(
            sum(one["max_size"] * np.dtype(one["element"]).itemsize for one in metadata.values())
        )
    return found.train_rows, found.val_rows, metadata, size


def clear_training_cache() -> None:
    """Forgets which DataFrames have been prepared; their files stay until a later fit takes the
    place.
    """
    from farandole.spark.common.data import prepare

    _DATASET_PROPERTIES.clear()
    prepare.clear_training_cache()


def check_validation(validation: Any, df: DataFrame | None = None) -> None:
    """Refuses an invalid `validation`.

    Args:
        validation: a share of rows, the name of a column, or `None`.
        df: DataFrame that must have the column.

    Raises:
        ValueError: out of range, of another type, or not in the DataFrame.
    """
    if validation is None:
        return
    try:
        value = param_checks.check_validation_value("validation", validation)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if isinstance(value, str) and df is not None and value not in df.columns:
        raise ValueError(
            f"validation column {value!r} is not in the DataFrame columns: {', '.join(df.columns)}"
        )


def check_shape_compatibility(
    metadata: dict[str, Any],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Refuses columns that do not fit a model's inputs and outputs.

    Args:
        metadata: as `get_simple_meta_from_parquet` gives it.
        feature_columns: columns for the model.
        label_columns: columns the outputs are compared with.
        input_shapes: shapes of the model's inputs, -1 for rows.
        output_shapes: shapes of its outputs.
        label_shapes: shapes of the labels, instead of the outputs'.

    Raises:
        ValueError: naming the column, its size and the shape.
    """
    if input_shapes is not None:
        if len(feature_columns) != len(input_shapes):
            raise ValueError(
                f"Feature column count {len(feature_columns)} must equal model inputs count "
                f"{len(input_shapes)}"
            )
        for index, (name, shape) in enumerate(zip(feature_columns, input_shapes, strict=True)):
            size, wanted = metadata[name]["max_size"], abs(math.prod(shape))
            if size is not None and size != wanted:
                raise ValueError(
                    f"Feature column '{name}' with size {size} must equal that of the model input "
                    f"at index {index}: {wanted}"
                )
    wanted_labels = label_shapes if label_shapes is not None else output_shapes
    if wanted_labels is not None and len(label_columns) != len(wanted_labels):
        raise ValueError(
            f"Label column count {len(label_columns)} must equal model outputs count "
            f"{len(wanted_labels)}"
        )


def host_hash(salt: str | None = None) -> str:
    """Returns the identity of this process's host by which ranks are grouped into hosts: processes
    with the same hash share memory.

    Args:
        salt: Additional text that separates processes of one host; an empty one does not.

    Returns:
        The host's name and 16 hexadecimal digits over its name, its boot, its IPC namespace, YARN's
        container and the salt.
    """
    from farandole._native import registrar

    own = registrar.host_hash()
    if not salt:
        return own
    name, _, digest = own.rpartition("-")
    return f"{name}-{hashlib.sha256(f'{digest}-{salt}'.encode()).hexdigest()[:16]}"


def is_databricks() -> bool:
    """Returns whether this process runs in a runtime of Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def to_list(var: Any, length: int) -> list[Any] | None:
    """Returns a list of one thing per column.

    Args:
        var: `None`, one for all, or a list.
        length: number of elements.

    Raises:
        ValueError: a list of another length.
    """
    if var is None:
        return None
    values = list(var) if isinstance(var, list | tuple) else [var]
    if len(values) == 1:
        return values * length
    if len(values) != length:
        raise ValueError(f"a list of length {len(values)} cannot be combined with {length} columns")
    return values
