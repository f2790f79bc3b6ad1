# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MLRun trains and evaluates a PyTorch model with `use_horovod=True`; a rank of `horovodrun`."""

import os

import horovod.torch as hvd
import torch
from mlrun.frameworks import pytorch as mlrun_torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, RATE = 5, 0.1
torch.manual_seed(0)
rows = torch.randn(16, 3)
labels = rows @ torch.tensor([[1.0], [-2.0], [0.5]])


def mean_absolute_error(predicted, expected):
    return (predicted - expected).abs().mean().item()


def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 1)


model = make_model()
with torch.no_grad():
    # Ranks start with different weights, and rank 0 sends its own.
    model.weight += int(os.environ["HOROVOD_RANK"])
mlrun_torch.train(
    model=model,
    training_set=DataLoader(TensorDataset(rows, labels), batch_size=8),
    validation_set=DataLoader(TensorDataset(rows, labels), batch_size=8),
    loss_function=torch.nn.MSELoss(),
    optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
    metric_functions=[mean_absolute_error],
    epochs=STEPS,
    use_cuda=False,
    auto_log=False,
    modules_map={"torch.nn": "Linear"},
)

# One process with all rows does the same: the two batches of 8 rows are averaged.
plain = make_model()
optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
for _ in range(STEPS):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(plain(rows), labels).backward()
    optimizer.step()
assert torch.allclose(model.weight, plain.weight, atol=1e-5), (model.weight, plain.weight)
assert torch.allclose(model.bias, plain.bias, atol=1e-5)
print(f"rank {hvd.rank()} of {hvd.size()} has the weights of one process", flush=True)
