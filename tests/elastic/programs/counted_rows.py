# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A loader of rows, and a model that counts how often each row of each epoch was in a step."""

import json
import os
import sys
import time

import torch

import farandole.torch as hvd
from farandole.common import basics
from farandole.data import ParquetLoader

EPOCHS, ROWS = map(int, sys.argv[2:])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(EPOCHS, ROWS)])
counts = model[0]


def print_pid():
    print(f"pid {os.getpid()} of {hvd.size()}", flush=True)


basics.call_on_each_init(print_pid)
hvd.init()
loader = ParquetLoader(sys.argv[1], batch_size=4, framework="torch", seed=3)
plain = torch.optim.SGD(model.parameters(), lr=1.0)
named = [("counts", counts)]


def loss(epoch, batch):
    # Workers that are started in the place of lost ones come before the others have finished.
    time.sleep(0.01 if hvd.size() >= 3 else 0.1)
    return -counts[epoch, batch["row"]].sum()


def end():
    print("result " + json.dumps(counts.tolist()), flush=True)
