# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Optimizers, a model and its losses, for tests of the distributed optimizer."""

import torch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": torch.optim.Adadelta,
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def make_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 37), torch.nn.Tanh(), torch.nn.Linear(37, 11), torch.nn.Linear(11, 1)
    )


def loss_of(module, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (module(torch.randn(6, 5, generator=generator)) ** 2).mean()


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
