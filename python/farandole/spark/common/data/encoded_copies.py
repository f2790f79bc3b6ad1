# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Encoded copies, in the store, of Parquet that was not prepared."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from farandole.data.columns import ColumnRoles
from farandole.data.encoding import ColumnEncoding
from farandole.data.encoding_learning import EncodingSpec, needs_encoding
from farandole.data.inputs.sources import open_source
from farandole.data.prepare import native_writer_spec, prepare_source
from farandole.spark.common.data.existing_data import is_prepared_by_farandole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.inputs.table_snapshot import TableSnapshot
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.data.existing_data import ExistingDataPaths
    from farandole.stores.store import AbstractFilesystemStore


@contextlib.contextmanager
def hold_encoded_data(
    store: AbstractFilesystemStore,
    found: Prepared,
    where: ExistingDataPaths,
    roles: ColumnRoles,
    encoding_spec: EncodingSpec,
    *,
    allow_nan: bool = False,
) -> Iterator[Prepared]:
    """Yields a data set whose categories are indices: the given data set if it was prepared with
    them, else a copy in the store.

    Args:
        store: receives the copy; later fits reuse the copy as long as the files are the same.
        found: result of `find_existing_data`.
        where: directories of `found`.
        roles: roles of the columns.
        encoding_spec: requested encoding of the columns.
        allow_nan: whether NaN and infinities are accepted like any other value.

    Yields:
        The data. A copy is not overwritten inside the context.

    Raises:
        ValueError: the data was prepared without the requested categories.
    """
    before = found.encoding
    unmet_spec = encoding_spec if before is None else encoding_spec.unmet_encoding_spec(before)
    if not needs_encoding(unmet_spec, roles.stored_columns, found.columns):
        yield found
        return
    if is_prepared_by_farandole(where.train):
        raise ValueError(
            f"the data at {where.train} was prepared without the requested categories, fill "
            "values or __missing "
            "columns: pass categories and fill to prepare_data, too"
        )
    sides = ColumnRoles(roles.features, roles.labels, roles.weight)
    with contextlib.ExitStack() as held:

        def prepare_encoded_side(
            paths: str | list[str] | TableSnapshot, side_spec: EncodingSpec
        ) -> Prepared:
            spec = native_writer_spec(sides, 0, dict(side_spec.fill), allow_nan=allow_nan)
            rows = open_source(paths, format="parquet", types=where.types or None)
            return held.enter_context(prepare_source(rows, store, sides, spec, "fit", side_spec))

        train = prepare_encoded_side(where.train, encoding_spec)
        val = None
        if found.val_url is not None and where.val is not None:
            val = prepare_encoded_side(
                where.val, EncodingSpec.from_encoding(train.encoding or ColumnEncoding())
            )
        rows = 0 if val is None else val.train_rows
        yield replace(train, val_url=None if val is None else val.train_url, val_rows=rows)
