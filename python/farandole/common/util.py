# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What the frameworks' modules decide alike."""

from __future__ import annotations

import warnings

Average = 0
"""Sum divided by the number of ranks; integers divide as integers, truncating toward zero."""
Sum = 1
"""Sum."""
Adasum = 2
"""Adaptive summation; not offered in this version."""
Min = 3
"""Smallest."""
Max = 4
"""Largest."""
Product = 5
"""Product."""

OPERATIONS = {Average: "Average", Sum: "Sum", Min: "Min", Max: "Max", Product: "Product"}
"""Names of the reductions on offer."""


def choose_op(op: int | None, average: bool | None) -> int:
    """The reduction that `op` and the deprecated `average` ask for together.

    Raises:
        ValueError: When both are given, or `op` is not on offer.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give either op or the deprecated average, not both")
        warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in OPERATIONS:
        offered = ", ".join(OPERATIONS.values())
        raise ValueError(f"op must be one of {offered}; Adasum is not offered in this version: {op!r}")
    return op
