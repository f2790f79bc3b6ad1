# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Texts, or prompts and their answers, become tokens of a language model.

One array holds the tokens of a batch and which of them are learned: a token of a prompt is stored
as a negative number. So the column of tokens is also the column of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from farandole.common.counted_noun import format_counted_noun
from farandole.spark.transformers.tokenization import TextTokenization, sum_over_processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from farandole.spark.torch.callbacks import TrainingState

FIRST_PROMPT_NUMBER = -2
"""A token of a prompt is stored as this number minus its id, so it is below `PADDING_TOKEN`."""

_PROMPT_PARTS = 4
"""A prompt has at least this part of `max_length`."""


class SpecialTokens(NamedTuple):
    """Tokens around a text.

    Attributes:
        start_tokens: ids of the tokens before a text.
        end_tokens: ids of the tokens after a complete text.
        start_id: id of the token that an empty prompt has; `None` if there is no such token.
    """

    start_tokens: tuple[int, ...]
    end_tokens: tuple[int, ...]
    start_id: int | None


def find_special_tokens(tokenizer: Any) -> SpecialTokens:
    """Returns the tokens that a tokenizer puts around a text. If it puts none behind it, the token
    for the end of a text is taken, so that a model learns to end.

    Args:
        tokenizer: a tokenizer of transformers.
    """
    encoding = tokenizer.backend_tokenizer.encode("a")
    plain = len(tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids)
    mask, ids = encoding.special_tokens_mask, encoding.ids
    before = next((number for number, is_special in enumerate(mask) if not is_special), len(ids))
    end_tokens = tuple(ids[before + plain :])
    if not end_tokens and tokenizer.eos_token_id is not None:
        end_tokens = (tokenizer.eos_token_id,)
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    start_id = next((one for one in known if one is not None), None)
    return SpecialTokens(tuple(ids[:before]), end_tokens, start_id)


@dataclass
class LearnedTokenCounts:
    """Tokens that this process has given to a language model.

    Attributes:
        learned: tokens that the model learns to predict.
    """

    learned: int = 0


