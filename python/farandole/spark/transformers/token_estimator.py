# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TokenClassifier`: a checkpoint is fine-tuned to label the words of lists."""

# ruff: noqa: SLF001 - a fit has a copy of the estimator

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from farandole.spark.transformers.estimator import TextEstimator
from farandole.spark.transformers.networks import TokenNetwork
from farandole.spark.transformers.params import ROW_CLASS_PARAMS
from farandole.spark.transformers.token_model import (
    TokenClassifierModel,
    create_word_tokenization,
)
from farandole.spark.transformers.word_columns import pack_words

if TYPE_CHECKING:
    from farandole.data.prepare import PreparedData as Prepared
    from farandole.spark.common.data.existing_data import ExistingDataPaths
    from farandole.spark.torch.columns.model_calls import ModelCall
    from farandole.spark.transformers.checkpoint import TextCheckpoint
    from farandole.spark.transformers.word_tokenization import WordTokenization


class TokenClassifier(TextEstimator):
    """An estimator that fine-tunes a checkpoint to label words, such as the names in a sentence.

        TokenClassifier(checkpoint="/models/bert", text_col="words", label_col="tags", epochs=3,
                        num_proc=4, store="/data/farandole").fit(df)

    `text_col` is a column of lists of words, `label_col` a column of lists with one label per word:
    words or integers. Their values are the classes, sorted, unless `categories={"tags": [...]}`
    names them. A null and -100 are no labels: the word does not count. The first token of a word
    learns its label; other tokens do not count in the loss, a mean over all labelled words of a
    step. All other parameters are parameters of `TextClassifier`.

    The fitted `TokenClassifierModel` adds the columns `<label>__predicted`, a list with the label
    of each word, and `<label>__probability`, a list of their probabilities, unless
    `predictedLabelCol` and `probabilityCol` say otherwise.
    """

    _own_loss = torch.nn.CrossEntropyLoss
    _network_kind = transformers.AutoModelForTokenClassification
    _module_class = TokenNetwork
    _adapter_task = "TOKEN_CLS"

    # An attribute of the copy in a fit, as in `TextEstimator`.
    _classes = cast("Any", ())

    def get_model_class(self) -> type[TokenClassifierModel]:
        """Returns the class of the fitted model."""
        return TokenClassifierModel

    def _fit(self, dataset: Any) -> Any:
        self._check_required_params()
        for name in (*ROW_CLASS_PARAMS, "sample_weight_col", "class_weight", "fill"):
            if self.getOrDefault(name) is not None:
                raise ValueError(f"{name} cannot be set: a row has many words and labels")
        if getattr(dataset, "isStreaming", False):
            return super()._fit(dataset)  # refuses it
        label = self.getLabelCol()
        given = self.getCategories().get(label)
        chosen = None if given is None else tuple(given)
        copied = self.copy()
        packed = pack_words(dataset, self.getTextCol(), label, chosen)
        copied._classes = packed.classes
        return super(TokenClassifier, copied)._fit(packed.rows)

    def _fit_on_parquet(
        self, dataset_idx: int | None = None, given: ExistingDataPaths | None = None
    ) -> Any:
        del dataset_idx, given
        raise ValueError(
            "fit_on_parquet does not read lists of words: use fit, with "
            "spark.read.parquet(path) or pyarrow.dataset.dataset(path)"
        )

    def _create_tokenization(self, checkpoint: TextCheckpoint) -> WordTokenization:
        return create_word_tokenization(
            self,
            checkpoint,
            self.getLabelCol(),
            self._classes,
            has_fixed_length=self.getInmemoryCacheAll(),
        )

    def _label_categories(self) -> dict[str, Any]:
        # The transformation makes numbers of the labels.
        known = self.getCategories()
        return {name: known[name] for name in known if name != self.getLabelCol()}

    def _network_changes(self, prepared: Prepared) -> dict[str, Any]:
        del prepared
        return {
            "num_labels": len(self._classes),
            "id2label": dict(enumerate(self._classes)),
            "label2id": {name: number for number, name in enumerate(self._classes)},
        }

    def _model_params(
        self, call: ModelCall, inputs: Any, form: str | None = None
    ) -> dict[str, Any]:
        known = super()._model_params(call, inputs, form) | self._class_columns()
        return known | {"class_names": list(self._classes)}
