# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras on Spark: `KerasEstimator` fits a DataFrame, `KerasModel` transforms one.

Keras 3 on TensorFlow, torch or JAX, as `KERAS_BACKEND` says on the driver. Names are loaded when
first used, so that a training process chooses its devices before Keras is imported, and never
imports pyspark.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("keras") is None:
    raise ImportError(
        "farandole.spark.keras needs Keras: pip install farandole[tensorflow,spark]", name="keras"
    )

if TYPE_CHECKING:
    from farandole.spark.keras.estimator import KerasEstimator
    from farandole.spark.keras.model import KerasModel

_MODULE_BY_NAME = {"KerasEstimator": "estimator", "KerasModel": "model"}

__all__ = ["KerasEstimator", "KerasModel"]


def __getattr__(name: str) -> object:
    home = _MODULE_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("pyspark") is None:
        raise ImportError(
            f"{name} needs pyspark: pip install farandole[tensorflow,spark]", name="pyspark"
        )
    return getattr(import_module(f"{__name__}.{home}"), name)
