# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Limits of a driver's waits for workers."""

from __future__ import annotations

import os
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_START_TIMEOUT = 600.0


def start_limit(start_timeout: float | None) -> float:
    """Seconds that tasks may take to start.

    Args:
        start_timeout: As asked for; `None` takes what the environment says, else 600.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or the variable is no number.
    """
    return _limit("start_timeout", start_timeout, "SPARK_START_TIMEOUT")


def elastic_limit(elastic_timeout: float | None) -> float:
    """Seconds that an elastic job may wait for workers; as `start_limit`."""
    return _limit("elastic_timeout", elastic_timeout, "ELASTIC_TIMEOUT")


def _limit(argument: str, given: float | None, knob: str) -> float:
    if given is not None:
        return positive(argument)(given)
    for name in (f"FARANDOLE_{knob}", f"HOROVOD_{knob}"):
        text = os.environ.get(name)
        if text:
            try:
                return positive(name)(float(text))
            except ValueError:
                raise ValueError(f"{name} must be a number of seconds above 0: {text}") from None
    return _START_TIMEOUT


def positive(name: str) -> Callable[[Any], float]:
    """A number above zero."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number: {value!r}")
        if not float(value) > 0:
            raise ValueError(f"{name} must be above 0: {value}")
        return float(value)

    return convert
