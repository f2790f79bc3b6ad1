# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Lightning on Spark: `TorchEstimator` fits a `LightningModule` on a DataFrame, `TorchModel`
transforms one.

Names are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    raise ImportError(
        "farandole.spark.lightning needs Lightning: pip install farandole[lightning,spark]",
        name="lightning",
    )

if TYPE_CHECKING:
    from farandole.spark.lightning.estimator import LightningEstimator, TorchEstimator
    from farandole.spark.lightning.model import TorchModel

_MODULE_BY_NAME = {
    "LightningEstimator": "estimator",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
}

__all__ = ["LightningEstimator", "TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("pyspark") is None:
        raise ImportError(
            f"{name} needs pyspark: pip install farandole[lightning,spark]", name="pyspark"
        )
    return getattr(import_module(f"{__name__}.{home}"), name)
