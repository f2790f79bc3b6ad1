# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A language model as a module of one tensor of tokens, which returns the loss of each token.

The texts of a batch are packed: they are put one behind the other in as few blocks as hold them,
each as long as the longest text of the batch. The positions begin again at each text, and a network
of transformers lets no token look at another text of its block. So packing changes the time of a
step, and not its result. `check_network` tries this with random tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from farandole.spark.transformers.causal_tokenization import FIRST_PROMPT_NUMBER
from farandole.spark.transformers.networks import TextNetwork
from farandole.spark.transformers.tokenization import PADDING_TOKEN

_IGNORED_LABEL = -100
_TRIAL_TOKENS = 12
_MAX_DIFFERENCE = 1e-3
"""Largest difference of two losses of a token that counts as rounding."""
_MAX_GRADIENT_SHARE = 1e-6
"""Largest gradient of a masked token, as a share of the largest of all, that counts as rounding."""


class PackedTexts(NamedTuple):
    """Texts of a batch in blocks.

    Attributes:
        sources: (blocks, tokens), int64: index of each token in the flat batch, or -1.
        positions: (blocks, tokens), int64: position of each token in its text.
        places: (rows, tokens), int64: index of each token in the flat blocks, or -1.
    """

    sources: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor


class CausalNetwork(TextNetwork):
    """A network of transformers that returns the loss of each token of its texts.

    Args:
        network: a model that predicts the next token, or one of PEFT around it.
        padding_id: id of the token that stands in the padded places.
        has_adapter: whether the network has adapters of PEFT.
        packs_texts: whether texts of a batch are packed.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        padding_id: int,
        *,
        has_adapter: bool = False,
        packs_texts: bool = False,
    ) -> None:
        super().__init__(network, padding_id, has_adapter=has_adapter)
        self.packs_texts = packs_texts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each token that is learned, in nats, and 0 at all others, (rows,
        tokens), float32. The first token of a text has nothing before it, so it has no loss.

        Args:
            tokens: (rows, tokens), int64, as `CausalTokenization` makes them.
        """
        is_token = tokens != PADDING_TOKEN
        ids = torch.where(tokens < PADDING_TOKEN, FIRST_PROMPT_NUMBER - tokens, tokens)
        ids = torch.where(is_token, ids, self.padding_id)
        labels = torch.where(tokens >= 0, tokens, _IGNORED_LABEL)
        packed = pack_texts(is_token.sum(dim=1).tolist(), tokens.shape[1], tokens.device)
        if not self.packs_texts or len(packed.sources) == len(tokens):
            first = torch.arange(tokens.shape[1], device=tokens.device) == 0
            mask = (is_token | first).long()
            logits = self.network(input_ids=ids, attention_mask=mask, use_cache=False).logits
            return token_losses(logits, labels)
        sources = packed.sources.clamp(min=0)
        is_used = packed.sources >= 0
        logits = self.network(
            input_ids=torch.where(is_used, ids.flatten()[sources], self.padding_id),
            position_ids=packed.positions,
            use_cache=False,
        ).logits
        # The first token of a text would be predicted from the text before it.
        is_predicted = is_used & (packed.positions > 0)
        packed_labels = torch.where(is_predicted, labels.flatten()[sources], _IGNORED_LABEL)
        losses = token_losses(logits, packed_labels).flatten()
        return torch.where(packed.places >= 0, losses[packed.places.clamp(min=0)], 0.0)


class TokenMeanLoss(torch.nn.Module):
    """The mean of the losses that a `CausalNetwork` returns, over the tokens that are learned."""

    def forward(self, losses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean, one number; 0 if no token is learned.

        Args:
            losses: (rows, tokens), with 0 at tokens that are not learned.
            tokens: (rows, tokens), int64, as `CausalTokenization` makes them.
        """
        return losses.sum() / max(self.label_count(tokens), 1.0)

    def label_count(self, tokens: torch.Tensor) -> float:
        """Returns the number of tokens that are learned. Processes add these numbers before they
        divide, so a step does not depend on the process that has a text.

        Args:
            tokens: (rows, tokens), int64.
        """
        return float((tokens[:, 1:] >= 0).sum())


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of each token, given the tokens before it; 0 for the first token
    and ignored ones.

    Args:
        logits: (rows, tokens, vocabulary).
        labels: (rows, tokens), int64.
    """
    found = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(),
        labels[:, 1:],
        ignore_index=_IGNORED_LABEL,
        reduction="none",
    )
    return functional.pad(found, (1, 0))


