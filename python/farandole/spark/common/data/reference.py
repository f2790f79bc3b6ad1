# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The statistics of training data that a fitted model carries, to compare other rows with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from farandole._native import prepare as native
from farandole.data.encoding import sources_of
from farandole.data.sources import open_source
from farandole.data.statistics import kept_statistics, statistics_at, statistics_of
from farandole.spark.common.data.copies import format_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.data.columns import Roles
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.data.statistics import Statistics

_THREADS = 2


def with_statistics(prepared: Prepared, rows: Any, present: Sequence[str], roles: Roles, *, wanted: bool) -> Prepared:
    """Data that a fit has prepared, with the statistics of its rows, if they are wanted or were computed before.

    Args:
        prepared: the data.
        rows: that were prepared: a Spark DataFrame or an opened source.
        present: their columns.
        roles: of the columns.
        wanted: whether to compute them, in one more pass over the rows.
    """
    names = sources_of([*roles.features, *roles.labels], present)
    return _added(
        prepared,
        prepared.train_url,
        roles,
        (lambda: kept_statistics(prepared.train_url, rows, names, _THREADS)) if wanted else None,
    )


def with_stored_statistics(prepared: Prepared, url: str, roles: Roles, *, wanted: bool) -> Prepared:
    """Data that was in the store before a fit, with the statistics of its rows, as `with_statistics`.

    Args:
        prepared: the data, or its encoded copy.
        url: of the data.
        roles: of the columns.
        wanted: whether to compute them, in one more pass over the rows.

    Raises:
        ValueError: they are wanted, and only `prepare_data` had the rows that they describe.
    """

    def compute() -> Statistics:
        if native.read_manifest(url) is not None:
            raise ValueError(
                f"the data at {url} was prepared without statistics: pass statistics=True to prepare_data, too"
            )
        source = open_source(url, format=format_of(url))
        return statistics_of(source, sources_of([*roles.features, *roles.labels], source.schema.names))

    return _added(prepared, url, roles, compute if wanted else None)


def _added(prepared: Prepared, url: str, roles: Roles, compute: Callable[[], Statistics] | None) -> Prepared:
    kept = statistics_at(url)
    if kept is None or not set(sources_of([*roles.features, *roles.labels], kept.columns)) <= set(kept.columns):
        kept = None if compute is None else compute()
    return prepared if kept is None else replace(prepared, statistics=kept)
