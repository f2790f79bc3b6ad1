# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Small helpers that scripts import from here."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from farandole.common.util import num_rank_is_power_2, resolve_op_argument, split_list

__all__ = [
    "check_num_rank_power_of_2",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Warns if `num_rank` is not a power of two, which Horovod's Adasum requires and Farandole's
    does not.

    Returns:
        Whether it is one.
    """
    if not num_rank_is_power_2(num_rank):
        warnings.warn(
            f"the number of ranks is no power of two: {num_rank}; Adasum works anyway", stacklevel=2
        )
        return False
    return True


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Returns whether TensorFlow sees a GPU in this process."""
    del ext_base_name, verbose
    return bool(tf.config.list_physical_devices("GPU"))


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Returns the reduction that results from `op` and the deprecated `average`.

    Raises:
        ValueError: When both are given.
    """
    return resolve_op_argument(op, average)


def vars_to_refs(vars: Any) -> Any:  # noqa: A002 - Horovod's argument name
    """Replaces variables by hashable references, also in nested lists and tuples."""
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(entry) for entry in vars)
    return vars.ref() if hasattr(vars, "ref") else vars


def refs_to_vars(refs: Any) -> Any:
    """Inverts `vars_to_refs`."""
    if isinstance(refs, list | tuple):
        return [refs_to_vars(entry) for entry in refs]
    return refs.deref() if hasattr(refs, "deref") else refs
