# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Pretrained models of Hugging Face on Spark: a checkpoint and a column of text make an estimator.

`TextClassifier`, `TextRegressor`, `TokenClassifier` and `CausalLanguageModel` fine-tune a
checkpoint on a DataFrame, `TextEmbedder` and `TextGenerator` add embeddings and texts to one. Names
are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("transformers") is None:
    raise ImportError(
        "farandole.spark.transformers needs the packages transformers and torch: "
        "pip install transformers torch",
        name="transformers",
    )

if TYPE_CHECKING:
    from farandole.spark.transformers.causal_estimator import CausalLanguageModel
    from farandole.spark.transformers.causal_model import TextGenerator
    from farandole.spark.transformers.embedder import TextEmbedder
    from farandole.spark.transformers.estimator import TextClassifier, TextRegressor
    from farandole.spark.transformers.model import TextClassifierModel, TextRegressorModel
    from farandole.spark.transformers.token_estimator import TokenClassifier
    from farandole.spark.transformers.token_model import TokenClassifierModel

_MODULE_BY_NAME = {
    "CausalLanguageModel": "causal_estimator",
    "TextClassifier": "estimator",
    "TextClassifierModel": "model",
    "TextEmbedder": "embedder",
    "TextGenerator": "causal_model",
    "TextRegressor": "estimator",
    "TextRegressorModel": "model",
    "TokenClassifier": "token_estimator",
    "TokenClassifierModel": "token_model",
}

__all__ = [
    "CausalLanguageModel",
    "TextClassifier",
    "TextClassifierModel",
    "TextEmbedder",
    "TextGenerator",
    "TextRegressor",
    "TextRegressorModel",
    "TokenClassifier",
    "TokenClassifierModel",
]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("pyspark") is None:
        raise ImportError(f"{name} needs pyspark: pip install pyspark", name="pyspark")
    return getattr(import_module(f"{__name__}.{home}"), name)
