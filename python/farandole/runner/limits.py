# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a job: how long a driver waits for workers, and how many there may be."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from farandole.common.check import integer_at_least, positive_number

if TYPE_CHECKING:
    from collections.abc import Callable


_DEFAULT_TIMEOUT = 600.0
_SECONDS_OF_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def start_timeout_seconds(start_timeout: float | None) -> float:
    """Returns the seconds that the processes of a job may take to start.

    Args:
        start_timeout: Seconds that the user gave; `None` takes `FARANDOLE_START_TIMEOUT`, else 600.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or the variable is no number.
    """
    return _timeout_seconds("start_timeout", start_timeout, "START_TIMEOUT")


def spark_start_timeout_seconds(start_timeout: float | None) -> float:
    """Like `start_timeout_seconds` for Spark's tasks: `FARANDOLE_SPARK_START_TIMEOUT`, else 600."""
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
            seconds = _duration_seconds(text)
            if seconds is None:
                raise ValueError(
                    f"{name} must be a duration above 0 (seconds, or a number with ms, s, m or "
                    f"h): {text}"
                )
            return seconds
    return _DEFAULT_TIMEOUT


def _duration_seconds(text: str) -> float | None:
    # The same durations as the Rust side reads (`crates/config/src/value.rs`).
    duration = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|)\s*", text)
    seconds = float(duration[1]) * _SECONDS_OF_UNIT[duration[2]] if duration else 0.0
    return seconds if seconds > 0 else None


def elastic_worker_counts(
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
