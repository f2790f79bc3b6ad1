# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a job: how long a driver waits for workers, and how many there may be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from farandole.common.check import at_least, positive

if TYPE_CHECKING:
    from collections.abc import Callable


_START_TIMEOUT = 600.0


def start_limit(start_timeout: float | None) -> float:
    """Returns the seconds that tasks may take to start.

    Args:
        start_timeout: As asked for; `None` takes what the environment says, else 600.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or the variable is no number.
    """
    return _limit("start_timeout", start_timeout, "SPARK_START_TIMEOUT")


def elastic_limit(elastic_timeout: float | None) -> float:
    """Returns the seconds that an elastic job may wait for workers; as `start_limit`."""
    return _limit("elastic_timeout", elastic_timeout, "ELASTIC_TIMEOUT")


def _limit(argument: str, given: float | None, knob: str) -> float:
    if given is not None:
        return positive(argument, given)
    for name in (f"FARANDOLE_{knob}", f"HOROVOD_{knob}"):
        text = os.environ.get(name)
        if text:
            try:
                return positive(name, float(text))
            except ValueError:
                raise ValueError(f"{name} must be a number of seconds above 0: {text}") from None
    return _START_TIMEOUT


def elastic_sizes(
    num_proc: int | None, least: int | None, most: int | None, default: Callable[[], int]
) -> tuple[int, int, int]:
    """First, fewest and most workers of an elastic job.

    Args:
        num_proc: First, if given.
        least: Fewest, if given.
        most: Most, if given.
        default: Says how many there are at first if nothing else does.

    Raises:
        ValueError: They contradict each other.
    """
    for name, value in (("num_proc", num_proc), ("min_num_proc", least), ("max_num_proc", most)):
        if value is not None:
            at_least(1)(name, value)
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
