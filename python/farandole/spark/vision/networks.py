# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Backbones as modules of one tensor of pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole.spark.torch.saving.frozen_weights import PartlyFrozenNetwork

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_VALUE = 255.0


class ImageNetwork(PartlyFrozenNetwork):
    """A network that takes pixels as one tensor of bytes and returns its logits.

    With adapters or a frozen backbone, the state of the module contains only the weights that are
    trained and buffers, so only these are in checkpoints.

    Args:
        network: returns logits, (rows, classes), or an object with the attribute `logits`.
        mean: a number for each channel, or one for all, that is subtracted from values of 0 to 1.
        std: the same; the result is divided by it.
        trained_head: name of the only layer of the network that is trained; `None`: all are.
        has_adapter: whether PEFT has put adapters into the network.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        network: torch.nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        trained_head: str | None = None,
        has_adapter: bool = False,
    ) -> None:
        is_frozen = has_adapter or trained_head is not None
        super().__init__(network, has_adapter=has_adapter, has_frozen_weights=is_frozen)
        self.trained_head = trained_head
        for name, values in (("mean", mean), ("std", std)):
            buffer = torch.tensor(list(values), dtype=torch.float32).reshape(-1, 1, 1)
            self.register_buffer(name, buffer, persistent=False)
        if trained_head is not None:
            network.requires_grad_(False)
            network.get_submodule(trained_head).requires_grad_(True)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (rows, classes).

        Args:
            pixels: (rows, channels, height, width), uint8.
        """
        found = self.network((pixels / _MAX_VALUE - self.mean) / self.std)
        return getattr(found, "logits", found)

    def train(self, mode: bool = True) -> ImageNetwork:
        """Sets the mode of the layers. A frozen backbone stays in the mode of predictions, so that
        its batch norms keep their statistics.

        Args:
            mode: whether the network is trained.
        """
        super().train(mode)
        if mode and self.trained_head is not None:
            self.network.train(False)
            self.network.get_submodule(self.trained_head).train()
        return self


def find_head_layer(
    network: torch.nn.Module, classes: int | None = None
) -> tuple[str, torch.nn.Linear | torch.nn.Conv2d] | None:
    """Returns the name of the last layer that may return logits, and the layer; `None` if there is
    none.

    Args:
        network: the network.
        classes: number of its classes, if it is known.
    """
    found = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
        and (classes is None or layer.weight.shape[0] == classes)
    ]
    return found[-1] if found else None


def count_channels(network: torch.nn.Module) -> int:
    """Returns the number of channels that a network takes: of its first convolution, else three.

    Args:
        network: the network.
    """
    layers = (one for one in network.modules() if isinstance(one, torch.nn.Conv2d))
    first = next(layers, None)
    return 3 if first is None else first.in_channels
