# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Encoded copies, in the store, of Parquet that was not prepared."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from farandole.data.columns import Roles
from farandole.data.encoding import Encoding
from farandole.data.inputs.sources import open_source
from farandole.data.learning import Wish, needed
from farandole.data.prepare import prepare, spec_of
from farandole.spark.common.data.existing import format_of, is_prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.data.existing import Existing
    from farandole.stores.store import AbstractFilesystemStore


@contextlib.contextmanager
def encoded(
    store: AbstractFilesystemStore,
    found: Prepared,
    where: Existing,
    roles: Roles,
    wish: Wish,
    *,
    allow_nan: bool = False,
) -> Iterator[Prepared]:
    """A data set whose categories are indices: itself, or a copy in the store if it was not
    prepared so.

    Args:
        store: where the copy goes; it is found again as long as the files are the same.
        found: what `find_data` found.
        where: it was found.
        roles: the columns.
        wish: what they shall become.
        allow_nan: takes NaN and infinities as values like any others.

    Yields:
        The data. A copy is not overwritten inside the context.

    Raises:
        ValueError: data that was prepared without the categories that are asked for.
    """
    before = found.encoding
    left = wish if before is None else wish.without(before)
    if not needed(left, roles.kept, found.columns):
        yield found
        return
    if is_prepared(where.train):
        raise ValueError(
            f"the data at {where.train} was prepared without the requested categories, fill "
            "values or __missing "
            "columns: pass categories and fill to prepare_data, too"
        )
    sides = Roles(roles.features, roles.labels, roles.weight)
    with contextlib.ExitStack() as held:

        def copy(paths: str | list[str], wish: Wish) -> Prepared:
            spec = spec_of(sides, 0, dict(wish.fill), allow_nan=allow_nan)
            rows = open_source(paths, format=format_of(paths))
            return held.enter_context(prepare(rows, store, sides, spec, "fit", wish))

        train = copy(where.train, wish)
        val = None
        if found.val_url is not None and where.val is not None:
            val = copy(where.val, Wish.like(train.encoding or Encoding()))
        rows = 0 if val is None else val.train_rows
        yield replace(train, val_url=None if val is None else val.train_url, val_rows=rows)
