# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learns the digits with LightningEstimator."""

import cloudpickle
import disturbed_fit
import torch
from disturbed_fit import fit_and_print, known, watched

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


import lightning

from farandole.spark.lightning import LightningEstimator


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, images):
        return self.inner(images)

    def training_step(self, batch, _index):
        return torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch(lightning.Callback):
    def on_train_batch_end(self, trainer, _module, _outputs, _batch, _index):
        watched(trainer.global_rank, trainer.world_size, trainer.current_epoch)


estimator = LightningEstimator(model=Digits(), callbacks=[Watch()], **known)
fit_and_print(estimator, predicted)
