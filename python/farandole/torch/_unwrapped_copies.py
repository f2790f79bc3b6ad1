# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Copies of wrapped optimizers, which are not wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def unwrapped_copy_recipe(optimizer: torch.optim.Optimizer, mixin: type) -> tuple[Any, ...]:
    """Returns the pickle recipe of an optimizer of the wrapped class with the same parameters,
    options and state.

    The classes of wrapped optimizers are made while a program runs, so no other process could find
    them; and a copy's parameters are different ones, which are unknown to the other ranks.

    Args:
        optimizer: An optimizer whose class is a mixin and the wrapped class.
        mixin: The mixin.

    Returns:
        The result of `__reduce__`.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if not issubclass(kind, mixin))
    return _optimizer_without_state, (kind,), optimizer.__getstate__()


def _optimizer_without_state(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns an optimizer without a state; the caller sets the state next."""
    return kind.__new__(kind)
