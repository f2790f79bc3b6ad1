# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Texts become tokens in the process that reads them, one batch at a time: no tokens are stored.

A batch of texts is one int64 tensor (rows, tokens), in which `PADDING_TOKEN` fills the ends of
shorter rows. The package tokenizers releases the interpreter's lock while it encodes a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tokenizers

from farandole.common.counted_noun import format_counted_noun
from farandole.spark import task

if TYPE_CHECKING:
    import numpy.typing as npt

    from farandole.spark.torch.callbacks import TrainingState

PADDING_TOKEN = -1
"""Fills the end of a row of tokens; it is no token of any vocabulary. The network replaces it by
the `padding_id` of the checkpoint, which may be a token of texts: without a token for padding, it
is the token of their end.
"""


@dataclass
class TokenizedTextCounts:
    """Texts that this process has tokenized.

    Attributes:
        texts: number of texts.
        truncated: number of texts with more tokens than the model takes.
    """

    texts: int = 0
    truncated: int = 0


@dataclass(frozen=True, kw_only=True)
class TextTokenization:
    """A function of batches that replaces a column of texts by a column of tokens.

    Attributes:
        text_col: the column.
        tokenizer: content of the file tokenizer.json.
        max_length: largest number of tokens of a text; the rest of longer texts is cut off.
        truncation_side: side where the rest of longer texts is cut off, `"right"` or `"left"`.
        length_multiple: a batch has the length of its longest text, rounded up to a multiple.
        has_fixed_length: whether every batch has `max_length` tokens a row.
    """

    text_col: str
    tokenizer: str
    max_length: int
    truncation_side: str = "right"
    length_multiple: int = 8
    has_fixed_length: bool = False

    batched: ClassVar[bool] = True
    """`farandole.spark.common.transform` gives whole batches to functions with this mark."""

    def __call__(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of a batch, with tokens (rows, tokens) in the column of texts.

        Args:
            columns: arrays by name, rows first; the texts are strings.

        Raises:
            ValueError: a text is null.
            TypeError: a text is no string.
        """
        return columns | {self.text_col: self.tokenize_texts(columns[self.text_col].tolist())}

    def tokenize_texts(self, texts: list[Any]) -> npt.NDArray[np.int64]:
        """Returns the tokens of some texts, (rows, tokens).

        Args:
            texts: strings.

        Raises:
            ValueError: a text is null.
            TypeError: a text is no string.
        """
        self._check_texts(texts, self.text_col)
        encodings = self._truncating_tokenizer.encode_batch_fast(texts)
        self.counts.texts += len(texts)
        self.counts.truncated += sum(bool(one.overflowing) for one in encodings)
        return self._stack_tokens([one.ids for one in encodings])

    def _check_texts(self, texts: list[Any], column: str) -> None:
        """Refuses texts that are null, or no strings."""
        for text in texts:
            if text is None:
                raise ValueError(f"text column {column!r} has a null: fill replaces nulls")
            if not isinstance(text, str):
                raise TypeError(
                    f"text column {column!r} has values of type {type(text).__name__}, "
                    "which are not strings"
                )

    def _stack_tokens(self, rows: list[list[int]]) -> npt.NDArray[np.int64]:
        """Returns rows of tokens as one array, (rows, tokens)."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.full((len(rows), self._batch_length(int(lengths.max()))), PADDING_TOKEN)
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = np.concatenate(
            [np.asarray(row, dtype=np.int64) for row in rows]
        )
        return tokens

    def describe_truncation(self, truncated: int, count: int) -> str:
        """Returns the sentence about texts that were cut off.

        Args:
            truncated: number of texts that were.
            count: number of all texts.
        """
        return (
            f"{truncated:,} of {format_counted_noun(count, 'text')} have more than "
            f"max_length={self.max_length} tokens: the rest of them is not used"
        )

    @cached_property
    def counts(self) -> TokenizedTextCounts:
        """Texts that this object has tokenized in this process."""
        return TokenizedTextCounts()

    @cached_property
    def _truncating_tokenizer(self) -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer.from_str(self.tokenizer)
        made.enable_truncation(self.max_length, direction=self.truncation_side)
        made.no_padding()
        return made

    def _batch_length(self, longest: int) -> int:
        if self.has_fixed_length:
            return self.max_length
        rounded = -(-max(longest, 1) // self.length_multiple) * self.length_multiple
        return min(rounded, self.max_length)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the counts and the tokenizer of this process."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class TruncationReporter:
    """A callback that says once, after the first epoch, how many texts were truncated.

    Attributes:
        tokenization: counts the texts of this process.
    """

    tokenization: TextTokenization

    def on_epoch_end(self, state: TrainingState) -> None:
        """Reports the texts of all processes, including texts of the validation.

        Args:
            state: the state of the run.
        """
        if state.epoch != 0:
            return
        counts = self.tokenization.counts
        truncated, texts = sum_over_processes(
            counts.truncated, counts.texts, name="farandole.truncated"
        )
        if truncated and state.rank == 0:
            message = self.tokenization.describe_truncation(truncated, texts)
            task.report({"kind": "message", "text": message})


def sum_over_processes(*counts: int, name: str) -> list[int]:
    """Returns sums of counts over all training processes; a collective call.

    Args:
        *counts: the counts of this process.
        name: name of the operation.
    """
    import torch  # noqa: PLC0415 - a training process has it, a predicting one may not need it

    import farandole.torch as hvd  # noqa: PLC0415

    own = torch.tensor(counts, dtype=torch.float64)
    return [int(total) for total in hvd.allreduce(own, op=hvd.Sum, name=name)]
