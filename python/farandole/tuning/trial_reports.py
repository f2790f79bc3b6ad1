# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports of a trial's ranks to the search."""

from __future__ import annotations

from typing import Any, Final

REPORT_KIND: Final = "tuning"


def report(step: int, **metrics: float) -> bool:
    """Reports the progress of the trial to the search. Only rank 0's report counts, so every rank
    may call it.

    A trial that the search gives up ends on all of its ranks: nothing comes back from here.

    Args:
        step: Number of the step or epoch, from 0.
        **metrics: Numbers by name, such as `loss=0.3`.

    Returns:
        Whether there is a listener.

    Raises:
        TypeError: A metric is no number.
    """
    from farandole.spark import task  # noqa: PLC0415 - only workers need it

    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"a metric is a number: {name}={value!r}") from None
    return task.report({"kind": REPORT_KIND, "step": int(step), "metrics": numbers})


def parse_search_report(rank: int, record: dict[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Returns the step and metrics of a record that a search uses: a report, or an epoch of an
    estimator.

    Args:
        rank: The sender's rank.
        record: The argument of `farandole.spark.task.report`.

    Returns:
        The step and metrics; `None` for other records and for ranks other than 0.
    """
    if rank != 0:
        return None
    if record.get("kind") == REPORT_KIND:
        return record["step"], record["metrics"]
    if record.get("kind") == "epoch" and "entry" in record:
        from farandole.runner.show.history import flatten_history_entry  # noqa: PLC0415 - a search without estimators needs none

        row = flatten_history_entry(record["entry"])
        numbers = {
            name: float(value) for name, value in row.items() if isinstance(value, int | float)
        }
        return int(record["entry"]["epoch"]), numbers
    return None
