# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Encoded copies, in the store, of Parquet that was not prepared."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from farandole._native import prepare as native
from farandole._native.store import Store as NativeStore
from farandole.data.columns import Roles
from farandole.data.encoding import Encoding
from farandole.data.learning import Wish, needed
from farandole.data.prepare import prepare, spec_of
from farandole.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farandole.data.prepare import PreparedData as Prepared
    from farandole.stores.store import AbstractFilesystemStore


@contextlib.contextmanager
def encoded(
    store: AbstractFilesystemStore, found: Prepared, roles: Roles, wish: Wish, *, allow_nan: bool = False
) -> Iterator[Prepared]:
    """A data set whose categories are indices: itself, or a copy in the store where nobody has prepared it so.

    Args:
        store: where the copy goes; it is found again as long as the files are the same.
        found: what `find_data` found.
        roles: the columns.
        wish: what they shall become.
        allow_nan: takes NaN and infinities as values like any others.

    Yields:
        The data; nobody writes over a copy inside the context.

    Raises:
        ValueError: data that was prepared without the categories that are asked for.
    """
    before = found.encoding
    left = wish if before is None else wish.without(before)
    if not needed(left, roles.kept, found.columns):
        yield found
        return
    url = store.get_train_data_path(found.index)
    if native.read_manifest(url) is not None:
        raise ValueError(
            f"the data at {url} was prepared without the requested categories, fill values or __missing columns: "
            "pass categories and fill to prepare_data, too"
        )
    sides = Roles(roles.features, roles.labels, roles.weight)
    with contextlib.ExitStack() as held:

        def copy(url: str, wish: Wish) -> Prepared:
            spec = spec_of(sides, 0, dict(wish.fill), allow_nan=allow_nan)
            return held.enter_context(prepare(open_source(url, format=format_of(url)), store, sides, spec, "fit", wish))

        train = copy(url, wish)
        val = None
        if found.val_url is not None:
            val = copy(store.get_val_data_path(found.index), Wish.like(train.encoding or Encoding()))
        rows = 0 if val is None else val.train_rows
        yield replace(train, val_url=None if val is None else val.train_url, val_rows=rows)


def format_of(url: str) -> str | None:
    """The format of files that nobody has prepared; `None` if the place says it itself.

    Args:
        url: of the place.
    """
    return None if NativeStore(url).exists("_delta_log") else "parquet"
