# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The statistics of training data that a fitted model carries, to compare other rows with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from farandole.data.datasets import is_place
from farandole.data.encoding import sources_of
from farandole.data.inputs.sources import open_source
from farandole.data.statistics import kept_statistics, statistics_at, statistics_of
from farandole.spark.common.data.existing import format_of, is_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.data.columns import Roles
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.data.statistics import Statistics

_THREADS = 2


def with_statistics(
    prepared: Prepared, rows: Any, present: Sequence[str], roles: Roles, *, wanted: bool
) -> Prepared:
    """Data that a fit has prepared, with the statistics of its rows, if they are wanted or were
    computed before.

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


def with_stored_statistics(
    prepared: Prepared, paths: str | list[str], roles: Roles, *, wanted: bool
) -> Prepared:
    """Data that existed before a fit, with the statistics of its rows, as `with_statistics`.

    Args:
        prepared: the data, or its encoded copy.
        paths: of the data.
        roles: of the columns.
        wanted: whether to compute them, in one more pass over the rows.

    Raises:
        ValueError: they are wanted, and only `prepare_data` had the rows that they describe.
    """

    def compute() -> Statistics:
        if is_prepared(paths):
            raise ValueError(
                f"the data at {paths} was prepared without statistics: pass statistics=True to "
                "prepare_data, too"
            )
        source = open_source(paths, format=format_of(paths))
        return statistics_of(
            source, sources_of([*roles.features, *roles.labels], source.schema.names)
        )

    return _added(prepared, paths, roles, compute if wanted else None)


def _added(
    prepared: Prepared,
    paths: str | list[str],
    roles: Roles,
    compute: Callable[[], Statistics] | None,
) -> Prepared:
    kept = statistics_at(paths) if isinstance(paths, str) and is_place(paths) else None
    if kept is None or not set(sources_of([*roles.features, *roles.labels], kept.columns)) <= set(
        kept.columns
    ):
        kept = None if compute is None else compute()
    return prepared if kept is None else replace(prepared, statistics=kept)
