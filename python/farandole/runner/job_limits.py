# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a job: how long a driver waits for workers, and how many there may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole import _variables as variables
from farandole._native.settings import read_setting
from farandole.common.argument_checks import check_positive_number, make_minimum_check

if TYPE_CHECKING:
    from collections.abc import Callable


def start_timeout_seconds(start_timeout: float | None) -> float:
    """Returns the seconds that the processes of a job may take to start.

    Args:
        start_timeout: Seconds that the user gave; `None` takes `FARANDOLE_START_TIMEOUT`, else 600.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or the variable is no number.
    """
    return _timeout_seconds("start_timeout", start_timeout, variables.START_TIMEOUT)


def spark_start_timeout_seconds(start_timeout: float | None) -> float:
    """Like `start_timeout_seconds` for Spark's tasks: `FARANDOLE_SPARK_START_TIMEOUT`, else 600."""
    return _timeout_seconds("start_timeout", start_timeout, variables.SPARK_START_TIMEOUT)


def elastic_timeout_seconds(elastic_timeout: float | None) -> float:
    """Like `start_timeout_seconds`: the seconds that an elastic job may wait for workers."""
    return _timeout_seconds("elastic_timeout", elastic_timeout, variables.ELASTIC_TIMEOUT)


def _timeout_seconds(argument: str, given: float | None, variable: str) -> float:
    if given is None:
        return check_positive_number(variable, read_setting(variable))
    return check_positive_number(argument, given)


def elastic_worker_counts(
    num_proc: int | None,
    min_workers: int | None,
    max_workers: int | None,
    default: Callable[[], int],
) -> tuple[int, int, int]:
    """Returns the first, the smallest and the largest number of workers of an elastic job.

    Args:
        num_proc: First number, if given.
        min_workers: Smallest number, if given.
        max_workers: Largest number, if given.
        default: Returns the first number if neither `num_proc` nor `max_workers` is given.

    Raises:
        ValueError: The numbers contradict each other.
    """
    for name, value in (
        ("num_proc", num_proc),
        ("min_num_proc", min_workers),
        ("max_num_proc", max_workers),
    ):
        if value is not None:
            make_minimum_check(1)(name, value)
    first = (
        num_proc
        if num_proc is not None
        else max_workers
        if max_workers is not None
        else max(default(), min_workers or 1)
    )
    min_workers, max_workers = (
        first if min_workers is None else min_workers,
        first if max_workers is None else max_workers,
    )
    if not min_workers <= first <= max_workers:
        raise ValueError(
            f"min_num_proc <= num_proc <= max_num_proc must hold: {min_workers} <= {first} <= "
            f"{max_workers} does not"
        )
    return first, min_workers, max_workers
