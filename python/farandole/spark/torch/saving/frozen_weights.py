# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A module around a network with frozen weights. They are not in the state of the module, and so
not in checkpoints of a run.
"""

from __future__ import annotations

from typing import Any

import torch


class PartlyFrozenNetwork(torch.nn.Module):
    """A module around a network, some of whose weights may be frozen: then its state has only the
    weights that are trained, and buffers.

    Args:
        network: the network.
        has_adapter: whether the network has adapters of PEFT.
        has_frozen_weights: whether parameters without gradient stay out of the state.
    """

    def __init__(
        self, network: torch.nn.Module, *, has_adapter: bool, has_frozen_weights: bool
    ) -> None:
        super().__init__()
        self.network = network
        self.has_adapter = has_adapter
        self.has_frozen_weights = has_frozen_weights
        # Hooks get the prefix of a module that wraps this one.
        self.register_state_dict_post_hook(_remove_frozen_weights)
        self.register_load_state_dict_pre_hook(_add_frozen_weights)

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights that the training leaves as they are, by name."""
        if not self.has_frozen_weights:
            return {}
        parameters = self.named_parameters(remove_duplicate=False)
        return {name: one.detach() for name, one in parameters if not one.requires_grad}

    def merge_adapter(self) -> None:
        """Adds the adapters to the weights that they adapt, and removes them."""
        if self.has_adapter:
            self.network: Any = self.network.merge_and_unload()  # pyright: ignore[reportCallIssue]
            self.has_adapter = self.has_frozen_weights = False


def _remove_frozen_weights(
    network: PartlyFrozenNetwork, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Takes the frozen weights out of a state: a hook of `state_dict`."""
    for name in network.frozen_weights():
        del state[prefix + name]


def _add_frozen_weights(
    network: PartlyFrozenNetwork, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Adds the frozen weights to a state, so that they stay: a hook of `load_state_dict`."""
    for name, value in network.frozen_weights().items():
        state.setdefault(prefix + name, value)
