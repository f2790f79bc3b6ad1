# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Classes and functions that Keras's own decorator made known travel to workers, wherever they
are defined.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)

PARTS = """
import keras

@keras.saving.register_keras_serializable(package="mine")
class Ones(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.ones(shape, dtype)

    def get_config(self):
        return {}

@DECORATED
class Scaled(keras.layers.Layer):
    def __init__(self, units=1, **more):
        super().__init__(**more)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer=Ones(),
            name="kernel")
        super().build(shape)

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)

    def get_config(self):
        return super().get_config() | {"units": self.units}

@keras.saving.register_keras_serializable(package="mine")
def doubled(x):
    return x * 2.0

@keras.saving.register_keras_serializable(package="mine")
class Error(keras.metrics.MeanAbsoluteError):
    pass

@keras.saving.register_keras_serializable(package="mine", name="another")
class Squares(keras.losses.Loss):
    def call(self, label, output):
        return keras.ops.mean((label - output) ** 2, axis=-1)

@keras.saving.register_keras_serializable(package="mine")
class Both(keras.Model):
    def __init__(self, **more):
        super().__init__(**more)
        self.scaled = Scaled(2)
        self.last = keras.layers.Dense(1, kernel_initializer=Ones(), activation=doubled)

    def call(self, x):
        return self.last(self.scaled(x))

class Notes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["noted"] = 3.0
"""
FIT = """
import sys
import numpy as np
import pandas as pd
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.keras import KerasEstimator

x = np.random.default_rng(0).random((64, 2)).astype("float32")
frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1)})
layers = [keras.Input((2,)), Scaled(2),
    keras.layers.Dense(1, activation=doubled, kernel_initializer=Ones())]
for model in (keras.Sequential(layers), Both()):
    fitted = KerasEstimator(
        model=model, optimizer=keras.optimizers.SGD(0.001), loss=Squares(),
        metrics=[Error(name="error")],
        callbacks=[Notes()], feature_cols=[["a", "b"]], label_cols=["y"], epochs=1, verbose=0,
        batch_size=8,
        store=LocalStore(sys.argv[1]), backend=LocalBackend(2, verbose=0),
    ).fit(frame)
    print(sorted(fitted.getHistory()))
"""


@pytest.mark.parametrize("place", ["script", "beside", "plain"])
def test_classes_registered_by_a_script_or_a_module_beside_it_are_found_in_workers(tmp_path, place):
    registered = 'keras.saving.register_keras_serializable(package="mine")'
    parts = PARTS.replace("@DECORATED", "" if place == "plain" else f"@{registered}")
    script = tmp_path / "script.py"
    if place == "beside":
        (tmp_path / "parts_of_mine.py").write_text(parts)
        script.write_text(f"import keras\nfrom parts_of_mine import *\n{FIT}")
    else:
        script.write_text(parts + FIT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True, text=True, timeout=280, check=False, cwd="/",
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['error', 'loss', 'noted']"] * 2
