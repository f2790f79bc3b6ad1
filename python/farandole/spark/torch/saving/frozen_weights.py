# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Hooks that keep frozen weights out of the state of a module, and so out of checkpoints of a run.

The module has a method `frozen_weights`, which returns them by name. It registers the hooks on
itself: hooks get the prefix of a module that wraps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class PartlyFrozenModule(Protocol):
    """A module with weights that no training changes."""

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights that the training leaves as they are, by name."""
        ...


def remove_frozen_weights(
    network: PartlyFrozenModule, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Takes the frozen weights out of a state: a hook of `state_dict`.

    Args:
        network: the module.
        state: the state.
        prefix: prefix of the module's names.
    """
    for name in network.frozen_weights():
        del state[prefix + name]


def add_frozen_weights(
    network: PartlyFrozenModule, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Adds the frozen weights to a state, so that they stay: a hook of `load_state_dict`.

    Args:
        network: the module.
        state: the state.
        prefix: prefix of the module's names.
    """
    for name, value in network.frozen_weights().items():
        state.setdefault(prefix + name, value)
