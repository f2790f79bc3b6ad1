# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Decisions that the distributed tapes and optimizers of TensorFlow and Keras share: factors and
groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from farandole.common.util import Average, split_list

if TYPE_CHECKING:
    from collections.abc import Callable

Groups: TypeAlias = "int | list[list[Any]] | None"
"""Groups of gradients: all in one, a number of consecutive groups, or lists of variables' keys."""


def predivide_factors(factor: float, op: int) -> tuple[float, float]:
    """Returns the factors before and after a reduction.

    Raises:
        ValueError: When there is a factor and the reduction is no average.
    """
    if factor == 1.0:
        return 1.0, 1.0
    if op != Average:
        raise ValueError(f"gradient_predivide_factor needs op=Average: {factor}")
    return 1.0 / factor, factor


def resolve_groups_argument(groups: Any, num_groups: int) -> Any:
    """Returns `groups`, or the value of the deprecated `num_groups`."""
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`, and is deprecated",
            DeprecationWarning,
            stacklevel=3,
        )
        return num_groups if groups is None else groups
    return groups


def groups_by_variable_key(groups: Any, key_of: Callable[[Any], Any]) -> Groups:
    """Returns the groups by the keys of their variables.

    Raises:
        ValueError: The number is not positive, or a list has an object that is no variable, or a
            variable twice.
    """
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, Sequence) or any(not isinstance(group, Sequence) for group in groups):
        raise ValueError(
            f"groups must be a positive number or a list of lists of variables: {groups!r}"
        )
    if any(not hasattr(variable, "assign") for group in groups for variable in group):
        raise ValueError("groups must contain variables")
    keys = [[key_of(variable) for variable in group] for group in groups]
    flat = [key for group in keys for key in group]
    if len(set(flat)) < len(flat):
        raise ValueError("groups must contain each variable once")
    return keys


def partition_gradients(
    indices: Sequence[int], keys: Sequence[Any], groups: Groups
) -> list[list[int]]:
    """Returns the indices of gradients in groups; no group is empty."""
    if groups is None:
        parts = [list(indices)]
    elif isinstance(groups, int):
        parts = split_list(list(indices), groups)
    else:
        index_by_key = {keys[index]: index for index in indices}
        parts = [
            [index_by_key.pop(key) for key in group if key in index_by_key] for group in groups
        ]
        parts.append(sorted(index_by_key.values()))
    return [part for part in parts if part]
