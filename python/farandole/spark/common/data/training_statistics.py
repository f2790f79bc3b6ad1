# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The statistics of training data that a fitted model carries, to compare other rows with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from farandole.data.datasets import is_directory_path
from farandole.data.encoding import columns_of_features
from farandole.data.inputs.sources import open_source
from farandole.data.statistics import load_or_compute_statistics, read_statistics, statistics_of
from farandole.spark.common.data.existing_data import is_prepared_by_farandole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farandole.data.columns import ColumnRoles
    from farandole.data.inputs.table_snapshot import TableSnapshot
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.data.statistics import Statistics

_STATISTICS_THREADS = 2


def add_statistics_to_prepared_data(
    prepared: Prepared, rows: Any, present: Sequence[str], roles: ColumnRoles, *, wanted: bool
) -> Prepared:
    """Returns data that a fit has prepared, with the statistics of its rows if they are wanted or
    were computed before.

    Args:
        prepared: the data.
        rows: rows that were prepared: a Spark DataFrame or an opened source.
        present: columns of these rows.
        roles: roles of the columns.
        wanted: whether to compute them, in one more pass over the rows.
    """
    names = columns_of_features([*roles.features, *roles.labels], present)
    return _attach_statistics(
        prepared,
        prepared.train_url,
        roles,
        (lambda: load_or_compute_statistics(prepared.train_url, rows, names, _STATISTICS_THREADS))
        if wanted
        else None,
    )


def add_statistics_to_existing_data(
    prepared: Prepared, paths: str | list[str] | TableSnapshot, roles: ColumnRoles, *, wanted: bool
) -> Prepared:
    """Returns data that existed before a fit, with the statistics of its rows, like
    `add_statistics_to_prepared_data`.

    Args:
        prepared: the data, or its encoded copy.
        paths: paths of the data.
        roles: roles of the columns.
        wanted: whether to compute them, in one more pass over the rows.

    Raises:
        ValueError: they are wanted, and only `prepare_data` had the rows that they describe.
    """

    def compute_statistics() -> Statistics:
        if is_prepared_by_farandole(paths):
            raise ValueError(
                f"the data at {paths} was prepared without statistics: pass statistics=True to "
                "prepare_data, too"
            )
        source = open_source(paths, format="parquet")
        return statistics_of(
            source, columns_of_features([*roles.features, *roles.labels], source.schema.names)
        )

    return _attach_statistics(prepared, paths, roles, compute_statistics if wanted else None)


def _attach_statistics(
    prepared: Prepared,
    paths: str | list[str] | TableSnapshot,
    roles: ColumnRoles,
    compute: Callable[[], Statistics] | None,
) -> Prepared:
    found = read_statistics(paths) if isinstance(paths, str) and is_directory_path(paths) else None
    if found is None or not set(
        columns_of_features([*roles.features, *roles.labels], found.columns)
    ) <= set(found.columns):
        found = None if compute is None else compute()
    return prepared if found is None else replace(prepared, statistics=found)
