# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains and packs a model of Keras on torch, and checks what is imported."""

import sys

from farandole.spark.keras import remote

remote.basics.init()
remote.prepare_devices("torch", wanted=False)
import keras
import numpy as np

from farandole.spark.keras.saving import model_bytes
from farandole.spark.torch.training import deferred_compiler

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
again = model_bytes.unpack_model(model_bytes.pack_model(model))
np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
assert "tensorflow" not in sys.modules
assert deferred_compiler.is_compiler_deferred()
import tensorflow as tf

assert model_bytes.serialization_lib.tf.available
assert keras.saving.serialize_keras_object(tf.TensorShape((2, 3))) == [2, 3]
