# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Code shared by `farandole.keras` and `farandole.tensorflow.keras`: Keras 3 on TensorFlow,
torch or JAX.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("keras") is None:
    raise ImportError(
        "farandole.keras needs Keras: pip install keras, and a backend for it", name="keras"
    )

from farandole._keras.optimizer import distribute_optimizer, is_distributed, is_optimizer
from farandole._keras.settings import GradientReductionSettings

__all__ = ["GradientReductionSettings", "distribute_optimizer", "is_distributed", "is_optimizer"]
