# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""PyTorch on Spark: `TorchEstimator` fits a DataFrame, `TorchModel` transforms one.

Names are loaded when first used, so that a training process never imports pyspark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("torch") is None:
    raise ImportError(
        "farandole.spark.torch needs PyTorch: pip install farandole[torch,spark]", name="torch"
    )

if TYPE_CHECKING:
    from farandole.spark.torch.estimator import TorchEstimator
    from farandole.spark.torch.model import TorchModel
    from farandole.spark.torch.rate_range import LearningRateCurve

_MODULE_BY_NAME = {
    "LearningRateCurve": "rate_range",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
}

__all__ = ["LearningRateCurve", "TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("pyspark") is None:
        raise ImportError(
            f"{name} needs pyspark: pip install farandole[torch,spark]", name="pyspark"
        )
    return getattr(import_module(f"{__name__}.{home}"), name)
