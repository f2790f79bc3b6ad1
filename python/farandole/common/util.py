# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""What the frameworks' modules decide alike."""

from __future__ import annotations

import itertools
import warnings
from typing import TypeVar

_T = TypeVar("_T")

Average = 0
"""Sum divided by the number of ranks; integers divide as integers, truncating toward zero."""
Sum = 1
"""Sum."""
Adasum = 2
"""Adaptive summation: what ranks agree on counts once, what is orthogonal adds up."""
Min = 3
"""Smallest."""
Max = 4
"""Largest."""
Product = 5
"""Product."""

OPERATIONS = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}
"""Names of the reductions on offer."""


def choose_op(op: int | None, average: bool | None) -> int:
    """The reduction that `op` and the deprecated `average` ask for together.

    Raises:
        ValueError: When both are given, or `op` is not on offer.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give either op or the deprecated average, not both")
        told = "Parameter `average` has been replaced with `op`, and is deprecated"
        warnings.warn(told, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in OPERATIONS:
        offered = ", ".join(OPERATIONS.values())
        raise ValueError(f"op must be one of {offered}: {op!r}")
    return op


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether this many ranks are a power of two; Adasum here needs it no more."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[_T], n: int) -> list[list[_T]]:  # noqa: E741 - Horovod's argument name
    """Cuts a list into `n` consecutive parts whose lengths differ by one at most, the longer ones first."""
    each, longer = divmod(len(l), n)
    ends = [each * part + min(part, longer) for part in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Whether the framework of that name, `"torch"` or `"tensorflow"`, sees a GPU in this process.

    Raises:
        ImportError: The framework is not installed.
    """
    if "tensorflow" in ext_base_name:
        import tensorflow as tf  # noqa: PLC0415 - only who asks loads it

        return bool(tf.config.list_physical_devices("GPU"))
    import torch  # noqa: PLC0415

    return torch.cuda.is_available()