def pack_texts(lengths: list[int], block: int, device: torch.device) -> PackedTexts:
    """Puts texts into blocks: the longest first, each into the first block with room.

    Args:
        lengths: number of tokens of each text.
        block: number of tokens of a block, and of a row of the batch.
        device: device of the result.
    """
    rooms: list[int] = []
    chosen: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        number = next((index for index, room in enumerate(rooms) if room >= lengths[row]), None)
        if number is None:
            number = len(rooms)
            rooms.append(block)
        chosen[row] = number, block - rooms[number]
        rooms[number] -= lengths[row]
    counts = torch.tensor(lengths)
    firsts = torch.tensor([number * block + start for number, start in chosen])
    offsets = torch.arange(block)
    is_token = offsets < counts[:, None]
    places = torch.where(is_token, firsts[:, None] + offsets, -1)
    sources = torch.full((len(rooms) * block,), -1)
    sources[places[is_token]] = torch.arange(len(lengths) * block).reshape(-1, block)[is_token]
    # The rest of a block counts from 0, as a text would.
    ends = torch.tensor([block - room for room in rooms])
    positions = (offsets - ends[:, None]).clamp(min=0).flatten()
    positions[places[is_token]] = offsets.expand(len(lengths), block)[is_token]
    shape = (len(rooms), block)
    return PackedTexts(
        sources.reshape(shape).to(device), positions.reshape(shape).to(device), places.to(device)
    )


def check_network(module: CausalNetwork, vocabulary: int, max_length: int) -> bool:
    """Tries a network with random tokens, and returns whether packing leaves its losses as they
    are.

    Args:
        module: the network.
        vocabulary: number of tokens that the network has.
        max_length: largest number of tokens of a text.

    Raises:
        ValueError: the network looks at later tokens, so it cannot learn to predict them.
    """
    half = max(min(_TRIAL_TOKENS, max_length) // 2, 2)
    draw = torch.Generator().manual_seed(0)
    device = next(module.parameters()).device
    tokens = torch.randint(0, vocabulary, (2, 2 * half), generator=draw).to(device)
    modes = [(layer, layer.training) for layer in module.modules()]
    packs_texts = module.packs_texts
    module.eval()
    try:
        module.packs_texts = False
        if max_length >= 2 * half and _look_at_others(module, tokens, (slice(None), slice(half))):
            raise ValueError(
                f"the network {type(module.network).__name__} looks at later tokens, so it cannot "
                "learn to predict them: a checkpoint of a causal language model is needed"
            )
        tokens[:, half:] = PADDING_TOKEN
        with torch.no_grad():
            plain = module(tokens)
        module.packs_texts = True
        try:
            with torch.no_grad():
                difference = float((module(tokens) - plain).abs().max())
            is_apart = not any(_look_at_others(module, tokens, (row,)) for row in (0, 1))
        except (TypeError, ValueError, RuntimeError):  # it has no argument for positions
            return False
        return is_apart and difference < _MAX_DIFFERENCE
    finally:
        module.packs_texts = packs_texts
        for layer, is_training in modes:
            layer.training = is_training


def _look_at_others(module: CausalNetwork, tokens: torch.Tensor, chosen: tuple[Any, ...]) -> bool:
    """Returns whether the losses of the first or the second half of a row depend on tokens of the
    other half: a token that is masked has a gradient of exactly 0.

    Args:
        module: the network.
        tokens: (rows, tokens).
        chosen: index of the losses. The number of a row of a packed batch stands for a half.
    """
    states: list[torch.Tensor] = []

    def record_states(_layer: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
        states.append(output.detach().requires_grad_())
        return states[-1]

    hook = module.network.get_input_embeddings().register_forward_hook(record_states)  # pyright: ignore[reportCallIssue]
    try:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(module(tokens)[chosen].sum(), states[:1])
    finally:
        hook.remove()
    sizes = gradient.abs().amax(dim=2)
    half = sizes.shape[1] // 2
    others = sizes[:, :half] if chosen == (1,) else sizes[:, half:]
    return bool(others.max() > _MAX_GRADIENT_SHARE * sizes.max())


def find_end_tokens(network: Any, end_tokens: tuple[int, ...]) -> list[int]:
    """Returns the ids of the tokens at which a generated text ends.

    Args:
        network: the network of transformers.
        end_tokens: ids of the tokens after a complete text, in training.
    """
    found = set(end_tokens[:1])
    for source in (getattr(network, "generation_config", None), network.config):
        ids = getattr(source, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return sorted(found)
