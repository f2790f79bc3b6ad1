# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lists of words become tokens, and labels of words become labels of tokens.

The store contains each list as JSON, because prepared data has no lists of strings. The first token
of a word gets the label of the word, and all other tokens get `IGNORED_LABEL`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from farandole.common.counted_noun import format_counted_noun
from farandole.spark.transformers.tokenization import TextTokenization

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

IGNORED_LABEL = -100
"""Label of a token that does not count in the loss, also in a list of integers of the user."""


class TokenizedWords(NamedTuple):
    """Tokens of some rows, and the tokens that stand for words.

    Attributes:
        tokens: (rows, tokens), int64, with `PADDING_TOKEN` at the ends.
        word_numbers: (rows, tokens), int64: number of the word that begins at the token, or -1.
    """

    tokens: npt.NDArray[np.int64]
    word_numbers: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WordTokenization(TextTokenization):
    """A function of batches that replaces lists of words by tokens, and their labels by labels of
    tokens.

    Attributes:
        label_col: the column of labels; predictions have none.
        classes: names of the classes, in the order of their numbers.
    """

    label_col: str
    classes: tuple[str, ...]

    def __call__(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the columns of a batch, with tokens (rows, tokens) in the column of words, and
        their labels (rows, tokens) in the column of labels.

        Args:
            columns: arrays by name, rows first; words and labels are lists as JSON.

        Raises:
            ValueError: a list or a word is null, a row has not one label per word, or a label is
                no class.
            TypeError: a word is no string.
        """
        rows = [_read_list(text, self.text_col) for text in columns[self.text_col].tolist()]
        found = self.tokenize_words(rows)
        made = columns | {self.text_col: found.tokens}
        if self.label_col in columns:
            texts = columns[self.label_col].tolist()
            labels = [_read_list(text, self.label_col) for text in texts]
            made[self.label_col] = self._label_tokens(rows, labels, found.word_numbers)
        return made

    def tokenize_words(self, rows: Sequence[Sequence[Any]]) -> TokenizedWords:
        """Returns the tokens of some rows of words.

        Args:
            rows: a list of words per row.

        Raises:
            ValueError: a word is null.
            TypeError: a word is no string.
        """
        for row in rows:
            for word in row:
                if word is None:
                    raise ValueError(f"text column {self.text_col!r} has a null among its words")
                if not isinstance(word, str):
                    raise TypeError(
                        f"text column {self.text_col!r} has words of type {type(word).__name__}, "
                        "which are not strings"
                    )
        encodings = self._truncating_tokenizer.encode_batch(
            [list(row) for row in rows], is_pretokenized=True
        )
        tokens = self._stack_tokens([one.ids for one in encodings])
        word_numbers = np.full(tokens.shape, -1)
        for row, (encoding, given) in enumerate(zip(encodings, rows, strict=True)):
            numbers = np.array([-1 if one is None else one for one in encoding.word_ids], np.int64)
            begins = (numbers >= 0) & (numbers != np.concatenate([[-1], numbers[:-1]]))
            if self.truncation_side == "left" and begins.any():
                # A word that is cut has its first token in the other part: it has no label.
                first = numbers[begins][0]
                if any(first in part.word_ids for part in encoding.overflowing):
                    begins &= numbers != first
            word_numbers[row, : len(numbers)][begins] = numbers[begins]
            self.counts.texts += len(given)
            if encoding.overflowing:
                used = numbers[begins]
                span = int(used.max() - used.min()) + 1 if len(used) else 0
                self.counts.truncated += len(given) - span
        return TokenizedWords(tokens, word_numbers)

    def describe_truncation(self, truncated: int, count: int) -> str:
        """Returns the sentence about words that were cut off.

        Args:
            truncated: number of words that were.
            count: number of all words.
        """
        return (
            f"{truncated:,} of {format_counted_noun(count, 'word')} are not within "
            f"max_length={self.max_length} tokens of their row: they are not used"
        )

    @cached_property
    def _class_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def _label_tokens(
        self, rows: list[list[Any]], labels: list[list[Any]], word_numbers: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Returns the labels of tokens, (rows, tokens)."""
        made = np.full(word_numbers.shape, IGNORED_LABEL)
        for row, (given, names) in enumerate(zip(rows, labels, strict=True)):
            if len(given) != len(names):
                found = format_counted_noun(len(names), "label")
                raise ValueError(
                    f"label column {self.label_col!r} has {found} in a row with "
                    f"{format_counted_noun(len(given), 'word')} in column {self.text_col!r}"
                )
            numbers = np.array([self._class_number(name) for name in names], np.int64)
            begins = word_numbers[row] >= 0
            made[row, begins] = numbers[word_numbers[row, begins]]
        return made

    def _class_number(self, name: Any) -> int:
        if name is None or name == IGNORED_LABEL:
            return IGNORED_LABEL
        number = self._class_numbers.get(str(name))
        if number is None:
            raise ValueError(
                f"label column {self.label_col!r} has the label {name!r}, which is no class: "
                f"categories has {', '.join(self.classes)}"
            )
        return number


def mark_word_beginnings(tokenizer: str) -> str:
    """Returns a tokenizer that treats each word of a list like a word after a space. Byte-level
    tokenizers, such as the tokenizer of RoBERTa, would otherwise take it for the end of a word.

    Args:
        tokenizer: content of the file tokenizer.json.
    """
    content = json.loads(tokenizer)
    outer = content.get("pre_tokenizer") or {}
    for step in [outer, *outer.get("pretokenizers", ())]:
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"] = True
        if step.get("type") == "Metaspace":
            step["prepend_scheme"] = "always"
    return json.dumps(content)


def _read_list(text: Any, column: str) -> list[Any]:
    """Returns the list in a row of prepared data.

    Raises:
        ValueError: it is null.
    """
    if text is None:
        raise ValueError(f"column {column!r} has a null: each row needs a list")
    return json.loads(text)
