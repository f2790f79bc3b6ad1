# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learns the digits with KerasEstimator."""

import cloudpickle
import disturbed_fit
import keras
from disturbed_fit import fit_and_print, known, watched

from farandole.spark.keras import KerasEstimator

cloudpickle.register_pickle_by_value(disturbed_fit)  # executors cannot import it


def predicted(model, images):
    return keras.ops.convert_to_numpy(model(images)).argmax(1)


class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        import farandole.keras as hvd

        watched(hvd.rank(), hvd.size(), self.epoch)


keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Reshape((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
estimator = KerasEstimator(
    model=model,
    optimizer=keras.optimizers.SGD(0.0125, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    callbacks=[Watch()],
    **known,
)
fit_and_print(estimator, predicted)
