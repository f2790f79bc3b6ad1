# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits to a store; all ranks kill themselves once, at step 20."""

import os
import signal
import sys
import time

import torch

import farandole.torch as hvd
from farandole.stores.remote_store import RemoteStore

write = RemoteStore.write_checkpoint


def write_and_print(*arguments):
    print(f"written by {hvd.rank()}", flush=True)
    write(*arguments)


RemoteStore.write_checkpoint = write_and_print
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.save_to(sys.argv[1], "job", every=2)


@hvd.elastic.run
def train(state):
    print(f"begins at {state.step} of {hvd.size()}", flush=True)
    while state.step < 40:
        optimizer.zero_grad()
        (-model(torch.ones(1, 1))).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        time.sleep(0.02)
        if state.step == 20 and not os.path.exists(f"killed-{hvd.rank()}"):
            open(f"killed-{hvd.rank()}", "w").close()
            while not (os.path.exists("killed-0") and os.path.exists("killed-1")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
print(f"ends with {model.weight.item():g} on {hvd.size()}", flush=True)
