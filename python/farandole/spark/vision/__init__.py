# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Networks for images on Spark: a backbone and a column of images make an estimator.

`ImageClassifier` fine-tunes a checkpoint of transformers, a network of torchvision or timm, or a
module on a DataFrame. Names are loaded when first used, so that a training process never imports
pyspark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farandole.spark.vision.estimator import ImageClassifier
    from farandole.spark.vision.model import ImageClassifierModel

_MODULE_BY_NAME = {"ImageClassifier": "estimator", "ImageClassifierModel": "model"}

__all__ = ["ImageClassifier", "ImageClassifierModel"]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("pyspark", "torch"):
        if find_spec(package) is None:
            raise ImportError(f"{name} needs {package}: pip install {package}", name=package)
    return getattr(import_module(f"{__name__}.{home}"), name)
