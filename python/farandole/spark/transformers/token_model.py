# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TokenClassifierModel`: a fitted model that predicts a label for each word of a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import transformers
from pyspark.sql.types import ArrayType, DataType, FloatType, StringType

from farandole.data.lazy_pyarrow import pa
from farandole.spark.common.model.output_columns import add_predictions
from farandole.spark.torch.predict import TorchPredictor
from farandole.spark.transformers.model import create_tokenization
from farandole.spark.transformers.networks import TokenNetwork
from farandole.spark.transformers.params import ROW_CLASS_PARAMS
from farandole.spark.transformers.text_functions import TextFunctionModel
from farandole.spark.transformers.word_columns import check_word_type
from farandole.spark.transformers.word_tokenization import WordTokenization, mark_word_beginnings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame

    from farandole.spark.transformers.checkpoint import TextCheckpoint
    from farandole.spark.transformers.params import TextColumnParams


def create_word_tokenization(
    params: TextColumnParams,
    checkpoint: TextCheckpoint,
    label_col: str,
    classes: Sequence[str],
    *,
    has_fixed_length: bool = False,
) -> WordTokenization:
    """Returns the function that makes tokens of a column of lists of words.

    Args:
        params: names the column and the lengths.
        checkpoint: has the tokenizer.
        label_col: column of labels.
        classes: names of the classes.
        has_fixed_length: whether every batch has `max_length` tokens a row.

    Raises:
        ValueError: the network takes fewer tokens than `max_length`.
    """
    plain = create_tokenization(params, checkpoint, has_fixed_length=has_fixed_length)
    known: dict[str, Any] = plain.__getstate__()
    known["tokenizer"] = mark_word_beginnings(plain.tokenizer)
    return WordTokenization(**known, label_col=label_col, classes=tuple(classes))


@dataclass(frozen=True, kw_only=True)
class TokenPredictor(TorchPredictor):
    """A model of tokens in tasks."""

    def predict_batches(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields every batch with the labels of its words, and with their probabilities.

        Args:
            batches: with the column of words and any others.
        """
        for batch in batches:
            labels, shares = self.predict_words(batch)
            columns = [
                pa.array(labels, pa.list_(pa.string())),
                pa.array(shares, pa.list_(pa.float32())),
            ]
            names = [*batch.schema.names, "output0", "output1"]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names=names)

    def predict_words(self, batch: pa.RecordBatch) -> tuple[list[Any], list[Any]]:
        """Returns a list of labels for each row, and a list of their probabilities. A word that has
        no token within `max_length` has a null in both.

        Args:
            batch: its columns go by number.

        Raises:
            ValueError: a row or a word is null.
        """
        name = self.groups[0][0]
        rows = batch.column(self.columns.index(name)).to_pylist()
        if nulls := sum(row is None for row in rows):
            raise ValueError(f"column {name!r} has nulls: {nulls} of {len(rows)} rows")
        labels: list[Any] = [[None] * len(row) for row in rows]
        shares: list[Any] = [[None] * len(row) for row in rows]
        for start in range(0, len(rows), self.batch_size):
            self._predict_some(rows, start, labels, shares)
        return labels, shares

    def _predict_some(
        self, rows: list[Any], start: int, labels: list[Any], shares: list[Any]
    ) -> None:
        """Writes the labels of the words of a batch, and their probabilities."""
        some = rows[start : start + self.batch_size]
        change = self._unpickle_transformation
        if change is None:
            raise ValueError("the model has no tokenizer: apply_transformation is not set")
        tokenization: Any = change.function
        found = tokenization.tokenize_words(some)
        columns = {self.groups[0][0]: found.tokens}
        (logits,) = self.call_model(self._find_model(), columns, len(some))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        best = probabilities.argmax(axis=1)
        for row, token in zip(*np.nonzero(found.word_numbers >= 0), strict=True):
            word, number = found.word_numbers[row, token], best[row, token]
            labels[start + row][word] = tokenization.classes[number]
            shares[start + row][word] = probabilities[row, number, token]


class TokenClassifierModel(TextFunctionModel):
    """A fitted `TokenClassifier`: `transform` adds a list of labels, one per word, and a list of
    their probabilities.
    """

    _network_class = transformers.AutoModelForTokenClassification

    def _wrap_network(self, network: Any, padding_id: int) -> TokenNetwork:
        return TokenNetwork(network, padding_id)

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> WordTokenization:
        names = checkpoint.config.id2label
        classes = [str(names[number]) for number in sorted(names)]
        return create_word_tokenization(self, checkpoint, self.getLabelColumns()[0], classes)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self._check_feature_columns(dataset, raw=True)
        check_word_type(dataset.schema[self.getTextCol()].dataType, self.getTextCol())
        for name in ROW_CLASS_PARAMS[:-1]:
            if self.getOrDefault(name) is not None:
                raise ValueError(f"{name} cannot be set: a row has many labels")
        added = self._added_columns()
        taken = [name for name in added if name in dataset.columns]
        if taken:
            raise ValueError(f"the DataFrame already has an output column: {', '.join(taken)}")
        self._explain_slow_first_prediction(dataset.sparkSession)
        predict = self._create_predictor(dataset).predict_batches
        return add_predictions(dataset, list(added), list(added.values()), predict)

    def _added_columns(self) -> dict[str, DataType]:
        return {
            self.getPredictedLabelCol(): ArrayType(StringType()),
            self.getProbabilityCol(): ArrayType(FloatType()),
        }

    def _create_predictor(self, dataset: DataFrame) -> TokenPredictor:
        return TokenPredictor(**vars(super()._create_predictor(dataset)))

    def evaluate(self, *_: Any, **__: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, because metrics of rows do not fit lists of labels.

        Raises:
            ValueError: always; the message says what to do.
        """
        raise ValueError(
            "a row has many labels: compare the column of predicted lists with the labels, for "
            "example with seqeval"
        )

    def importance(self, *_: Any, **__: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises an error, as `evaluate` does.

        Raises:
            ValueError: always.
        """
        raise ValueError("importance is for a label of a row, and a row has many labels")
