# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit that deletes old prepared data of its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farandole.stores.store import AbstractFilesystemStore


def delete_stale_prepared_data(
    store: AbstractFilesystemStore,
    older_than: float | None,
    max_size: int | None,
    tell: Callable[[str], None],
) -> None:
    """Deletes prepared data that is old, or too much, and that no process uses; the fit continues
    if it cannot.

    Args:
        store: store of the fit, whose own data is in use.
        older_than: age in seconds; `None` deletes nothing by age.
        max_size: bytes of prepared data that may stay; `None` deletes nothing by size.
        tell: receives the deleted directories.
    """
    if older_than is None and max_size is None:
        return
    try:
        gone = store.gc(older_than, max_size=max_size)
    except OSError as error:
        tell(f"old prepared data cannot be deleted: {error}")
        return
    if gone:
        condition = "old" if max_size is None else "old or too much"
        tell(f"deleted prepared data that was {condition} and not in use: {', '.join(gone)}")
