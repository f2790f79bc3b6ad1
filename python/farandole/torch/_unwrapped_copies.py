# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Copies of wrapped optimizers, which are not wrapped."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
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
    return _optimizer_without_state, (_plain_class(optimizer, mixin),), optimizer.__getstate__()


def plain_optimizer_over(
    optimizer: torch.optim.Optimizer,
    mixin: type,
    options: dict[str, Any],
    parameters: list[torch.nn.Parameter],
) -> Any:
    """Returns an optimizer of the wrapped class with the attributes of `optimizer`, over other
    parameters and without a state.

    Args:
        optimizer: An optimizer that is or is not wrapped.
        mixin: The mixin of wrapped optimizers.
        options: Options of the only group.
        parameters: Parameters of the only group.
    """
    kind = _plain_class(optimizer, mixin)
    plain = kind.__new__(kind)
    own = {"step", "_reducer", "_inner_optimizers", "_whole_states", "_parameter_names", "_overlap"}
    plain.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in own})
    plain.__dict__.update(
        {
            "param_groups": [{**options, "params": parameters}],
            "state": defaultdict(dict),
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
    )
    return plain


def _plain_class(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    return next(kind for kind in type(optimizer).__mro__ if not issubclass(kind, mixin))


def _optimizer_without_state(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns an optimizer without a state; the caller sets the state next."""
    return kind.__new__(kind)
