# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TextEmbedder`: adds the embedding of a text by a checkpoint, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers

from farandole.common import argument_checks
from farandole.spark.common.model.output_columns import ModelOutput
from farandole.spark.common.parameter import Parameter
from farandole.spark.transformers.checkpoint import open_checkpoint
from farandole.spark.transformers.model import TextModel
from farandole.spark.transformers.networks import TextEmbeddingNetwork

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TextEmbedder(TextModel):
    """A model that adds a vector for each text, which a checkpoint computes.

        TextEmbedder(checkpoint="/models/bert", text_col="review").transform(df)

    The driver reads the checkpoint at the first `transform`. The vector is the mean of the states
    of the text's tokens in the last layer, or the state of the first token, with length 1.
    """

    embedding_col: Parameter[str] = Parameter(
        "Column of vectors to add.", argument_checks.check_nonempty_text, default="embedding"
    )
    pooling: Parameter[str] = Parameter(
        'State that becomes the vector: the `"mean"` over tokens, or that of the `"first"` token.',
        argument_checks.make_choice_check("mean", "first"),
        default="mean",
    )
    normalize: Parameter[bool] = Parameter(
        "Whether vectors have the length 1.", argument_checks.check_boolean_flag, default=True
    )

    _network_class = transformers.AutoModel

    def _wrap_network(self, network: Any, padding_id: int) -> TextEmbeddingNetwork:
        pooling, normalize = self.getPooling(), self.getNormalize()
        return TextEmbeddingNetwork(network, padding_id, pooling, normalize=normalize)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        for name in ("checkpoint", "text_col") if self.getModel() is None else ("text_col",):
            if self.getOrDefault(name) is None:
                raise ValueError(f"{name} is required")
        if self.getModel() is None:
            with open_checkpoint(self.getCheckpoint()) as checkpoint:
                self.use_checkpoint(checkpoint)
        text, vector, module = self.getTextCol(), self.getEmbeddingCol(), self.getModel()
        module.pooling, module.normalize = self.getPooling(), self.getNormalize()
        size = module.network.config.hidden_size
        self.setParams(
            feature_columns=[text],
            label_columns=[vector],
            outputCols=[vector],
            outputs=[ModelOutput("float32", label_is_vector=True, size=size)],
            input_dtypes=["int64"],
            transformation_fn=replace(self.getTransformationFn(), text_col=text),
            apply_transformation=True,
        )
        return super()._transform(dataset)
