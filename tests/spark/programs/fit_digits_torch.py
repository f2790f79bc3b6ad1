# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learns the digits with TorchEstimator."""

import cloudpickle
import disturbed_fit
import torch
from disturbed_fit import fit_and_print, known, watched

from farandole.spark.torch import TorchEstimator

cloudpickle.register_pickle_by_value(disturbed_fit)  # executors cannot import it


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 10),
    )


def predicted(model, images):
    with torch.no_grad():
        return model(torch.tensor(images)).argmax(1).numpy()


class Watch:
    def on_batch_end(self, state):
        watched(state.rank, state.size, state.epoch)


model = network()
estimator = TorchEstimator(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9),
    loss=torch.nn.CrossEntropyLoss(),
    callbacks=[Watch()],
    **known,
)
fit_and_print(estimator, predicted)
