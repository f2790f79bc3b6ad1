# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a job: how long a driver waits for workers, and how many there may be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from farandole.common.check import integer_at_least, positive_number

if TYPE_CHECKING:
    from collections.abc import Callable


_DEFAULT_TIMEOUT = 600.0


def start_timeout_seconds(start_timeout: float | None) -> float:
    """Returns the seconds that tasks may take to start.

    Args:
        start_timeout: Seconds that the user gave; `None` takes
            `FARANDOLE_SPARK_START_TIMEOUT`, else 600.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or the variable is no number.
    """
    return _timeout_seconds("start_timeout", start_timeout, "SPARK_START_TIMEOUT")


def elastic_timeout_seconds(elastic_timeout: float | None) -> float:
    """Like `start_timeout_seconds`: the seconds that an elastic job may wait for workers."""
    return _timeout_seconds("elastic_timeout", elastic_timeout, "ELASTIC_TIMEOUT")


def _timeout_seconds(argument: str, given: float | None, knob: str) -> float:
    if given is not None:
        return positive_number(argument, given)
    for name in (f"FARANDOLE_{knob}", f"HOROVOD_{knob}"):
        text = os.environ.get(name)
        if text:
            try:
                return positive_number(name, float(text))
            except ValueError:
                raise ValueError(f"{name} must be a number of seconds above 0: {text}") from None
    return _DEFAULT_TIMEOUT


def elastic_sizes(
    num_proc: int | None, least: int | None, most: int | None, default: Callable[[], int]
) -> tuple[int, int, int]:
    """Returns the first, the smallest and the largest number of workers of an elastic job.

    Args:
        num_proc: First number, if given.
        least: Smallest number, if given.
        most: Largest number, if given.
        default: Returns the first number if neither `num_proc` nor `most` is given.

    Raises:
        ValueError: The numbers contradict each other.
    """
    for name, value in (("num_proc", num_proc), ("min_num_proc", least), ("max_num_proc", most)):
        if value is not None:
            integer_at_least(1)(name, value)
    first = (
        num_proc
        if num_proc is not None
        else most
        if most is not None
        else max(default(), least or 1)
    )
    least, most = first if least is None else least, first if most is None else most
    if not least <= first <= most:
        raise ValueError(
            f"min_num_proc <= num_proc <= max_num_proc must hold: {least} <= {first} <= {most} "
            "does not"
        )
    return first, least, most
