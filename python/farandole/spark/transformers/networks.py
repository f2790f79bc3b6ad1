# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Networks of transformers as modules of one tensor of tokens, and the adapters in them."""

from __future__ import annotations

import torch
from torch.nn import functional

from farandole.spark.torch.saving.frozen_weights import PartlyFrozenNetwork
from farandole.spark.transformers.tokenization import PADDING_TOKEN


class TextNetwork(PartlyFrozenNetwork):
    """A network of transformers that takes tokens as one tensor and returns its logits.

    With adapters, the state of the module contains only the weights that are trained, so only these
    are in checkpoints.

    Args:
        network: a model for sequences, or one of PEFT around it.
        padding_id: id of the token that stands in the padded places.
        has_adapter: whether the network has adapters of PEFT.
    """

    def __init__(
        self, network: torch.nn.Module, padding_id: int, *, has_adapter: bool = False
    ) -> None:
        super().__init__(network, has_adapter=has_adapter, has_frozen_weights=has_adapter)
        self.padding_id = padding_id

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (rows, classes), or (rows, 1) of a regression.

        Args:
            tokens: (rows, tokens), int64, with `PADDING_TOKEN` at the ends.
        """
        ids, mask = split_padding(tokens, self.padding_id)
        return self.network(input_ids=ids, attention_mask=mask).logits


class TokenNetwork(TextNetwork):
    """A network of transformers that returns logits for each token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits, (rows, classes, tokens), the order that a cross entropy takes.

        Args:
            tokens: as for `TextNetwork.forward`.
        """
        return super().forward(tokens).transpose(1, 2)


class TextEmbeddingNetwork(torch.nn.Module):
    """A network of transformers that returns one vector for a text.

    Args:
        network: a base model, which returns `last_hidden_state`.
        padding_id: as for `TextNetwork`.
        pooling: `"mean"` of the tokens, or the `"first"` token.
        normalize: whether vectors have the length 1.
    """

    def __init__(
        self, network: torch.nn.Module, padding_id: int, pooling: str, *, normalize: bool
    ) -> None:
        super().__init__()
        self.network = network
        self.padding_id = padding_id
        self.pooling = pooling
        self.normalize = normalize

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the vectors, (rows, width of the network).

        Args:
            tokens: as for `TextNetwork.forward`.
        """
        ids, mask = split_padding(tokens, self.padding_id)
        states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.pooling == "first":
            pooled = states[:, 0]
        else:
            shares = mask[:, :, None].to(states.dtype)
            pooled = (states * shares).sum(dim=1) / shares.sum(dim=1)
        return functional.normalize(pooled, dim=1) if self.normalize else pooled


def split_padding(tokens: torch.Tensor, padding_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and attention mask of a batch; an empty text has one padding token.

    Args:
        tokens: (rows, tokens), int64, with `PADDING_TOKEN` at the ends.
        padding_id: id of the token that stands in the padded places.
    """
    mask = tokens != PADDING_TOKEN
    first = torch.arange(tokens.shape[1], device=tokens.device) == 0
    return torch.where(mask, tokens, padding_id), (mask | first).long()
