# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Small checkpoints in the layout of Hugging Face, with random weights, and texts for them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL_TOKENS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GOOD_WORDS: Final = ("good", "nice", "fine", "great")
BAD_WORDS: Final = ("bad", "awful", "poor", "dull")
OTHER_WORDS: Final = ("film", "book", "song", "the", "a", "is", "was", "and")
WORDS: Final = (*SPECIAL_TOKENS, *GOOD_WORDS, *BAD_WORDS, *OTHER_WORDS)
LENGTH: Final = 16
"""Tokens that the network takes."""


def make_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words."""
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", **special}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, sep_token="[SEP]", model_max_length=LENGTH, **names
    )


def make_network(dropout: float = 0.0) -> BertForMaskedLM:
    """Returns a small network that predicts masked words."""
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def write_checkpoint(directory: Path) -> str:
    """Writes network and tokenizer, and returns the directory."""
    make_network().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def make_plain_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words that puts no token before or behind a text, as GPT-2."""
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", model_max_length=LENGTH, **special
    )


def make_causal_network(kind: str = "llama", dropout: float = 0.0) -> Any:
    """Returns a small network that predicts the next word.

    Args:
        kind: `"llama"`, or `"gpt2"`, whose head shares its weights with the embedding.
        dropout: share of the dropout.
    """
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH,
                embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout,
                bos_token_id=None, eos_token_id=3,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH, bos_token_id=2, eos_token_id=3,
        )
    )  # fmt: skip


def write_causal_checkpoint(directory: Path, kind: str = "llama", tokenizer: Any = None) -> str:
    """Writes a language model and its tokenizer, and returns the directory."""
    make_causal_network(kind).save_pretrained(directory)
    tokenizer = tokenizer or make_plain_tokenizer(eos_token="[SEP]", pad_token="[PAD]")
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_reviews(rows: int, *, longest: int = 6) -> pa.Table:
    """Returns texts with one word of praise or blame, the mood of the word, and its stars."""
    draw = np.random.default_rng(0)
    moods, texts = draw.integers(0, 2, rows), []
    for mood, count in zip(moods, itertools.cycle(range(1, longest + 1)), strict=False):
        word = str(draw.choice(GOOD_WORDS if mood else BAD_WORDS))
        texts.append(" ".join([word, *draw.choice(OTHER_WORDS, count).tolist()]))
    return pa.table(
        {
            "review": texts,
            "mood": np.where(moods, "happy", "sad").tolist(),
            "stars": (1.0 + 4.0 * moods).astype("float32"),
        }
    )