@dataclass(frozen=True, kw_only=True)
class CausalTokenization(TextTokenization):
    """A function of batches that replaces texts, or prompts and answers, by tokens.

    A text is all learned. With answers, the texts are prompts, which are not learned. A text that
    is too long loses its end. A prompt that is too long loses its beginning: its last tokens fill
    the room beside the answer, a quarter of `max_length` at least. An answer that is longer than
    the rest loses its end.

    Attributes:
        answer_col: column of answers; `None` if there are none.
        start_tokens: ids of the tokens before a text.
        end_tokens: ids of the tokens after a complete text or answer.
        start_id: id of the token that an empty prompt has; `None` if there is no such token.
    """

    answer_col: str | None = None
    start_tokens: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()
    start_id: int | None = None

    def __call__(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of a batch, with tokens (rows, tokens) in the column of texts and in
        the column of answers.

        Args:
            columns: arrays by name, rows first; texts and answers are strings.

        Raises:
            ValueError: a text is null.
            TypeError: a text is no string.
        """
        texts = columns[self.text_col].tolist()
        if self.answer_col is None:
            return columns | {self.text_col: self.tokenize_texts(texts)}
        tokens = self.tokenize_answers(texts, columns[self.answer_col].tolist())
        return columns | {self.text_col: tokens, self.answer_col: tokens}

    def tokenize_texts(self, texts: list[Any]) -> npt.NDArray[np.int64]:
        """Returns the tokens of some texts, (rows, tokens).

        Args:
            texts: strings.

        Raises:
            ValueError: a text is null.
            TypeError: a text is no string.
        """
        rows: list[list[int]] = []
        for ids in self._encode_texts(texts, self.text_col):
            whole = [*self.start_tokens, *ids, *self.end_tokens]
            self._count_text(is_truncated=len(whole) > self.max_length)
            if len(whole) > self.max_length and self.truncation_side == "left":
                room = max(self.max_length - len(self.start_tokens), 0)
                whole = [*self.start_tokens, *whole[len(whole) - room :]]
            rows.append(whole[: self.max_length])
        return self._stack_counted(rows)

    def tokenize_answers(self, prompts: list[Any], answers: list[Any]) -> npt.NDArray[np.int64]:
        """Returns the tokens of prompts and their answers, (rows, tokens).

        Args:
            prompts: strings.
            answers: strings, one per prompt.

        Raises:
            ValueError: one is null.
            TypeError: one is no string.
        """
        rows: list[list[int]] = []
        given = self._encode_texts(prompts, self.text_col)
        wanted = self._encode_texts(answers, self.answer_col or "")
        for prompt, ids in zip(given, wanted, strict=True):
            answer = [*ids, *self.end_tokens]
            room = max(self.max_length - len(answer), self.max_length // _PROMPT_PARTS)
            shown = self._cut_prompt(prompt, room)
            is_truncated = (
                len(self.start_tokens) + len(prompt) > len(shown)
                or len(shown) + len(answer) > self.max_length
            )
            self._count_text(is_truncated=is_truncated)
            hidden = [FIRST_PROMPT_NUMBER - one for one in shown]
            rows.append([*hidden, *answer][: self.max_length])
        return self._stack_counted(rows)

    def tokenize_prompts(self, prompts: list[Any], room: int) -> list[list[int]]:
        """Returns the ids of the tokens of each prompt, which the model continues.

        Args:
            prompts: strings.
            room: largest number of tokens; longer prompts lose their beginning.

        Raises:
            ValueError: a prompt is null.
            TypeError: a prompt is no string.
        """
        return [self._cut_prompt(ids, room) for ids in self._encode_texts(prompts, self.text_col)]

    def decode_tokens(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Returns texts of tokens, without special tokens.

        Args:
            rows: ids of the tokens of each text.
        """
        return self._plain_tokenizer.decode_batch([list(row) for row in rows])

    def describe_truncation(self, truncated: int, count: int) -> str:
        """Returns the sentence about texts that were cut off.

        Args:
            truncated: number of texts that were.
            count: number of all texts.
        """
        if self.answer_col is None:
            return super().describe_truncation(truncated, count)
        return (
            f"{truncated:,} of {format_counted_noun(count, 'prompt')} and their answers have more "
            f"than max_length={self.max_length} tokens: the beginning of the prompt is not used, "
            "and of long answers the end"
        )

    @cached_property
    def learned_counts(self) -> LearnedTokenCounts:
        """Tokens that this object has made in this process."""
        return LearnedTokenCounts()

    @cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer.from_str(self.tokenizer)
        made.no_truncation()
        made.no_padding()
        return made

    def _encode_texts(self, texts: list[Any], column: str) -> list[list[int]]:
        self._check_texts(texts, column)
        encodings = self._plain_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [one.ids for one in encodings]

    def _cut_prompt(self, ids: list[int], room: int) -> list[int]:
        """Returns the tokens of a prompt, at most `room` of them."""
        used = max(room - len(self.start_tokens), 0)
        return [*self.start_tokens, *ids[max(len(ids) - used, 0) :]][:room]

    def _count_text(self, *, is_truncated: bool) -> None:
        self.counts.texts += 1
        self.counts.truncated += is_truncated

    def _stack_counted(self, rows: list[list[int]]) -> npt.NDArray[np.int64]:
        tokens = self._stack_tokens(rows)
        self.learned_counts.learned += int((tokens[:, 1:] >= 0).sum())
        return tokens


@dataclass(frozen=True)
class LearnedTokenCheck:
    """A callback that ends a fit whose first epoch had no token to learn.

    Attributes:
        tokenization: counts the tokens of this process.
    """

    tokenization: CausalTokenization

    def on_epoch_end(self, state: TrainingState) -> None:
        """Adds the tokens of all processes.

        Args:
            state: the state of the run.

        Raises:
            ValueError: there are none.
        """
        if state.epoch != 0:
            return
        learned = self.tokenization.learned_counts.learned
        if sum_over_processes(learned, name="farandole.learned") == [0]:
            column = self.tokenization.answer_col or self.tokenization.text_col
            raise ValueError(
                f"column {column!r} has no token to learn: each row is empty, or one token with "
                "nothing before it"
            )
