# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts rows of a `ParquetLoader` in the model of `FaultTolerantDataParallel`."""

import os

import torch
import torch.distributed as dist
from counted_rows import EPOCHS, counts, end, loader, loss

from farandole.torch.distributed import FaultTolerantDataParallel


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = counts
        self.present = torch.nn.Parameter(torch.zeros(1 << 16))

    def forward(self, epoch, batch):
        return loss(epoch, batch) + self.present[os.getpid() % (1 << 16)]


network = Network()
plain = torch.optim.SGD(network.parameters(), lr=1.0)
dist.init_process_group("farandole")
ddp = FaultTolerantDataParallel(network, plain)
ddp.share(reader=loader)
while loader.epoch < EPOCHS:
    epoch = loader.epoch
    for batch in loader:
        plain.zero_grad()
        ddp(epoch, batch).backward()
        # DDP averages: the part of one rank tells how many took part.
        counts.grad.div_(network.present.grad.max()).round_()
        plain.step()
end()
