# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`TextEmbedder`: adds the embedding of a text by a checkpoint, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from farandole.common import argument_checks
from farandole.spark.common.model.output_columns import ModelOutput
from farandole.spark.common.parameter import Parameter
from farandole.spark.transformers.model import CheckpointTextModel
from farandole.spark.transformers.networks import TextEmbeddingNetwork
from farandole.spark.transformers.tokenization import TextTokenization

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from farandole.spark.transformers.checkpoint import TextCheckpoint

_OWN_PARAMS = ("feature_columns", "label_columns", "outputCols", "outputs", "input_dtypes")
"""Parameters whose values follow from the checkpoint and the columns."""


class TextEmbedder(CheckpointTextModel):
    """A model that adds a vector for each text, which a checkpoint computes.

        TextEmbedder(checkpoint="/models/bert", text_col="review").transform(df)

    The driver reads the checkpoint at the first `transform`, and again if another one is set. The
    vector is the mean of the states of the text's tokens in the last layer, or the state of the
    first token, with length 1.
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
    _uses_pooler = False

    def use_checkpoint(self, checkpoint: TextCheckpoint) -> None:
        """Like `TextModel.use_checkpoint`.

        Args:
            checkpoint: as there.

        Raises:
            ValueError: as there, or the network is an encoder and a decoder.
        """
        if checkpoint.config.is_encoder_decoder:
            raise ValueError(
                f"the checkpoint {checkpoint.name} is an encoder and a decoder "
                f"({checkpoint.config.model_type}): embeddings need an encoder alone"
            )
        super().use_checkpoint(checkpoint)

    def _wrap_network(self, network: Any, padding_id: int) -> TextEmbeddingNetwork:
        pooling, normalize = self.getPooling(), self.getNormalize()
        return TextEmbeddingNetwork(network, padding_id, pooling, normalize=normalize)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self.getTextCol() is None:
            raise ValueError("text_col is required")
        function = self.getOrDefault("transformation_fn")
        is_own = function is None or isinstance(function, TextTokenization)
        for name in _OWN_PARAMS if is_own else ("transformation_fn",):
            if self.isSet(name):
                raise ValueError(
                    f"{name} cannot be set: it follows from checkpoint, text_col and embedding_col"
                )
        self._open_changed_checkpoint()
        vector, module = self.getEmbeddingCol(), self.getModel()
        module.pooling, module.normalize = self.getPooling(), self.getNormalize()
        size = module.network.config.hidden_size
        prepared = self.copy()
        prepared.setParams(
            label_columns=[vector],
            outputCols=[vector],
            outputs=[ModelOutput("float32", label_is_vector=True, size=size)],
            input_dtypes=["int64"],
            apply_transformation=True,
        )
        return super(TextEmbedder, prepared)._transform(dataset)
