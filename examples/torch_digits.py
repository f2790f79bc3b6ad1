# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small network on scikit-learn's scanned digits, every process on its part of them.

farandole run -np 2 python examples/torch_digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import farandole.torch as hvd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--batch-size", type=int, default=32, help="samples of a batch on each process")
parser.add_argument("--epochs", type=int, default=15, help="times every sample is seen")
parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
parser.add_argument("--seed", type=int, default=42, help="of weights and shuffling")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument(
    "--use-adasum", action="store_true", help="combine the processes' steps by Adasum"
)
parser.add_argument(
    "--no-cuda", action="store_true", help="train on the CPU even if there is a GPU"
)
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(arguments.seed)
torch.set_num_threads(1)
device = torch.device("cpu")
if torch.cuda.is_available() and not arguments.no_cuda:
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(arguments.seed))
test, train = order[:360], order[360:]
train_data = TensorDataset(images[train], labels[train])
test_data = TensorDataset(images[test], labels[test])
# Every process sees its part of the data.
train_sampler = DistributedSampler(
    train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed
)
test_sampler = DistributedSampler(
    test_data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
train_loader = DataLoader(train_data, batch_size=arguments.batch_size, sampler=train_sampler)
test_loader = DataLoader(test_data, batch_size=arguments.batch_size, sampler=test_sampler)


class Net(torch.nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.dense1 = torch.nn.Linear(32 * 4 * 4, 64)
        self.dense2 = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ten scores for every image."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.dense2(F.relu(self.dense1(x.flatten(1))))


model = Net().to(device)
# More processes see more samples a step, so the steps may be larger; Adasum finds their size
# itself.
scale = 1 if arguments.use_adasum else hvd.size()
optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr * scale)
# All processes start from the same place.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if arguments.use_adasum else hvd.Average,
)


def average(value: float, name: str) -> float:
    """The mean over all processes."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


for epoch in range(1, arguments.epochs + 1):
    train_sampler.set_epoch(epoch)
    model.train()
    for features, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features.to(device)), target.to(device))
        loss.backward()
        optimizer.step()

    model.eval()
    test_loss = correct = 0.0
    with torch.no_grad():
        for features, target in test_loader:
            output = model(features.to(device))
            test_loss += F.cross_entropy(output, target.to(device), reduction="sum").item()
            correct += (output.argmax(dim=1) == target.to(device)).sum().item()
    test_loss = average(test_loss / len(test_sampler), "test_loss")
    accuracy = average(correct / len(test_sampler), "test_accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.4f}", flush=True)
